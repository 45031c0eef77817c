"""Prompts -> completions -> rewards: the groups of a batch; and the weights that go the other way."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from isoloss.engine.data import draw_indices
from isoloss.engine.engine import Engine
from isoloss.engine.rl.backends.protocol import RolloutBackend
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.rank0 import RankZero
from isoloss.engine.rl.reward.rewarder import Scored, check_rewarded
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Request, Sampling, Trajectory
from isoloss.parallel import UserError

# How often a batch is asked for again after servers were lost, before the run gives up.
MAX_ATTEMPTS = 10
MAX_SYNCS = 3  # the same for an update of the weights
Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[Scored]]


class Tenant(Protocol):
    """Something of the trainer that is on the device."""

    def leave_device(self) -> None: ...


class Rollout:
    """The backend, the trainer's weights that it has to serve, and the rewards of what it generates.

    score: prompts and completions -> rewards and texts; called on rank 0.
    prompts: to train on.
    beside: what else the trainer has on the device; with rollout.colocated it leaves, as the engine does, before the
        backend needs the memory, and comes back when it is next used.
    calls: how many batches were asked of the backend, whatever the number of micro-batches and ranks.
    """

    def __init__(
        self,
        engine: Engine,
        backend: RolloutBackend,
        score: Score,
        config: RLConfig,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        beside: Sequence[Tenant] = (),
    ):
        self.engine, self.backend, self._score, self._prompts = engine, backend, score, prompts
        self._seed, self._generations = config.train.seed, config.rollout.num_generations
        self._reward = config.reward
        self._rank0 = RankZero()
        self._beside, self._colocated = beside, config.rollout.colocated
        self._bucket_bytes = config.rollout.bucket_mb << 20
        self.sampling = Sampling(
            config.rollout.max_new_tokens,
            config.rollout.temperature,
            stop_token_ids=stop_token_ids,
            seed=config.train.seed,
        )
        self._eval_sampling = replace(
            self.sampling, temperature=config.eval_temperature, top_p=config.rollout.eval_top_p
        )
        self.version = -1
        self.calls = 0
        self._seconds = {"generate_seconds": 0.0, "sync_seconds": 0.0}

    def close(self) -> None:
        """Collective over the world."""
        self._rank0.close()

    def sync_weights(self, version: int) -> None:
        """Let the backend serve the engine's present weights under this number, if it does not do so already.

        Collective over the world.
        """
        started = time.perf_counter()
        self.version = version
        for left in reversed(range(MAX_SYNCS)):
            if self.backend.weight_version() == version:
                break
            self._leave_device(weights=False)
            try:
                weights = self.engine.weight_stream(self._bucket_bytes, self.backend.receives)
                self.backend.update_weights(weights, version)
            except UserError:
                if not left:
                    raise
                self.backend.check_health()  # brings lost servers back, or says what is to be done
        self._seconds["sync_seconds"] += time.perf_counter() - started

    def _leave_device(self, *, weights: bool = True) -> None:
        """With rollout.colocated: the trainer leaves the device, on every rank. weights: False: but for the policy's
        weights, which the backend is about to be sent. Collective over the world."""
        if self._colocated:
            self.engine.leave_device(weights=weights)
            for tenant in self._beside:
                tenant.leave_device()
            self._rank0.meet()

    def take_seconds(self) -> dict[str, float]:
        """generate_seconds (rewards included) and sync_seconds since it was last asked for."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def take_counts(self) -> dict[str, int]:
        """See `RolloutBackend`."""
        return self.backend.take_counts()

    def groups(self, first_draw: int, num_prompts: int) -> list[Group]:
        """Rewarded completions of the next prompts, rollout.num_generations of each; the same on every rank.

        first_draw: prompts that the run has drawn before.
        Collective over the world.
        """
        count = self._generations
        drawn = draw_indices(len(self._prompts), first_draw, num_prompts, self._seed)
        prompts = [self._prompts[index] for index in drawn.tolist()]
        ids = [f"{prompt.id}/{first_draw + index}" for index, prompt in enumerate(prompts)]
        trajectories = self._trajectories(prompts, ids, count, self.sampling)
        return [
            Group(first_draw + index, prompt, tuple(trajectories[index * count : (index + 1) * count]))
            for index, prompt in enumerate(prompts)
        ]

    def evaluate(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """One rewarded completion of each prompt, with the same randomness every time. Collective over the world.

        Raises UserError where none could be rewarded.
        """
        ids = [f"{prompt.id}/eval" for prompt in prompts]
        trajectories = self._trajectories(prompts, ids, 1, self._eval_sampling)
        check_rewarded(trajectories, self._reward)
        self.take_seconds()  # with those of the weights that it needed: they belong to no step
        return trajectories

    def _trajectories(
        self, prompts: Sequence[Prompt], ids: Sequence[str], count: int, sampling: Sampling
    ) -> list[Trajectory]:
        started = time.perf_counter()
        asked = [(prompt, f"{id}/{k}") for prompt, id in zip(prompts, ids) for k in range(count)]
        completions = self._generate([Request(id, prompt.tokens) for prompt, id in asked], sampling)
        prompts_S = [prompt for prompt, _ in asked]
        scored = self._rank0.run(lambda: self._score(prompts_S, completions))
        self._seconds["generate_seconds"] += time.perf_counter() - started
        return [
            Trajectory(prompt, completion, result.text, result.reward, result.parts, result.error)
            for prompt, completion, result in zip(prompts_S, completions, scored, strict=True)
        ]

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Ask, and where servers were lost on the way see to the weights and ask for the rest again."""
        self.calls += 1
        completions: dict[str, Completion] = {}
        pending = list(requests)
        for _ in range(MAX_ATTEMPTS):
            self._leave_device()
            answers = self.backend.generate(pending, sampling)
            completions |= {answer.id: answer for answer in answers if answer is not None}
            pending = [request for request in pending if request.id not in completions]
            if not pending:
                return [completions[request.id] for request in requests]
            self.backend.check_health()  # with the device to themselves, as servers take memory when they start
            self.sync_weights(self.version)
        raise UserError(
            f"rollout: {len(pending)} of {len(requests)} completions were lost with their servers {MAX_ATTEMPTS} times "
            "in a row; look at the servers' logs"
        )


@dataclass(frozen=True)
class SampledGroups:
    """What was sampled for a batch.

    kept: the groups to learn from, in the order of their draws.
    dropped: those that dynamic sampling left out, for having no variance.
    cursor: prompts that the run has drawn so far.
    """

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    rounds: int
    cursor: int


def sample_groups(rollout: Rollout, cursor: int, config: RLConfig) -> SampledGroups:
    """The groups of a batch: batch.global_size of them, or with dynamic sampling as many that have variance.

    cursor: prompts drawn before. A round draws exactly what is still missing, so nothing is generated and then left
    over; what is dropped is logged. (DAPO, arXiv 2503.14476, section 3.2.)
    Raises UserError where dynamic sampling finds too few and algorithm.on_shortage says so, or finds none, and where
    nothing that was drawn could be rewarded.
    """
    algorithm, wanted = config.algorithm, config.batch.global_size
    kept: list[Group] = []
    dropped: list[Group] = []
    for rounds in itertools.count(1):
        missing = wanted - len(kept)
        groups = rollout.groups(cursor, missing)
        cursor += missing
        for group in groups:
            (dropped if algorithm.dynamic_sampling and not group.varied else kept).append(group)
        check_rewarded([t for group in (*kept, *dropped) for t in group.trajectories], config.reward)
        enough = len(kept) == wanted
        if enough or rounds == algorithm.max_draws:
            break
    if not enough and (algorithm.on_shortage == "error" or not kept):
        solved = sum(any(t.valid and t.reward > 0 for t in group.trajectories) for group in dropped)
        raise UserError(
            f"dynamic sampling: after algorithm.max_draws={algorithm.max_draws} rounds only {len(kept)} of "
            f"batch.global_size={wanted} groups have rewards that differ ({len(dropped)} dropped, "
            f"{solved} of them all right); raise max_draws or rollout.num_generations, choose prompts of "
            "medium difficulty" + (", or set algorithm.on_shortage=smaller" if kept else "")
        )
    return SampledGroups(tuple(kept), tuple(dropped), rounds, cursor)
