"""The SFT loop, its data and its evaluation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from isoloss.engine.batch import grouped_by_prompt
from isoloss.engine.config import Config
from isoloss.engine.data import TokenDataset, check_files, load_dataset, step_indices, steps_for_epochs, unigram_nats
from isoloss.engine.engine import Engine, check_model
from isoloss.engine.losses import Loss, cross_entropy, negative_log_likelihood
from isoloss.engine.metrics import MetricsLog, flops_per_step, mfu, peak_flops
from isoloss.engine.optimizer import learning_rate
from isoloss.engine.output import Fingerprint, cache_folder, check_fingerprints, check_output, open_output, record
from isoloss.engine.run import BadStepGuard, due, export, is_main, report, resume, resumed, save, spread, step_folder
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.mcore import transformer_engine
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import UserError, device

# Evaluation is always in nats per target token, so that runs with different aggregations can be compared.
EVAL_LOSS = Loss.of(negative_log_likelihood)


@dataclass(frozen=True)
class RunData:
    """Tokenized rows and the length of the run. unigram: eval loss of a unigram model of the training targets."""

    train: TokenDataset
    eval: TokenDataset | None
    total_steps: int
    unigram: float | None

    def fingerprints(self) -> list[Fingerprint]:
        """What decides which tokens a step sees and learns."""
        decided_by = (
            "a file of data.train, data.max_length, data.overlong, data.template_kwargs, the tokenizer or its chat "
            "template"
        )
        return [Fingerprint("the content of data.train", self.train.fingerprint, decided_by)]


@dataclass(frozen=True)
class RunResult:
    """Where a run ended. eval losses in nats per target token; None without data.eval."""

    output_dir: Path
    checkpoint: Path
    export: Path | None
    first_eval: float | None
    last_eval: float | None
    unigram: float | None


def train_sft(config: Config, run_name: str) -> RunResult:
    """Supervised fine-tuning, from data files to an exported model.

    run_name: names the default output folder, `runs/<run_name>`. Every rank of the world calls it.
    Raises UserError for what the user can mend; nothing but the cache of tokenized rows has been written by then,
    unless training had started.
    """
    # What is cheap to check comes first, tokenizing next, and the process group only when nothing speaks against it.
    device.check_fallback(config.train.device)
    check_model(config)
    check_output(config, run_name)
    data = load_data(config)
    check_fingerprints(config, run_name, data.fingerprints())
    engine = Engine(config)
    with open_output(config, run_name) as output_dir:
        return _train(config, data, engine, output_dir)


def _train(config: Config, data: RunData, engine: Engine, output_dir: Path) -> RunResult:
    loss = cross_entropy(config.loss)
    state = resume(engine, config, output_dir)
    step = 0 if state is None else int(str(state["step"]))
    guard = BadStepGuard(config.train.max_bad_steps)
    if is_main():
        print(*opening(engine, config, data, output_dir, step), sep="\n", flush=True)
    first_eval = last_eval = None

    with MetricsLog(output_dir, enabled=is_main(), total_steps=data.total_steps, start_step=step) as log:
        peak = peak_flops(engine.device)
        first_eval = last_eval = evaluate(engine, data.eval, log, step)
        while step < data.total_steps:
            started = time.perf_counter()
            rows = step_indices(len(data.train), step, config.batch.global_size, config.train.seed)
            samples = grouped_by_prompt([data.train[int(row)] for row in rows])
            lr = learning_rate(step, config.optim, data.total_steps)

            metrics, result = engine.train_step(samples, loss, lr)

            step += 1
            seconds = time.perf_counter() - started
            flops = flops_per_step(engine.cost_model, [len(sample) for sample in samples])
            log.log(step, report(metrics, result, seconds, mfu(flops, seconds, peak, dist.get_world_size())))
            guard.check(step, metrics, result)
            if due(step, config.train.eval_every, data.total_steps):
                last_eval = evaluate(engine, data.eval, log, step)
            if due(step, config.checkpoint.every, data.total_steps):
                save(engine, config, output_dir, step, record(data.fingerprints()))
    exported = export(engine, config, output_dir)
    return RunResult(output_dir, step_folder(output_dir, step), exported, first_eval, last_eval, data.unigram)


def load_data(config: Config) -> RunData:
    """Tokenize (or load from the cache) the training and evaluation rows. Enters no collective."""
    arch = read_architecture(config.model.path)
    check_files(config.data)
    max_length = config.data.max_length
    if max_length > arch.max_positions:
        raise UserError(
            f"data.max_length={max_length} is more than max_position_embeddings={arch.max_positions} in "
            f"{hf_folder(config.model.path)}/config.json: set it to at most {arch.max_positions}"
        )
    options = {
        "max_length": max_length,
        "overlong": config.data.overlong,
        "template_kwargs": config.data.template_kwargs,
        "vocab_size": arch.vocab_size,
        "cache_dir": cache_folder(config),
    }
    tokenizer = config.model.tokenizer or str(hf_folder(config.model.path))
    train = load_dataset(config.data.train, tokenizer, **options)
    evaluation = load_dataset(config.data.eval, tokenizer, key="data.eval", **options) if config.data.eval else None
    steps = config.train.steps or steps_for_epochs(len(train), config.train.epochs, config.batch.global_size)
    unigram = unigram_nats(train, evaluation, arch.vocab_size) if evaluation is not None else None
    return RunData(train, evaluation, steps, unigram)


def opening(engine: Engine, config: Config, data: RunData, output_dir: Path, step: int) -> Sequence[str]:
    """What is about to be trained, on what, and where it goes: a wrong path or preset shows here, not hours later."""
    source = f"random weights (train.seed={config.train.seed})" if config.model.from_scratch else "its weights"
    lines = [
        f"device: {device.describe(dist.get_world_size())}, {config.train.precision}",
        f"model: {config.model.path}, {num_parameters(engine.arch):,} parameters, {source}, layers of "
        f"{transformer_engine.description(config.model.transformer_engine)}",
        f"data: {len(data.train):,} rows of {', '.join(config.data.train)}; "
        + (f"evaluated on {', '.join(config.data.eval)}" if config.data.eval else "no data.eval"),
        f"run: {data.total_steps} steps of {config.batch.global_size} sequences, {spread(engine)}, into {output_dir}",
    ]
    return [*lines, *over_budget(config, data), *resumed(config, output_dir, step, data.total_steps)]


def over_budget(config: Config, data: RunData) -> Sequence[str]:
    """A line where rows are longer than the budget of a micro-batch: each takes more memory than was asked for."""
    budget = config.batch.max_tokens
    long = np.concatenate([rows.lengths[rows.lengths > budget] for rows in (data.train, data.eval) if rows is not None])
    if not len(long):
        return ()
    return (
        f"memory: {len(long):,} rows exceed batch.max_tokens={budget}, the longest with {long.max():,} tokens; each "
        "runs alone in a micro-batch",
    )


def evaluate(engine: Engine, data: TokenDataset | None, log: MetricsLog, step: int) -> float | None:
    """Loss over all of data.eval, in nats per target token."""
    if data is None:
        return None
    metrics = engine.evaluate([data[index] for index in range(len(data))], EVAL_LOSS)
    log.log_eval(step, {"loss": metrics.loss, "valid_tokens": metrics.valid_tokens, "sequences": metrics.sequences})
    return metrics.loss


def summary(result: RunResult) -> Sequence[str]:
    """What a finished run tells its user; the last line says where everything is and what to do next."""
    lines = []
    if result.last_eval is not None and result.unigram is not None:
        before = "" if result.first_eval is None else f" (before training {result.first_eval:.3f})"
        lines.append(
            f"eval loss {result.last_eval:.3f} nats/token{before}; unigram baseline {result.unigram:.3f}; "
            f"better by {result.unigram - result.last_eval:.3f}"
        )
    model = f"model for transformers in {result.export}; " if result.export else ""
    lines.append(
        f"done: {model}checkpoint in {result.checkpoint}; metrics in {result.output_dir}/metrics.jsonl; "
        f"next: tensorboard --logdir {result.output_dir}/tensorboard"
    )
    return lines
