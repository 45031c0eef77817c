"""The SFT loop, its data and its evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isoloss.engine.batching.sample import grouped_by_prompt
from isoloss.engine.config.schema import Config
from isoloss.engine.data import remarks
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import (
    check_files,
    load_dataset,
    step_indices,
    steps_for_epochs,
    unigram_nats,
)
from isoloss.engine.data.rows import listed
from isoloss.engine.data.show_rows import coloured, rows_to_show, shown_row
from isoloss.engine.data.token_dataset import TokenDataset
from isoloss.engine.run.folder import Fingerprint, cache_folder, tokenizer_folder
from isoloss.engine.run.health import Watched
from isoloss.engine.run.run import Run, RunResult
from isoloss.engine.run.session import Data, Session
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, cross_entropy, negative_log_likelihood
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.models.weights.side_files import declared_stops
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import is_main

# Evaluation is always in nats per target token, so that runs with different aggregations can be compared.
EVAL_LOSS = Loss.of(negative_log_likelihood)


@dataclass(frozen=True)
class RunData(Data[TokenDataset]):
    """Tokenized rows. unigram: eval loss of a unigram model of the training targets."""

    unigram: float | None

    def fingerprints(self) -> list[Fingerprint]:
        decided_by = (
            "a file of data.train, data.max_length, data.overlong, data.template_kwargs, data.date, the tokenizer or "
            "its chat template"
        )
        return [Fingerprint("the content of data.train", self.train.fingerprint, decided_by)]


def train_sft(config: Config, run_name: str) -> RunResult:
    """Supervised fine-tuning, from data files to an exported model.

    run_name: names the default output folder, `runs/<run_name>`. Every rank of the world calls it.
    Raises UserError for what the user can fix; nothing but the cache of tokenized rows has been written by then,
    unless training had started.
    """
    with Session(config, run_name, load_data) as session:
        engine = session.open_engine()
        run = session.open_run(engine, session.open_folder(), Watched())
        return _train(session.config, session.data, engine, run)


def _train(config: Config, data: RunData, engine: Engine, run: Run) -> RunResult:
    loss = cross_entropy(config.loss)
    run.print(banner(config, data, run))
    if is_main():
        data.rejects(config.data).write(run.output_dir)
        run.print(first_rows(config, data, engine.arch.vocab_size))

    for step in run.steps(lambda step: evaluate(engine, data.eval)):
        rows = step_indices(len(data.train), step, config.batch.global_size, config.train.seed)
        samples = grouped_by_prompt([data.train[int(row)] for row in rows])
        metrics, result = engine.train_step(samples, loss, run.lr(), run.limits())
        run.log(samples, metrics, result)

    ended = run.finish()
    run.print(summary(ended, data.unigram))
    return ended


def load_data(config: Config, arch: Architecture) -> RunData:
    """Tokenize (or load from the cache) the training and evaluation rows. Enters no collective."""
    folder = hf_folder(config.model.path)
    check_files(config.data)
    if config.data.max_length > arch.max_positions:
        raise UserError(
            f"data.max_length={config.data.max_length} is more than max_position_embeddings={arch.max_positions} in "
            f"{folder}/config.json: set it to at most {arch.max_positions}"
        )
    tokenizer = str(tokenizer_folder(config))
    options = {"vocab_size": arch.vocab_size, "cache_dir": cache_folder(config)}
    train = load_dataset(config.data, "train", tokenizer, **options)
    evaluation = load_dataset(config.data, "eval", tokenizer, **options) if config.data.eval else None
    steps = config.train.steps or steps_for_epochs(len(train), config.train.epochs, config.batch.global_size)
    unigram = unigram_nats(train, evaluation, arch.vocab_size) if evaluation is not None else None
    return RunData(train, evaluation, steps, tuple(train.turn_ends.values()), unigram)


def banner(config: Config, data: RunData, run: Run) -> list[str]:
    random = f", random weights (train.seed={config.train.seed})" if config.model.from_scratch else ""
    rows = f"data: {len(data.train):,} rows of {', '.join(config.data.train)}; " + (
        f"evaluated on {', '.join(config.data.eval)}" if config.data.eval else "no data.eval"
    )
    work = f"steps of {config.batch.global_size} sequences"
    return run.banner(
        random or ", its weights",
        [
            rows,
            *data.rejects(config.data).told(run.output_dir),
            *unused_columns(data),
            *(odd_rows(config, data) if is_main() else ()),
            *other_ends(data, hf_folder(config.model.path)),
            *over_budget(config, data),
        ],
        work,
    )


def odd_rows(config: Config, data: RunData) -> list[str]:
    """Lines about rows that may not be what was meant."""
    held_out = data.eval.digests() if data.eval else ()
    lines = remarks.repeats_told(data.train.digests(), held_out, config.batch.global_size, "row", "step")
    for key, rows in (("data.train", data.train), ("data.eval", data.eval)):
        lines += remarks.told(key, rows.stats.forms, rows.stats.remarks) if rows else []
    return lines


def first_rows(config: Config, data: RunData, vocab_size: int) -> list[str]:
    """Those of data.show_rows."""
    count = min(rows_to_show(config.data), len(data.train))
    if not count:
        return []
    tokenizer = load_tokenizer(str(tokenizer_folder(config)), vocab_size)
    samples = [data.train[index] for index in range(count)]
    shown = (shown_row(s.id, s.tokens_T.tolist(), s.mask_T.tolist(), tokenizer, coloured()) for s in samples)
    return [line for lines in shown for line in lines]


def unused_columns(data: RunData) -> Sequence[str]:
    """A line where rows have columns that nothing is read from."""
    names = dict.fromkeys(name for rows in (data.train, data.eval) if rows is not None for name in rows.unused)
    return (f"data: not read: {listed(names)}",) if names else ()


def other_ends(data: RunData, folder: Path) -> Sequence[str]:
    """A line where turns end with tokens that the model's folder does not declare: the export does."""
    declared = declared_stops(folder)
    others = [name for name, number in data.train.turn_ends.items() if number not in declared]
    return (f"data: turns end with {listed(others)}: hf/generation_config.json will say so",) if others else ()


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


def evaluate(engine: Engine, data: TokenDataset | None) -> dict[str, float]:
    """Loss over all of data.eval, in nats per target token."""
    if data is None:
        return {}
    metrics = engine.evaluate([data[index] for index in range(len(data))], EVAL_LOSS)
    return {"loss": metrics.loss, "valid_tokens": metrics.valid_tokens, "sequences": metrics.sequences}


def summary(result: RunResult, unigram: float | None) -> list[str]:
    """What a finished run tells its user; the last line says where everything is and what to do next."""
    lines = []
    if result.last_eval and unigram is not None:
        first, last = result.first_eval["loss"], result.last_eval["loss"]
        lines.append(
            f"eval loss {last:.3f} nats/token (before training {first:.3f}); unigram baseline {unigram:.3f}; "
            f"{'better' if last <= unigram else 'worse than a unigram model'} by {abs(unigram - last):.3f}"
        )
    return [*lines, *result.idle, result.closing_line("metrics", "metrics.jsonl")]
