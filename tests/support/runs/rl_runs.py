"""Runs of the reinforcement learning loop with a model so small that one takes seconds; on every rank of a pool."""

import contextlib
import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from isoloss.engine.rl import loop
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.experience import samples_of
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.trajectory import Completion, Turn
from isoloss.engine.run.run import BadStepGuard, Run
from isoloss.engine.step.engine import Engine
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.prove.proof import on_layout
from support.ranks.rank0 import of_rank_0
from support.runs.phases import GRPO, watch
from support.runs.runs import write_model, write_rows
from support.runs.training import Arrays, Killed, weights

# A model of random weights says random things: rewards that vary are made of its token ids.
REWARDS = """
def quarters(completion_tokens):
    return sum(completion_tokens) % 4 / 4

def coin(completion_tokens):
    return sum(completion_tokens) % 2
"""
PROMPTS = 5


def write_inputs(folder: Path) -> Path:
    """`model` (config.json and tokenizer, no weights), `prompts.jsonl` (five of different lengths), `rewards.py`."""
    model = write_model(folder / "model", num_layers=2)
    stop = list(range(3, 1000, 16))  # so that completions end at different lengths
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    # U+2028 ends a line for str.splitlines, and not for JSON Lines.
    rows = [{"prompt": "Add up:\u2028" + "1 + " * n + "1 =", "answer": n + 1} for n in range(PROMPTS)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def overrides_of(inputs: Path, out: Path | str) -> list[str]:
    """Of a run of three steps, each with two prompts x four completions of its own."""
    return [
        f"model.path={inputs}/model",
        "model.from_scratch=true",
        f"data.train={inputs}/prompts.jsonl",
        "data.max_length=128",
        "batch.global_size=2",
        "batch.max_tokens=160",
        "optim.lr=1e-2",
        "optim.schedule=constant",
        "train.steps=3",
        "train.gc_every=0",  # as in fixtures.py of support.suite
        "rollout.num_generations=4",
        "rollout.max_new_tokens=12",
        "rollout.concurrency=16",
        f"reward.function={inputs}/rewards.py:quarters",
        "reward.workers=1",
        "checkpoint.export_hf=false",
        f"output_dir={out}",
    ]


def config_of(inputs: Path, out: Path | str, layout: str = "1", *overrides: str, precision: str = "fp32") -> RLConfig:
    config = compose_config("grpo", RLConfig, [*overrides_of(inputs, out), *overrides])[0]
    config = on_layout(config, Layout.parse(layout), precision)
    return replace(config, parallel=replace(config.parallel, distributed_optimizer=None))  # as the recipe has it


def train(
    config: RLConfig,
    killed_after: int | None = None,
    killed_in_save: int | None = None,
    without: str | None = None,
) -> Arrays:
    """The loop; weights of policy and critic when the last checkpoint was due. Or killed after that step, or between
    the critic's and the policy's checkpoint of that step. without: completions whose id ends so are taken out."""
    kept: Arrays = {}
    save, write, check, groups = loop.save, Run.save, BadStepGuard.check, Rollout.collect

    def keep_weights(run, critic, *rest):
        kept.update(weights(run._engine))
        if critic:
            kept.update({f"critic/{name}": weight for name, weight in weights(critic._engine).items()})
        save(run, critic, *rest)

    def write_or_die(run, *rest):
        if run.done == killed_in_save:
            raise Killed
        write(run, *rest)

    def check_or_die(self, step, *rest):
        if step == killed_after:
            raise Killed
        check(self, step, *rest)

    def fewer(self, *args, **options):
        found = groups(self, *args, **options)
        if without is None:
            return found
        return [
            replace(group, trajectories=tuple(t for t in group.trajectories if not t.completion.id.endswith(without)))
            for group in found
        ]

    with (
        mock.patch.object(Rollout, "collect", fewer),
        mock.patch.object(loop, "save", keep_weights),
        mock.patch.object(Run, "save", write_or_die),
        mock.patch.object(BadStepGuard, "check", check_or_die),
        contextlib.suppress(*((Killed,) if killed_after or killed_in_save else ())),
    ):
        loop.train_rl(config, "test")
        assert not (killed_after or killed_in_save)
    return kept


def train_and_count(config: RLConfig) -> tuple[Arrays, list[int]]:
    """`train`, and the optimizer steps that it did."""
    steps: list[int] = []
    log = Run.log

    def count(run, *rest):
        steps.append(run.done + 1)
        log(run, *rest)

    with mock.patch.object(Run, "log", count):
        return train(config), steps


def train_until(config: RLConfig, moment: str, passing: int) -> None:
    """The loop, until this process is killed at a moment of `support.runs.phases`, the given time that it comes."""
    left = passing

    def reached(name: str) -> None:
        nonlocal left
        left -= name == moment
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(GRPO, reached)
    loop.train_rl(config, "test")


@dataclass(frozen=True)
class Watched:
    """calls: of the backend, each with its number of requests. worst: for every batch, the largest difference of a
    token's log-probability, rollout against trainer."""

    calls: tuple[int, ...]
    worst: tuple[float, ...]
    completions: tuple[Completion, ...]
    counted: int


def watched(config: RLConfig, stale: bool = False) -> Watched:
    """The loop, looked at from outside. stale: a planted bug, weights reach the rollout for the first batch only."""
    calls: list[int] = []
    worst: list[float] = []
    completions: list[Completion] = []
    rollouts: list[Rollout] = []
    engines: list[Engine] = []
    submit, serve = TransformersBackend.submit, TransformersBackend.serve
    sync, groups = Rollout.sync_weights, Rollout.collect
    with_logprobs = loop.with_logprobs

    submitted: list[str] = []

    def noting_request(self, request, sampling):
        submitted.append(request.id)
        return submit(self, request, sampling)

    def counting(self, goal):
        calls.append(self.rank0.compute(lambda: len(submitted)))
        submitted.clear()
        serve(self, goal)

    def sync_once(self, version):
        if not (stale and rollouts):
            sync(self, version)
        if self not in rollouts:
            rollouts.append(self)
            engines.append(self.engine)

    def noting(self, *args, **options):
        found = groups(self, *args, **options)
        completions.extend(of_rank_0([t.completion for group in found for t in group.trajectories]))
        return found

    def comparing(groups, models, config):
        trajectories = [t for group in groups for t in group.trajectories]
        whole = of_rank_0([t.completion for t in trajectories])
        trajectories = [replace(t, turns=(Turn(t.prompt.tokens, each),)) for t, each in zip(trajectories, whole)]
        samples = [each for t in trajectories for each in samples_of(t, 0, config.algorithm, 0)]
        found = engines[0].logprobs(samples, config.rollout.temperature)
        worst.append(max(difference(t.completion, of_one.cpu()) for t, of_one in zip(trajectories, found)))
        return with_logprobs(groups, models, config)

    with (
        mock.patch.object(TransformersBackend, "submit", noting_request),
        mock.patch.object(TransformersBackend, "serve", counting),
        mock.patch.object(Rollout, "sync_weights", sync_once),
        mock.patch.object(Rollout, "collect", noting),
        mock.patch.object(loop, "with_logprobs", comparing),
    ):
        loop.train_rl(config, "test")
    return Watched(tuple(calls), tuple(worst), tuple(completions), rollouts[0].calls)


def difference(completion: Completion, logprobs_T: Tensor) -> float:
    told_C = torch.tensor(completion.logprobs, dtype=torch.float64)
    return float((logprobs_T[len(logprobs_T) - len(told_C) :] - told_C).abs().max())
