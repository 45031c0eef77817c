"""What the ranks of the tests of rank 0's calls run, and what rank 0 has that the others see the outlines of."""

from collections.abc import Sequence

import torch.distributed as dist

from isoloss.engine.rl.trajectory import Absent, Completion
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero
from isoloss.parallel.runtime import process_group


def told(kind: str) -> tuple[str, str, int]:
    """The result of a call on rank 0, or the type and the text of what was raised; and how often it was called here."""
    process_group.init_process_group()
    rank0, calls = RankZero(), []

    def call() -> str:
        calls.append(dist.get_rank())
        if kind == "fine":
            return f"of rank {dist.get_rank()}"
        raise (UserError if kind == "user" else KeyError)("spoiled")

    try:
        found = ("", rank0.run(call))
    except Exception as error:
        found = (type(error).__name__, str(error))
    rank0.close()
    return (*found, len(calls))


def agreed() -> tuple[None, tuple[str, str]]:
    """What ranks agree on that all succeed, and then where all but the first fail."""
    process_group.init_process_group()
    rank0, rank = RankZero(), dist.get_rank()

    def call() -> None:
        if rank:
            raise KeyError(f"spoiled by {rank}")

    fine, failure = rank0.agree(None), rank0.agree(rank0.attempt_here(call))
    rank0.close()
    return fine, (type(failure).__name__, str(failure))


def told_in_part() -> tuple[str, str]:
    """What a rank gets of a result that the others are shown a part of."""
    process_group.init_process_group()
    rank0 = RankZero()
    found = (
        rank0.run(lambda: "whole", lambda result: result[:2]),
        rank0.compute(lambda: "all", lambda result: result[0]),
    )
    rank0.close()
    return found


def of_rank_0(completions: Sequence[Completion | None]) -> list[Completion | None]:
    """Rank 0's, on every rank. The others have outlines of them."""
    told = [list(completions)]
    dist.broadcast_object_list(told, src=0)
    for whole, mine in zip(told[0], completions if dist.get_rank() else (), strict=bool(dist.get_rank())):
        assert (whole is None) == (mine is None)
        if whole is not None and mine is not None:
            assert all(isinstance(each, Absent) for each in (mine.tokens, mine.logprobs, mine.versions))
            assert (mine.id, len(mine.tokens), mine.finish) == (whole.id, len(whole.tokens), whole.finish)
    return told[0]
