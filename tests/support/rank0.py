"""What the ranks of the tests of rank 0's calls run."""

import torch.distributed as dist

from isoloss.engine.rl.rank0 import RankZero
from isoloss.parallel import UserError, launch


def told(kind: str) -> tuple[str, str, int]:
    """The result of a call on rank 0, or the type and the text of what was raised; and how often it was called here."""
    launch.init_process_group()
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
    launch.init_process_group()
    rank0, rank = RankZero(), dist.get_rank()

    def call() -> None:
        if rank:
            raise KeyError(f"spoiled by {rank}")

    fine, failure = rank0.agree(None), rank0.agree(rank0.attempt_here(call))
    rank0.close()
    return fine, (type(failure).__name__, str(failure))
