"""Train by supervised fine-tuning: the loop, its data and its evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from isoloss.engine.batching.sample import grouped_by_prompt
from isoloss.engine.config.schema import Config
from isoloss.engine.data import remarks
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.columns import mapping_lines
from isoloss.engine.data.dataset import (
    check_files,
    load_dataset,
    step_indices,
    steps_for_epochs,
    unigram_nats,
)
from isoloss.engine.data.in_memory import GivenRows
from isoloss.engine.data.mixture import content, told
from isoloss.engine.data.rows import listed
from isoloss.engine.data.show_rows import coloured, rows_to_show, shown_row
from isoloss.engine.data.token_dataset import TokenDataset
from isoloss.engine.run.callbacks import NO_CALLBACKS, Callbacks
from isoloss.engine.run.folder import Fingerprint, cache_folder, tokenizer_folder
from isoloss.engine.run.health import Watched
from isoloss.engine.run.result import RunResult
from isoloss.engine.run.run import Run
from isoloss.engine.run.session import Data, Session
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, LossLike, as_loss, cross_entropy, negative_log_likelihood
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.models.weights.side_files import declared_stops
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import is_main

# The loss of evaluations is in nats per target token, so that runs with different aggregations can be compared.
EVAL_LOSS = Loss.of(negative_log_likelihood)


@dataclass(frozen=True)
class RunData(Data[TokenDataset]):
    """Tokenized rows. unigram: eval loss of a unigram model of the training targets; None without data.eval."""

    unigram: float | None

    def fingerprints(self) -> list[Fingerprint]:
        decided_by = (
            "a file of data.train or its weight, data.columns, data.system, data.max_length, data.overlong, "
            "data.template_kwargs, data.date, the tokenizer or its chat template"
        )
        now = content(self.train.fingerprint, self.train.mixture)
        return [Fingerprint("the content of data.train", now, decided_by)]


def train_sft(
    config: Config,
    run_name: str = "sft",
    *,
    train: GivenRows | None = None,
    eval: GivenRows | None = None,
    loss: LossLike | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> RunResult:
    """Run supervised fine-tuning, from rows to an exported model. Every rank of the world calls this, with the same
    arguments; without torchrun this process is the world. It may be called again.

    run_name: name of the default output folder, `runs/<run_name>`.
    train, eval: rows in place of data.train and data.eval, each a mapping of columns to values that JSON can hold. They
        are read once, and kept in a file below the folder of tokenized rows.
    loss: a `Loss`, or a function of `TokenInputs` that returns one number per target, aggregated by loss.aggregation;
        None: cross-entropy.
    callbacks: functions that are called after steps, evaluations and checkpoints.
    Raises UserError for mistakes of the user, and PreemptedError, after a checkpoint, where a signal ends the run.
    Before training only the cache of rows is written.

        result = train_sft(Config(ModelConfig("DIR")), train=[{"prompt": "2 + 2 =", "completion": " 4"}])
    """
    loss = cross_entropy(config.loss) if loss is None else as_loss(loss, config.loss)
    with Session(config, run_name, load_data, rows={"train": train, "eval": eval}) as session:
        engine = session.open_engine()
        run = session.open_run(engine, session.open_folder(), Watched(), callbacks)
        return _train(session.config, session.data, engine, run, loss)


def _train(config: Config, data: RunData, engine: Engine, run: Run, loss: Loss) -> RunResult:
    run.print(banner(config, data, run))
    if is_main():
        data.rejects(config.data).write(run.output_dir)
        run.print(shown_rows(config, data, engine.arch.vocab_size))

    for step in run.steps(lambda step: evaluate(engine, data.eval)):
        rows = step_indices(data.train.order, step, config.batch.global_size, config.train.seed)
        samples = grouped_by_prompt([data.train[int(row)] for row in rows])
        metrics, result = engine.train_step(samples, loss, run.lr(), run.limits())
        run.log(samples, metrics, result)

    result = run.finish()
    lines = summary(result, data.unigram)
    run.print(lines)
    return replace(result, summary=lines)


def load_data(config: Config, arch: Architecture) -> RunData:
    """Tokenize the training and evaluation rows, or load them from the cache. Raises UserError. Enters no
    collective."""
    check_files(config.data)
    check_positions(config, arch)
    tokenizer = str(tokenizer_folder(config))
    options = {"vocab_size": arch.vocab_size, "cache_dir": cache_folder(config)}
    train = load_dataset(config.data, "train", tokenizer, **options)
    evaluation = load_dataset(config.data, "eval", tokenizer, **options) if config.data.eval else None
    steps = config.train.steps or steps_for_epochs(len(train), config.train.epochs, config.batch.global_size)
    unigram = unigram_nats(train, evaluation, arch.vocab_size) if evaluation is not None else None
    return RunData(train, evaluation, steps, tuple(train.turn_ends.values()), unigram)


def check_positions(config: Config, arch: Architecture) -> None:
    """Raise UserError if a row may have more tokens than the model has positions."""
    if config.data.max_length > arch.max_positions:
        raise UserError(
            f"data.max_length={config.data.max_length} is more than max_position_embeddings={arch.max_positions} in "
            f"{hf_folder(config.model.path)}/config.json: set it to at most {arch.max_positions}"
        )


def banner(config: Config, data: RunData, run: Run) -> list[str]:
    """Return the lines that a run begins with."""
    random = f", random weights (train.seed={config.train.seed})" if config.model.from_scratch else ""
    rows = f"data: {len(data.train):,} rows of {', '.join(config.data.paths('train'))}; " + (
        f"evaluated on {', '.join(config.data.eval)}" if config.data.eval else "no data.eval"
    )
    work = f"steps of {config.batch.global_size} sequences"
    return run.banner(
        random or ", its weights",
        [
            rows,
            *told(data.train.mixture, run.total_steps * config.batch.global_size, "row"),
            *data.rejects(config.data).lines(run.output_dir),
            *unused_columns(data),
            *(odd_rows(config, data) if is_main() else ()),
            *undeclared_ends(data, hf_folder(config.model.path)),
            *over_budget(config, data),
        ],
        work,
    )


def odd_rows(config: Config, data: RunData) -> list[str]:
    """Return lines about rows that may be mistakes."""
    held_out = data.eval.digests() if data.eval else ()
    taken, mixture = config.batch.global_size, data.train.mixture
    lines = remarks.repeat_lines(data.train.digests(), held_out, taken, "row", "step", mixture)
    for key, rows in (("data.train", data.train), ("data.eval", data.eval)):
        lines += mapping_lines(key, rows.stats.forms, config.data) if rows else []
        lines += remarks.remark_lines(key, rows.stats.forms, rows.stats.remarks) if rows else []
    return lines


def shown_rows(config: Config, data: RunData, vocab_size: int) -> list[str]:
    """Return the lines that data.show_rows asks for."""
    count = min(rows_to_show(config.data), len(data.train))
    if not count:
        return []
    tokenizer = load_tokenizer(str(tokenizer_folder(config)), vocab_size)
    samples = [data.train[index] for index in range(count)]
    texts = (shown_row(s.id, s.tokens_T.tolist(), s.mask_T.tolist(), tokenizer, coloured()) for s in samples)
    return [line for lines in texts for line in lines]


def unused_columns(data: RunData) -> Sequence[str]:
    """Return a line about columns that are not read, if there are any."""
    names = dict.fromkeys(name for rows in (data.train, data.eval) if rows is not None for name in rows.unused)
    return (f"data: not read: {listed(names)}",) if names else ()


def undeclared_ends(data: RunData, folder: Path) -> Sequence[str]:
    """Return a line about tokens that end turns, but that the model's folder does not declare as stop tokens."""
    declared = declared_stops(folder)
    others = [name for name, number in data.train.turn_ends.items() if number not in declared]
    return (f"data: turns end with {listed(others)}: hf/generation_config.json will say so",) if others else ()


