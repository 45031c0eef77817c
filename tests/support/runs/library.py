"""Whole runs as a program calls them; runs on every rank."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine import (
    AlgorithmConfig,
    BatchConfig,
    Callbacks,
    CheckpointConfig,
    Config,
    DataConfig,
    Engine,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RewardConfig,
    RLConfig,
    RLDataConfig,
    RolloutConfig,
    RunResult,
    Sample,
    Sampling,
    TokenInputs,
    TrainConfig,
    UserError,
    load_rows,
    train_rl,
    train_sft,
)
from isoloss.engine.rl.losses import clip_loss
from isoloss.engine.run.records import RunRecords
from support.runs.runs import TIMES

STEPS = 4


def sft_config(folder: Path, name: str, **data: Any) -> Config:
    return Config(
        ModelConfig(folder / "model", from_scratch=True),
        DataConfig(max_length=128, **data),
        BatchConfig(global_size=4, max_tokens=256),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=STEPS, eval_every=2),
        checkpoint=CheckpointConfig(export_hf=False),
        output_dir=name,
    )


def timeless(rows: list[dict]) -> list[dict]:
    """Rows of metrics without what a clock decides."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def numbers(result: RunResult) -> list[list[dict]]:
    return [timeless(result.metrics), timeless(result.evaluations)]


def minus_logprob(inputs: TokenInputs) -> Tensor:
    return -inputs.logprobs_N


def sft_runs(folder: Path, work: Path) -> dict[str, Any]:
    """The same run four times, by its numbers: from files; from rows of this process; with a loss of one's own; and
    ended by a callback after the second step, and resumed. And the refusals of other rows, given twice or resumed."""
    files = {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl")}
    rows = load_rows(files["train"])
    given = {"train": iter(rows), "eval": (*rows,)}
    collects: list[bool] = []

    def on_step_end(step: int, metrics: dict) -> bool:
        collects.append(gc.isenabled())
        return step == 2

    ended = Callbacks(on_step_end=on_step_end)
    resumed = CheckpointConfig(export_hf=False, resume=True)
    again = replace(sft_config(folder, f"{work}/ended"), checkpoint=resumed)
    stopped = train_sft(sft_config(folder, f"{work}/ended"), train=rows, eval=rows, callbacks=ended)
    found = {
        "files": numbers(train_sft(sft_config(folder, f"{work}/files", **files))),
        "memory": numbers(train_sft(sft_config(folder, f"{work}/memory"), **given)),
        "loss": numbers(train_sft(sft_config(folder, f"{work}/loss"), train=rows, eval=rows, loss=minus_logprob)),
        "stopped": (stopped.stopped, len(stopped.metrics), [row["step"] for row in stopped.evaluations]),
        "collects": [*collects, gc.isenabled()],
        "other rows": message(lambda: train_sft(again, train=rows[1:], eval=rows)),
        "resumed": numbers(train_sft(again, train=rows, eval=rows)),
    }
    both = replace(sft_config(folder, f"{work}/both"), data=DataConfig(train=files["train"]))
    return found | {"both": message(lambda: train_sft(both, train=rows))}


def message(call: Callable[[], object]) -> str:
    try:
        return f"no error, but {call()}"
    except (UserError, ValueError) as error:
        return str(error)


def callbacks_of_a_rank(folder: Path, work: Path) -> dict[str, Any]:
    """What the callbacks of this rank are given in a run that another rank's callback ends, and how a run ends in which
    the last rank's callback fails, or returns what is no answer."""
    heard: list[tuple[str, int, Any]] = []
    last = dist.get_rank() == dist.get_world_size() - 1
    rows = load_rows(str(folder / "rows.jsonl"))

    def on_step_end(step: int, metrics: dict) -> bool | None:
        heard.append(("step", step, dict(metrics)))
        return last and step == 3

    def on_save(step: int, saved: Path) -> None:
        heard.append(("save", step, (saved / ".metadata").is_file()))

    def fails(step: int, metrics: dict) -> None:
        if last:
            raise KeyError("gone")

    evaluated = lambda step, metrics: heard.append(("evaluation", step, dict(metrics)))
    config = sft_config(folder, f"{work}/run")
    result = train_sft(config, train=rows, eval=rows, callbacks=Callbacks(on_step_end, evaluated, on_save))

    def with_callbacks(callbacks: Callbacks) -> str:
        name = f"{work}/{len(heard)}"
        heard.append(("", 0, None))
        return message(lambda: train_sft(sft_config(folder, name), train=rows, callbacks=callbacks))

    told = {"run": [*heard], "metrics": result.metrics, "evaluations": result.evaluations, "stopped": result.stopped}
    return told | {
        "fails": with_callbacks(Callbacks(on_step_end=fails)),
        "number": with_callbacks(Callbacks(on_step_end=lambda step, metrics: metrics["loss"])),
    }


def rl_config(folder: Path, name: str, reward: str, **data: Any) -> RLConfig:
    return RLConfig(
        ModelConfig(folder / "model", from_scratch=True),
        RLDataConfig(max_length=128, **data),
        BatchConfig(global_size=4, max_tokens=256),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=2),
        checkpoint=CheckpointConfig(export_hf=False),
        output_dir=name,
        rollout=RolloutConfig(num_generations=4, max_new_tokens=6, backend="megatron"),
        reward=RewardConfig(reward),
    )


