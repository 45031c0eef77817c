"""Rollouts beside the trainer: groups are generated while it trains (docs/rollout.md)."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import torch

from isoloss.engine.rl.backends.protocol import BesideTraining
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.scoring import GivesRewards, PendingGroup, Scoring
from isoloss.engine.rl.rollout import MAX_ATTEMPTS, Offloadable, Rollout, lost_too_often, outlines
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Request, Sampling, Trajectory
from isoloss.engine.step.engine import Engine

CLOSE_SECONDS = 5.0  # for servers to let go of what is under way when a run ends


class AsyncRollout(Rollout):
    """With rollout.max_staleness = K there are K + 1 batches of prompts in flight when the trainer waits for the oldest
    of them. No token is older than K batches then: a group is begun at most K batches before its own.

    With rollout.over_sample = R > 1 the oldest R batches compete, and a group that was left over is taken next time, a
    batch late. So there are only K - 1 + R of them in flight.

    For an update of the weights, an evaluation or a checkpoint, the servers are told to end what is under way. It comes
    back as partial completions, which go on from there with whatever weights there are then.

    Rank 0 knows what is under way; every rank has the ledger.
    """

    def __init__(
        self,
        engine: Engine,
        backend: BesideTraining,
        rewarder: GivesRewards | None,
        config: RLConfig,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        beside: Sequence[Offloadable] = (),
    ):
        super().__init__(engine, backend, rewarder, config, prompts, stop_token_ids, beside)
        size = config.batch.global_size
        self._more = math.ceil(config.rollout.over_sample * size) - size  # that compete
        self._ahead = config.rollout.max_staleness * size - (size - self._more if self._more else 0)
        self._under_way: InFlight | None = None
        if self._scoring is not None:
            self._under_way = InFlight(backend, self._scoring, self.sampling)

    def collect(self, count: int, prefetch: int = 0) -> list[Group]:
        """As `Rollout.collect`: the oldest in flight, once they are there, or, of the oldest, those that are first."""
        started = time.perf_counter()
        missing = count + prefetch + self._ahead - len(self.ledger.in_flight)
        if missing > 0:
            self._stop()
            self.ledger.draw(missing)
        self._begin()
        competing = self.ledger.in_flight[: count + self._more]
        needed = [draw for draw in competing if not self._more or draw in self.ledger.left_over][:count]
        for _ in range(MAX_ATTEMPTS):
            found = self._rank0.run(
                lambda: self._on_rank_0.wait(competing, needed, count),
                lambda groups: groups and dict(zip(groups, outlines(groups.values()))),
            )
            if found is not None:
                break
            self._stop()
            self.backend.check_health()  # brings lost servers back, or says what is to be done
            self.sync_weights(self.version)
            self._begin()
        else:
            raise lost_too_often(count, count)
        if self._more:
            lengths = {draw: [len(t.completion.tokens) for t in each] for draw, each in found.items()}
            self.ledger.race(lengths, [draw for draw in competing if draw not in found])
        self._seconds["generate_seconds"] += time.perf_counter() - started
        return [Group(draw, each[0].prompt, tuple(each)) for draw, each in found.items()]

    def evaluate(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """As `Rollout.evaluate`; what was under way goes on afterwards."""
        self._stop()
        found = super().evaluate(prompts)
        self._begin()
        return found

    def state(self) -> dict[str, object]:
        """As `Rollout.state`: also what there is of each completion in flight, on rank 0. What was under way goes on
        afterwards."""
        self._stop()
        state = {**super().state(), "completions": self._under_way.state() if self._under_way else []}
        self._begin()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if self._under_way is not None:
            self._under_way.restore(self._in_flight(), state["completions"])

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.close()
        super().close()

    def _begin(self) -> None:
        """Ask for what is in flight and not under way. Enters no collective."""
        if self._under_way is not None:
            self._under_way.begin(self._in_flight())

    def _stop(self) -> None:
        """As `Rollout._stop`."""
        self._rank0.run(lambda: self._on_rank_0.stop())

    def _in_flight(self) -> dict[int, tuple[Prompt, list[str]]]:
        return dict(zip(self.ledger.in_flight, self._asked(self.ledger.in_flight)))

    @property
    def _on_rank_0(self) -> "InFlight":
        assert self._under_way is not None, "this is rank 0"
        return self._under_way


class InFlight:
    """What the servers are generating, and what has come of it. On rank 0; not collective."""

    def __init__(self, backend: BesideTraining, scoring: Scoring, sampling: Sampling):
        self._backend, self._scoring, self._sampling = backend, scoring, sampling
        self._awaited: dict[int, PendingGroup] = {}  # by draw
        self._partial: dict[str, Completion] = {}  # of those that are not complete, by id
        self._result: futures.Future[Sequence[Completion | None]] | None = None

    def begin(self, asked: Mapping[int, tuple[Prompt, list[str]]]) -> None:
        """asked: of each draw in flight the prompt and the ids of its completions, the oldest first. Does nothing where
        it is under way already."""
        if self._result is not None:
            return
        self._expect(asked)
        requests = [
            Request(id, group.prompt.tokens, self._partial.get(id))
            for group in self._awaited.values()
            for id in group.ids
            if id not in group.completions
        ]
        if requests:
            self._result = self._backend.begin(requests, self._sampling, self._scoring.add)
            self._result.add_done_callback(lambda _: self._scoring.wake())

    def wait(self, draws: Sequence[int], needed: Sequence[int], count: int) -> dict[int, list[Trajectory]] | None:
        """`count` of the groups of these draws, with their rewards, in the order of their draws: the needed ones, and
        of the others those that are there first. None where servers were lost before."""

        def chosen(there: Callable[[PendingGroup], bool]) -> list[int] | None:
            found = [draw for draw in draws if there(self._awaited[draw])]
            others = sorted({*found} - {*needed}, key=lambda draw: self._awaited[draw].place or 0)
            first = others[: count - len(needed)]
            enough = {*found} >= {*needed} and len(needed) + len(first) == count
            return sorted([*needed, *first]) if enough else None

        ended = self._result
        is_over = lambda: ended is not None and ended.done() and chosen(lambda group: group.whole) is None
        self._scoring.wait(lambda: chosen(self._scoring.ready) is not None or is_over())
        taken = chosen(self._scoring.ready)
        if taken is None:
            assert ended is not None, "it is over"
            ended.result()  # raises what ended it
            return None
        found = self._scoring.take([self._awaited.pop(draw) for draw in taken])
        return dict(zip(taken, found))

    def stop(self) -> None:
        """End what is under way, and keep what there is of it."""
        if self._result is None:
            return
        ended, self._result = self._result, None
        if not ended.done():
            self._backend.abort()
        for completion in ended.result():
            if completion is not None and completion.finish == "abort":
                self._partial[completion.id] = completion

    def state(self) -> list[tuple]:
        """Of each completion in flight that there is something of."""
        return [to_state(completion) for completion in self._known().values()]

    def restore(self, asked: Mapping[int, tuple[Prompt, list[str]]], state: Sequence[Sequence]) -> None:
        self._expect(asked)
        for completion in map(from_state, state):
            if completion.finish == "abort":
                self._partial[completion.id] = completion
            else:
                self._scoring.add(completion)

    def close(self) -> None:
        if self._result is not None:
            self._backend.abort()
            futures.wait([self._result], CLOSE_SECONDS)

    def _expect(self, asked: Mapping[int, tuple[Prompt, list[str]]]) -> None:
        for draw, (prompt, ids) in asked.items():
            if draw not in self._awaited:
                self._awaited[draw] = self._scoring.expect(prompt, ids)
        ids = {id for group in self._awaited.values() for id in group.ids}
        self._partial = {id: partial for id, partial in self._partial.items() if id in ids}

    def _known(self) -> dict[str, Completion]:
        known: dict[str, Completion] = {}
        for group in self._awaited.values():
            for id in group.ids:
                completion = group.completions.get(id) or self._partial.get(id)
                if completion is not None:
                    known[id] = completion
        return known


def to_state(completion: Completion) -> tuple:
    """In plain containers and tensors."""
    numbers = torch.tensor(completion.tokens[:]), torch.tensor(completion.logprobs[:], dtype=torch.float64)
    return completion.id, *numbers, torch.tensor(completion.versions[:]), completion.finish


def from_state(state: Sequence) -> Completion:
    id, tokens, logprobs, versions, finish = state
    return Completion(id, tokens.tolist(), logprobs.tolist(), versions.tolist(), finish)
