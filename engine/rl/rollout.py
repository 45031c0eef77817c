"""Prompts -> completions -> rewards: the groups of a batch; and the weights that go the other way."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from isoloss.engine.data.dataset import draw_indices
from isoloss.engine.instruments import watchdog
from isoloss.engine.instruments.profiling import phase
from isoloss.engine.rl.backends.protocol import Arrived, RolloutBackend, ignore
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.prompt_ledger import Ledger
from isoloss.engine.rl.reward.rewarder import check_rewarded
from isoloss.engine.rl.reward.scoring import GivesRewards, Scoring
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Request, Sampling, Trajectory
from isoloss.engine.step.engine import Engine
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero

# How often a batch is asked for again after servers were lost, before the run gives up.
MAX_ATTEMPTS = 10
MAX_SYNCS = 3  # the same for an update of the weights


class Offloadable(Protocol):
    """Something of the trainer that is on the device."""

    def offload(self) -> None: ...


class Rollout:
    """The backend, the trainer's weights that it has to serve, and the rewards of what it generates.

    rewarder: of rank 0; None on the others.
    prompts: to train on.
    beside: what else the trainer has on the device; with rollout.colocated it leaves, as the engine does, before the
        backend needs the memory, and comes back when it is next used.
    ledger: of the prompts that were drawn.
    calls: how many batches were asked of the backend, whatever the number of micro-batches and ranks.
    """

    def __init__(
        self,
        engine: Engine,
        backend: RolloutBackend,
        rewarder: GivesRewards | None,
        config: RLConfig,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        beside: Sequence[Offloadable] = (),
    ):
        self.engine, self.backend, self._prompts = engine, backend, prompts
        self._scoring = None if rewarder is None else Scoring(rewarder)
        self._seed, self._generations = config.train.seed, config.rollout.num_generations
        self._reward = config.reward
        self._rank0 = RankZero(patient=watchdog.patient)
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
        self.ledger = Ledger()
        self.version = -1
        self.calls = 0
        self._seconds = {"generate_seconds": 0.0, "sync_seconds": 0.0}

    def close(self) -> None:
        """Collective over the world."""
        if self._scoring is not None:
            self._scoring.close()
        self._rank0.close()

    def state(self) -> dict[str, object]:
        """For a checkpoint, in plain containers and tensors; what is rank 0's alone is there. Collective over the
        world."""
        return {"ledger": self.ledger.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. Enters no collective."""
        self.ledger = Ledger.from_state(state["ledger"])

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
                self._stop()
                self._leave_device(weights=False)
                weights = self.engine.weight_stream(self._bucket_bytes, self.backend.receives)
                self.backend.update_weights(weights, version)
            except UserError:
                if not left:
                    raise
                self.backend.check_health()  # brings lost servers back, or says what is to be done
        self._seconds["sync_seconds"] += time.perf_counter() - started

    def _stop(self) -> None:
        """Nothing is under way on the backend after this. Collective over the world."""

    def _leave_device(self, *, weights: bool = True) -> None:
        """With rollout.colocated: the trainer leaves the device, on every rank. weights: False: but for the policy's
        weights, which the backend is about to be sent. Collective over the world."""
        if self._colocated:
            self.engine.offload(weights=weights)
            for tenant in self._beside:
                tenant.offload()
            self._rank0.meet()

    def take_seconds(self) -> dict[str, float]:
        """generate_seconds (rewards included) and sync_seconds since it was last asked for."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def take_counts(self) -> dict[str, int]:
        """See `RolloutBackend`."""
        return self.backend.take_counts()

    def collect(self, count: int, prefetch: int = 0) -> list[Group]:
        """Rewarded completions of the next `count` prompts, rollout.num_generations of each, in the order of their
        draws; their outlines on ranks but 0. The ledger has them in flight until it is told what becomes of them.

        prefetch: how many will be asked for next, which may be begun already.
        Collective over the world.
        """
        self.ledger.draw(count)
        asked = self._asked(self.ledger.in_flight)
        rewarded = self._rewarded([prompt for prompt, _ in asked], [ids for _, ids in asked], self.sampling)
        return [
            Group(draw, prompt, tuple(trajectories))
            for draw, (prompt, _), trajectories in zip(self.ledger.in_flight, asked, rewarded)
        ]

    def token_ages(self, groups: Sequence[Group]) -> dict[str, float]:
        """staleness_mean, staleness_max: of their tokens, in batches. Collective over the world."""

        def ages() -> dict[str, float]:
            tokens_of: Counter[int] = Counter()
            for versions in (t.completion.versions for group in groups for t in group.trajectories):
                distinct, tokens = np.unique(np.asarray(versions), return_counts=True)
                tokens_of.update(dict(zip(distinct.tolist(), tokens.tolist())))
            age_of = dict(zip(tokens_of, self.ledger.staleness(tokens_of)))
            mean = sum(age_of[version] * tokens for version, tokens in tokens_of.items()) / max(tokens_of.total(), 1)
            return {"staleness_mean": mean, "staleness_max": max(age_of.values(), default=0)}

        return self._rank0.compute(ages)

    def _asked(self, draws: Sequence[int]) -> list[tuple[Prompt, list[str]]]:
        """Of each draw the prompt, and the ids of its completions."""
        if not draws:
            return []
        first = min(draws)
        indices = draw_indices(len(self._prompts), first, max(draws) - first + 1, self._seed).tolist()
        prompts = [self._prompts[indices[draw - first]] for draw in draws]
        return [
            (prompt, [f"{prompt.id}/{draw}/{k}" for k in range(self._generations)])
            for draw, prompt in zip(draws, prompts)
        ]

    def evaluate(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """One rewarded completion of each prompt, with the same randomness every time; their outlines on ranks but 0.
        Collective over the world.

        Raises UserError where none could be rewarded.
        """
        ids = [[f"{prompt.id}/eval/0"] for prompt in prompts]
        trajectories = [only for (only,) in self._rewarded(prompts, ids, self._eval_sampling)]
        check_rewarded(trajectories, self._reward)
        self.take_seconds()  # with those of the weights that it needed: they belong to no step
        return trajectories

    def _rewarded(
        self, prompts: Sequence[Prompt], ids: Sequence[Sequence[str]], sampling: Sampling
    ) -> list[list[Trajectory]]:
        """A group of each prompt. ids: of its completions."""
        started = time.perf_counter()
        requests = [Request(id, prompt.tokens) for prompt, of_group in zip(prompts, ids) for id in of_group]
        scoring = self._scoring
        awaited = [scoring.expect(*each) for each in zip(prompts, ids)] if scoring else []
        completions = self._generate(requests, sampling, scoring.add if scoring else ignore)

        def rewards() -> list[list[Trajectory]]:
            assert scoring is not None, "this is rank 0"
            for completion in completions:  # those of other ranks
                scoring.add(completion)
            return scoring.take(awaited)

        with phase("rewards"):
            rewarded = self._rank0.run(rewards, outlines)
        self._seconds["generate_seconds"] += time.perf_counter() - started
        return rewarded

    @phase("generate")
    def _generate(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = ignore) -> list[Completion]:
        """Ask, and where servers were lost on the way see to the weights and ask for the rest again."""
        self.calls += 1
        completions: dict[str, Completion] = {}
        pending = list(requests)
        for _ in range(MAX_ATTEMPTS):
            self._leave_device()
            answers = self.backend.generate(pending, sampling, arrived)
            completions |= {answer.id: answer for answer in answers if answer is not None}
            pending = [request for request in pending if request.id not in completions]
            if not pending:
                return list(completions.values())
            self.backend.check_health()  # with the device to themselves, as servers take memory when they start
            self.sync_weights(self.version)
        raise lost_too_often(len(pending), len(requests))


def outlines(groups: Iterable[Iterable[Trajectory]]) -> list[list[Trajectory]]:
    return [[trajectory.outline() for trajectory in group] for group in groups]


def lost_too_often(lost: int, asked: int) -> UserError:
    return UserError(
        f"rollout: {lost} of {asked} completions were lost with their servers {MAX_ATTEMPTS} times in a row; look at "
        "the servers' logs"
    )


@dataclass
class SampledGroups:
    """What is sampled for a batch; whole when its waves have been taken.

    waves: the groups to learn from, as they come.
    kept: all of them, in the order of their draws.
    dropped: those that dynamic sampling left out, for having no variance.
    counts: of the ledger, and how old the tokens of what is kept are, by the names of metrics.
    """

    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)
    waves: Iterator[list[Group]] = field(default_factory=lambda: iter(()))


def sample_groups(rollout: Rollout, config: RLConfig) -> SampledGroups:
    """The groups of a batch, generated and rewarded as their waves are taken: batch.global_size of them, or with
    dynamic sampling as many that have variance.

    rollout.waves come in the first round, one in each other, and their groups follow from the order of the prompts, not
    from who is ready first.

    A round takes exactly what is still missing, so nothing is generated and then left over; what is dropped is logged.
    (DAPO, arXiv 2503.14476, section 3.2.)
    Raises UserError where dynamic sampling finds too few and algorithm.on_shortage says so, or finds none, and where
    nothing that was drawn could be rewarded.
    """
    sampled = SampledGroups()
    sampled.waves = _waves(rollout, sampled, config)
    return sampled


def _waves(rollout: Rollout, sampled: SampledGroups, config: RLConfig) -> Iterator[list[Group]]:
    algorithm, wanted, ledger = config.algorithm, config.batch.global_size, rollout.ledger
    ledger.begin_batch(rollout.version, config.rollout.max_staleness)
    kept, dropped = sampled.kept, sampled.dropped
    for sampled.rounds in range(1, algorithm.max_draws + 1):
        missing = wanted - len(kept)
        sizes = wave_sizes(missing, config.rollout.waves if sampled.rounds == 1 else 1)
        for number, size in enumerate(sizes):
            wave = []
            for group in rollout.collect(size, prefetch=sum(sizes[number + 1 :])):
                if algorithm.dynamic_sampling and not group.varied:
                    ledger.drop(group.draw, "no_variance" if group.rewarded else "reward_failed")
                    dropped.append(group)
                else:
                    ledger.train(group.draw)
                    wave.append(group)
            kept += wave
            if wave:
                yield wave
        check_rewarded([t for group in (*kept, *dropped) for t in group.trajectories], config.reward)
        enough = len(kept) == wanted
        if enough:
            break
    if not enough and (algorithm.on_shortage == "error" or not kept):
        solved = sum(any(t.valid and t.reward > 0 for t in group.trajectories) for group in dropped)
        raise UserError(
            f"dynamic sampling: after algorithm.max_draws={algorithm.max_draws} rounds only {len(kept)} of "
            f"batch.global_size={wanted} groups have rewards that differ ({len(dropped)} dropped, "
            f"{solved} of them all right); raise max_draws or rollout.num_generations, choose prompts of "
            "medium difficulty" + (", or set algorithm.on_shortage=smaller" if kept else "")
        )
    lengths = ledger.mean_lengths() if config.rollout.over_sample > 1 else {}
    sampled.counts = {**ledger.counts(), **lengths, **rollout.token_ages(kept)}


def wave_sizes(groups: int, waves: int) -> list[int]:
    """As even as can be, and none of 0."""
    waves = min(waves, groups)
    return [(n + 1) * groups // waves - n * groups // waves for n in range(waves)]
