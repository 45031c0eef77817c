"""Generate and reward the groups of a batch, and give weights to the backend that generates."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from isoloss.engine.data.dataset import draw_indices
from isoloss.engine.instruments import watchdog
from isoloss.engine.instruments.profiling import phase
from isoloss.engine.rl.agents.agents import Agents
from isoloss.engine.rl.agents.flight import SessionFlight
from isoloss.engine.rl.backends.protocol import RolloutBackend
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.in_flight import Asked, Choice, InFlight
from isoloss.engine.rl.prompt_ledger import Ledger
from isoloss.engine.rl.prompts import PromptSet
from isoloss.engine.rl.reward.rewarder import check_rewarded
from isoloss.engine.rl.reward.scoring import GivesRewards, Scoring
from isoloss.engine.rl.routes import RoutesForm
from isoloss.engine.rl.trajectory import Group, Prompt, Sampling, Trajectory
from isoloss.engine.step.engine import Engine
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero

MAX_ATTEMPTS = 10  # attempts at a batch whose servers are lost, before the run gives up
MAX_SYNCS = 3  # attempts at an update of the weights


class Offloadable(Protocol):
    """A part of the trainer that is on the device."""

    def offload(self) -> None: ...


class Rollout:
    """The backend, its updates with the trainer's weights, and the rewards of its completions.

    With rollout.max_staleness = K there are K + 1 batches of prompts in flight when the trainer waits for the oldest
    of them. No token is older than K batches then: a group is begun at most K batches before its own. With
    rollout.over_sample = R > 1 the oldest R batches compete, and a group that was left over is taken next time, a
    batch late. So there are only K - 1 + R of them in flight.

    For an update of the weights, an evaluation or a checkpoint, requests in flight are aborted. Their partial
    completions go on afterwards, with the weights of that time.

    Rank 0 knows the completions in flight; every rank has the ledger.

    rewarder: rewarder on rank 0; None on the others.
    agents: sessions of environment.program on rank 0, which give the rewards then; None on the others.
    prompts: prompts to train on.
    offloadables: parts of the trainer on the device other than the engine; with rollout.colocated they are offloaded
        with it, before the backend needs the memory, and come back when they are next used.
    ledger: draws of prompts, and what became of each.
    calls: number of times that groups were waited for.
    """

    def __init__(
        self,
        engine: Engine,
        backend: RolloutBackend,
        rewarder: GivesRewards | None,
        config: RLConfig,
        prompts: PromptSet,
        stop_token_ids: tuple[int, ...],
        offloadables: Sequence[Offloadable] = (),
        agents: Agents | None = None,
    ):
        self.engine, self.backend = engine, backend
        self._prompts, self._order = prompts.prompts, prompts.order
        self._seed, self._generations = config.train.seed, config.rollout.num_generations
        self._rewarded_by = config.rewarded_by
        self._rank0 = RankZero(patient=watchdog.patient)
        self._offloadables, self._colocated = offloadables, config.rollout.colocated
        self._overlaps = config.overlaps_generation
        size = config.batch.global_size
        self._more = math.ceil(config.rollout.over_sample * size) - size  # groups that compete
        self._ahead = config.rollout.max_staleness * size - (size - self._more if self._more else 0)
        self._bucket_bytes = config.rollout.bucket_mb << 20
        self.sampling = Sampling(
            config.rollout.max_new_tokens,
            config.rollout.temperature,
            stop_token_ids=stop_token_ids,
            seed=config.train.seed,
            routes=RoutesForm.of(engine.arch) if config.rollout.routing_replay else None,
        )
        self._eval_sampling = replace(
            self.sampling, temperature=config.eval_temperature, top_p=config.rollout.eval_top_p, routes=None
        )
        self._agents = agents
        self._scoring = None if rewarder is None else Scoring(rewarder)
        self._in_flight = self._flight(self.sampling)
        self.ledger = Ledger()
        self.version = -1
        self.calls = 0
        self._seconds = {"generate_seconds": 0.0, "sync_seconds": 0.0}

    def close(self) -> None:
        """Stop the rewards and leave the process group. Collective over the world."""
        if self._scoring is not None:
            self._scoring.close()
        self._rank0.close()

    def state(self) -> dict[str, object]:
        """Return plain containers and tensors for a checkpoint; completions in flight are on rank 0, and go on
        afterwards. Collective over the world."""
        if not self._overlaps:
            return {"ledger": self.ledger.state()}
        self._stop()
        state = {"ledger": self.ledger.state(), "completions": self._in_flight.state() if self._in_flight else []}
        self._begin()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. Enters no collective."""
        self.ledger = Ledger.from_state(state["ledger"])
        if self._in_flight is not None:
            self._in_flight.restore(self._asked(self.ledger.in_flight), state.get("completions", ()))

    @phase("sync weights")
    def sync_weights(self, version: int) -> None:
        """Let the backend serve the engine's present weights under this number, if it does not do so already.

        Collective over the world.
        """
        started = time.perf_counter()
        self.version = version
        for left in reversed(range(MAX_SYNCS)):
            if self.backend.weight_version() == version:
                break
            try:
                if self._overlaps:
                    self._stop()
                self._leave_device(weights=False)
                stream = self.engine.adapter_stream if self.backend.takes_adapter else self.engine.weight_stream
                self.backend.update_weights(stream(self._bucket_bytes, self.backend.receives), version)
            except UserError:
                if not left:
                    raise
                self.backend.check_health()  # brings lost servers back, or raises with a remedy
        self._seconds["sync_seconds"] += time.perf_counter() - started

    def _flight(self, sampling: Sampling) -> InFlight | None:
        if self._agents is not None:
            return SessionFlight(self.backend, self._agents, sampling)
        return None if self._scoring is None else InFlight(self.backend, self._scoring, sampling)

    def _begin(self) -> None:
        """Submit the groups in flight that are not submitted. Enters no collective."""
        if self._in_flight is not None:
            self._in_flight.begin(self._asked(self.ledger.in_flight))

    def _stop(self) -> None:
        """End the requests in flight and keep their tokens. Collective over the world."""
        self.backend.serve(self._rank0.compute(lambda: here(self._in_flight).abort(), shown=nothing))
        self._rank0.compute(lambda: here(self._in_flight).harvest())

    def _leave_device(self, *, weights: bool = True) -> None:
        """Offload the trainer on every rank, with rollout.colocated. weights: False keeps the policy's weights, which
        the backend is about to be sent. Collective over the world."""
        if self._colocated:
            self.engine.offload(weights=weights)
            for part in self._offloadables:
                part.offload()
            self._rank0.meet()

    def take_seconds(self) -> dict[str, float]:
        """Return generate_seconds (rewards included) and sync_seconds since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def take_counts(self) -> dict[str, int]:
        """Return the backend's counts: see `RolloutBackend`."""
        return self.backend.take_counts()

    def collect(self, count: int, prefetch: int = 0) -> list[Group]:
        """Return `count` rewarded groups, rollout.num_generations completions each, in the order of their draws; their
        outlines on ranks but 0. They are the oldest in flight, or the first of the oldest to be whole. The ledger has
        them in flight until its caller trains or drops them.

        prefetch: number of groups to be taken next, which servers begin already.
        Collective over the world.
        """
        wanted = count + (prefetch + self._ahead if self._overlaps else 0)
        self.ledger.draw(max(0, wanted - len(self.ledger.in_flight)))
        competing = self.ledger.in_flight[: count + self._more]
        needed = [draw for draw in competing if not self._more or draw in self.ledger.left_over][:count]
        asked = self._asked(self.ledger.in_flight)
        groups = self._rewarded(self._in_flight, asked, Choice(competing, needed, count))
        if self._more:
            lengths = {draw: [t.length for t in each] for draw, each in groups.items()}
            self.ledger.race(lengths, [draw for draw in competing if draw not in groups])
        return [Group(draw, asked[draw][0], tuple(each)) for draw, each in groups.items()]

    def token_ages(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return staleness_mean and staleness_max of the groups' tokens, in batches. Collective over the world."""

        def ages() -> dict[str, float]:
            tokens_of: Counter[int] = Counter()
            for completion in (c for group in groups for t in group.trajectories for c in t.completions):
                distinct, tokens = np.unique(np.asarray(completion.versions), return_counts=True)
                tokens_of.update(dict(zip(distinct.tolist(), tokens.tolist())))
            age_of = dict(zip(tokens_of, self.ledger.staleness(tokens_of)))
            mean = sum(age_of[version] * tokens for version, tokens in tokens_of.items()) / max(tokens_of.total(), 1)
            return {"staleness_mean": mean, "staleness_max": max(age_of.values(), default=0)}

        return self._rank0.compute(ages)

    def _asked(self, draws: Sequence[int]) -> Asked:
        """Return the prompt of each draw and the ids of its completions."""
        if not draws:
            return {}
        first = min(draws)
        indices = draw_indices(self._order, first, max(draws) - first + 1, self._seed).tolist()
        prompts = [self._prompts[indices[draw - first]] for draw in draws]
        return {
            draw: (prompt, [f"{prompt.id}/{draw}/{k}" for k in range(self._generations)])
            for draw, prompt in zip(draws, prompts)
        }

    def evaluate(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """Return one rewarded completion of each prompt, with the same randomness every time; outlines on ranks but 0.
        Requests in flight go on afterwards. Collective over the world.

        Raises UserError where none could be rewarded.
        """
        if self._overlaps:
            self._stop()
        asked = {number: (prompt, [f"{prompt.id}/eval/0"]) for number, prompt in enumerate(prompts)}
        choice = Choice(range(len(prompts)), range(len(prompts)), len(prompts))
        groups = self._rewarded(self._flight(self._eval_sampling), asked, choice)
        trajectories = [only for (only,) in groups.values()]
        check_rewarded(trajectories, self._rewarded_by)
        self.take_seconds()  # with its seconds of weight sync: they belong to no step
        if self._overlaps:
            self._begin()
        return trajectories

    def _rewarded(self, flight: InFlight | None, asked: Asked, choice: Choice) -> dict[int, list[Trajectory]]:
        """Return the chosen groups by draw. Where servers are lost meanwhile, sync the weights and submit again."""
        self.calls += 1
        started = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            self._generate(flight, asked, choice)
            with phase("rewards"):
                groups = self._rank0.run(lambda: here(flight).take(choice), outlines)
            if groups is not None:
                self._seconds["generate_seconds"] += time.perf_counter() - started
                return groups
            self.backend.check_health()  # with the device to themselves, as servers take memory when they start
            self.sync_weights(self.version)
        raise lost_too_often(*self._rank0.compute(lambda: here(flight).missing(choice)))

    @phase("generate")
    def _generate(self, flight: InFlight | None, asked: Asked, choice: Choice) -> None:
        """Submit the groups that are not in flight, and generate until the chosen ones are whole."""

        def submit() -> Future[None]:
            here(flight).begin(asked)
            return here(flight).goal(choice)

        self._leave_device()
        self.backend.serve(self._rank0.compute(submit, shown=nothing))


def here(flight: InFlight | None) -> InFlight:
    assert flight is not None, "this is rank 0"
    return flight


def nothing(goal: Any) -> None:
    """Return nothing of a future to ranks other than 0."""


def outlines(groups: dict[int, list[Trajectory]] | None) -> dict[int, list[Trajectory]] | None:
    return groups and {draw: [trajectory.outline() for trajectory in each] for draw, each in groups.items()}


def lost_too_often(lost: int, asked: int) -> UserError:
    return UserError(
        f"rollout: {lost} of {asked} completions were lost with their servers {MAX_ATTEMPTS} times in a row; look at "
        "the servers' logs"
    )
