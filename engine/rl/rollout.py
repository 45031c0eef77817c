"""Prompts -> completions -> rewards, and the weights that go the other way."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from isoloss.engine.engine import Engine
from isoloss.engine.rl.backends.protocol import Bucket, RolloutBackend
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.prompts import prompt_order
from isoloss.engine.rl.rank0 import RankZero
from isoloss.engine.rl.reward.rewarder import Scored, check_rewarded
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Request, Sampling, Trajectory
from isoloss.parallel import UserError

# How often a batch is asked for again after servers were lost, before the run gives up.
MAX_ATTEMPTS = 10
MAX_SYNCS = 3  # the same for an update of the weights
Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[Scored]]


class Rollout:
    """The backend, the trainer's weights that it has to serve, and the rewards of what it generates.

    score: prompts and completions -> rewards and texts; called on rank 0. prompts: to train on.
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
    ):
        self.engine, self.backend, self._score, self._prompts = engine, backend, score, prompts
        self._seed, self._generations = config.train.seed, config.rollout.num_generations
        self._reward = config.reward
        self._rank0 = RankZero()
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
            try:
                self.backend.update_weights(self._weights(), version)
            except UserError:
                if not left:
                    raise
                self.backend.check_health()  # brings lost servers back, or says what is to be done
        self._seconds["sync_seconds"] += time.perf_counter() - started

    def _weights(self) -> Iterator[Bucket]:
        return self.engine.weight_stream(self._bucket_bytes, self.backend.receives)

    def take_seconds(self) -> dict[str, float]:
        """generate_seconds (rewards included) and sync_seconds since it was last asked for."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def groups(self, first_draw: int, num_prompts: int) -> list[Group]:
        """Rewarded completions of the next prompts, rollout.num_generations of each; the same on every rank.

        first_draw: prompts that the run has drawn before. Collective over the world.
        """
        count = self._generations
        drawn = prompt_order(len(self._prompts), first_draw, num_prompts, self._seed)
        prompts = [self._prompts[index] for index in drawn]
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
            answers = self.backend.generate(pending, sampling)
            completions |= {answer.id: answer for answer in answers if answer is not None}
            pending = [request for request in pending if request.id not in completions]
            if not pending:
                return [completions[request.id] for request in requests]
            self.backend.check_health()
            self.sync_weights(self.version)
        raise UserError(
            f"rollout: {len(pending)} of {len(requests)} completions were lost with their servers {MAX_ATTEMPTS} times "
            "in a row; look at the servers' logs"
        )
