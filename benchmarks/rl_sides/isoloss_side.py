"""isoloss as a side of rl_step.py: python isoloss_side.py JOB.json.

The pieces of isoloss.engine.rl.loop, in its order; no checkpoints, no logs.
"""

import cProfile
import json
import platform
import pstats
import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import megatron.core
import torch
import transformers
from reward import score
from torch.profiler import ProfilerActivity, profile
from turns import Turns

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.config.parse import build
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.experience import Models, RolloutBatch, minibatches, with_advantages, with_logprobs
from isoloss.engine.rl.group_sampling import sample_groups
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.setup import load_data, open_rewarder, open_rollout
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Trajectory
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss
from isoloss.engine.step.model_source import resolve


def config_of(job: dict) -> RLConfig:
    row = job["row"]
    length = row["prompt"] + row["completion"]
    keys = {
        "model": {"path": job["model"]},
        "data": {"train": [job["data"]], "max_length": length},
        "batch": {"global_size": row["prompts"], "max_tokens": job["max_tokens"], "share_prefixes": True},
        "optim": {"lr": job["lr"], "betas": job["betas"], "eps": job["eps"], "weight_decay": 0.0, "clip": job["clip"]},
        "loss": {"aggregation": "seq-mean-token-mean"},
        "rollout": {
            "backend": job["backend"],
            "num_generations": row["group"],
            "max_new_tokens": row["completion"],
        },
        "reward": {"function": [f"{Path(__file__).parent / 'reward.py'}:score"]},
        "train": {"precision": "fp32", "seed": job["seed"]},
    }
    return build(RLConfig, keys)


@dataclass
class Side:
    config: RLConfig
    models: Models
    rollout: Rollout
    loss: Loss
    steps: int = 0

    def step(self, phase) -> dict[str, float]:
        """phase: a context manager for each phase, by its name."""
        with phase("sync"):
            self.rollout.sync_weights(self.steps)
        groups, samples = sample_groups(self.rollout, self.config), []
        with phase("generate"):
            waves = list(groups.waves)
        with phase("logprobs"):
            for wave in waves:
                samples += with_logprobs(wave, self.models, self.config)
        with phase("train"):
            samples = with_advantages(samples, groups.kept, self.config)
            parts = minibatches([sample.group for sample in samples], self.steps, self.config)
            samples, batch = RolloutBatch(tuple(samples), parts).next()
            assert batch.exhausted, "one optimizer step for each batch"
            metrics, result = self.models.policy.train_step(samples, self.loss)
            assert result.applied
        self.steps += 1
        tokens = sum(len(t.completion.tokens) for group in groups.kept for t in group.trajectories)
        return {"completion_tokens": tokens, "loss": metrics.loss}

    def on_rows_of(self, path: str) -> dict[str, float]:
        """Loss and norm of the gradient for the completions that the other side generated; the weights stay."""
        rows, count = json.loads(Path(path).read_text()), self.config.rollout.num_generations
        trajectories = []
        for index, (prompt, tokens) in enumerate(zip(rows["prompt_ids"], rows["completion_ids"], strict=True)):
            unknown = [0.0] * len(tokens)
            completion = Completion(str(index), tokens, unknown, [0] * len(tokens), "length")
            (reward,) = score([tokens])
            trajectories.append(
                Trajectory.of_one_turn(Prompt(str(index // count), tuple(prompt), ""), completion, "", reward)
            )
        parts = [trajectories[i : i + count] for i in range(0, len(trajectories), count)]
        groups = [Group(draw, part[0].prompt, tuple(part)) for draw, part in enumerate(parts)]
        samples = with_logprobs(groups, self.models, self.config)
        samples = with_advantages(samples, groups, self.config)
        metrics, result = self.models.policy.train_step(samples, self.loss, lr=0.0)
        return {"loss": metrics.loss, "grad_norm": result.grad_norm}

    def write_profile(self, folder: Path, name: str) -> None:
        """A step by torch.profiler, a table for each phase, and another by Python's, for what is not in an op."""

        @contextmanager
        def ops(phase: str):
            with profile(activities=[ProfilerActivity.CPU]) as found:
                yield
            table = found.key_averages().table("self_cpu_time_total", row_limit=40, max_name_column_width=60)
            (folder / f"{name}-{phase}.txt").write_text(table)

        @contextmanager
        def functions(phase: str):
            with cProfile.Profile() as found:
                yield
            with (folder / f"{name}-{phase}-python.txt").open("w") as file:
                pstats.Stats(found, stream=file).sort_stats("tottime").print_stats(40)

        folder.mkdir(parents=True, exist_ok=True)
        self.step(ops)
        self.step(functions)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    turns, config = Turns(), config_of(job)
    source = resolve(config)
    # A token that the model does not have: no completion ends early.
    data = replace(load_data(config, source.arch), stop_token_ids=(job["never"],))
    with ExitStack() as stack:
        rewarder = stack.enter_context(open_rewarder(config, data))
        policy = Engine(config, source)
        rollout = stack.enter_context(open_rollout(config, policy, data, rewarder, Path(job["folder"])))
        scatter = stack.enter_context(closing(Scatter(policy.mesh)))
        side = Side(config, Models(scatter, policy, None, None), rollout, policy_loss(config))
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        python = platform.python_version()
        turns.loaded({**versions, "megatron-core": megatron.core.__version__, "python": python})
        while True:
            order = turns.begin()
            if order["do"] == "compare":
                turns.end("train", **side.on_rows_of(order["path"]))
            elif order["do"] == "profile":
                side.write_profile(Path(order["folder"]), order["name"])
                turns.end("profile")
            else:
                turns.end("rest", **side.step(turns.phase))


if __name__ == "__main__":
    main()