def rl_runs(folder: Path, work: Path) -> dict[str, Any]:
    """The same run twice, by its numbers and rewards: from files, and from rows, a reward and a loss of this process.
    And a run whose reward fails on every completion, or on those of even length."""
    scored: list[str] = []

    def reward(completion: str, answer: str) -> float:
        scored.append(completion)
        return float(len(completion) % 5 + len(answer))

    def own_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
        return clip_loss(inputs, algorithm)

    def odd(completion: str) -> float:
        return 1 / (len(completion) % 2)

    def failing(completion: str) -> float:
        raise RuntimeError("no judge")

    by_name = f"{Path(work) / 'reward.py'}:reward"
    files = rl_config(folder, f"{work}/files", by_name, train=f"{folder}/train.jsonl")
    rows = load_rows(f"{folder}/train.jsonl")
    results = {
        "files": train_rl(files),
        "memory": train_rl(
            rl_config(folder, f"{work}/memory", "exact_match"), train=rows, reward=reward, loss=own_loss
        ),
    }
    kept = lambda row: (row["id"], row["completion"], row["reward"])
    found: dict[str, Any] = {
        name: (timeless(result.metrics), [kept(row) for row in RunRecords(result.output_dir).rollouts()])
        for name, result in results.items()
    }
    config = lambda name: rl_config(folder, f"{work}/{name}", "exact_match")
    rollouts_of = lambda result: RunRecords(result.output_dir).rollouts()
    partly = train_rl(config("partly"), train=rows, reward=[odd, "format"])
    return found | {
        "scored": len(scored),
        "named": RunRecords(results["memory"].output_dir).config()["reward"]["function"],
        "partly": [(row["completion"], row["error"]) for row in rollouts_of(partly) if "error" in row],
        "all": message(lambda: train_rl(config("all"), train=rows, reward=failing)),
        "line": failing.__code__.co_firstlineno + 1,
    }


def generated(folder: Path, parallel: dict[str, Any], prompts: list, ids: list[str]) -> tuple[list, float]:
    """The completions that this rank gets, and the largest difference of a token's log-probability from training's."""
    config = Config(ModelConfig(folder, from_scratch=True), parallel=ParallelConfig(**parallel))
    engine = Engine(config)
    completions = engine.generate(prompts, Sampling(6, temperature=0.7, seed=2), ids=ids)
    samples = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens_T = torch.tensor([*token_ids(engine, prompt), *completion.tokens])
        samples.append(Sample(tokens_T, torch.arange(len(tokens_T)) >= len(tokens_T) - len(completion.tokens)))
    pairs = zip(engine.logprobs(samples, temperature=0.7), completions)
    differences = [
        (logprobs_T.cpu()[-len(c.tokens) :] - torch.tensor(c.logprobs, dtype=torch.float64)).abs().max().item()
        for logprobs_T, c in pairs
    ]
    return [(c.id, tuple(c.tokens), c.finish) for c in completions], max(differences)


def token_ids(engine: Engine, prompt: Any) -> list[int]:
    """A prompt's tokens, by transformers."""
    if isinstance(prompt, str):
        return engine.tokenizer(prompt)["input_ids"]
    if isinstance(prompt[0], dict):
        return engine.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    return prompt


def lost_groups(folder: Path) -> str:
    """What an engine answers after another was made."""
    config = Config(ModelConfig(folder, from_scratch=True))
    first, second = Engine(config), Engine(config)
    sample = Sample(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
    second.logprobs([sample])
    return message(lambda: first.logprobs([sample]))