def over_budget(config: Config, data: RunData) -> Sequence[str]:
    """Return a line if rows are longer than the budget of a micro-batch, as each takes more memory than planned."""
    budget = config.batch.max_tokens
    long = np.concatenate([rows.lengths[rows.lengths > budget] for rows in (data.train, data.eval) if rows is not None])
    if not len(long):
        return ()
    return (
        f"memory: {len(long):,} rows exceed batch.max_tokens={budget}, the longest with {long.max():,} tokens; each "
        "runs alone in a micro-batch",
    )


def evaluate(engine: Engine, data: TokenDataset | None) -> dict[str, float]:
    """Return the loss over all of data.eval, in nats per target token; {} without data.eval."""
    if data is None:
        return {}
    metrics = engine.evaluate([data[index] for index in range(len(data))], EVAL_LOSS)
    return {"loss": metrics.loss, "valid_tokens": metrics.valid_tokens, "sequences": metrics.sequences}


def summary(result: RunResult, unigram: float | None) -> list[str]:
    """Return the lines that a run ends with. The last one names its outputs and the next command."""
    lines = []
    if result.last_eval and unigram is not None:
        first, last = result.first_eval["loss"], result.last_eval["loss"]
        lines.append(
            f"eval loss {last:.3f} nats/token (before training {first:.3f}); unigram baseline {unigram:.3f}; "
            f"{'better' if last <= unigram else 'worse than a unigram model'} by {abs(unigram - last):.3f}"
        )
    return [*lines, *result.idle, *result.adapter_lines(), result.closing_line("metrics", "metrics.jsonl")]
