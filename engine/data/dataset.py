"""Make a data set of files, tokenized once and cached on disk, and choose the rows of a step.

`rows` reads files and `chat` tokenizes a row. Nothing here depends on the rank: every rank has all rows, and
`step_indices` gives those of a step.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Literal

import numpy as np

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Rejects, check
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.chat_template import check_template_kwargs
from isoloss.engine.data.columns import check_mapping
from isoloss.engine.data.files.sources import files_and_sources, files_of
from isoloss.engine.data.mixture import Mixture, mixture_of
from isoloss.engine.data.token_cache import cache_key, exclusively, load_cached, write_cache
from isoloss.engine.data.token_dataset import TokenDataset
from isoloss.engine.data.token_processes import LostProcessError
from isoloss.engine.data.token_shards import SHARD_ROWS, Job
from isoloss.engine.data.tokenizing import tokenize
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.parallel.runtime.errors import UserError

BLOCK_TOKENS = 1 << 20


def load_dataset(
    data: DataConfig, split: Literal["train", "eval"], tokenizer_dir: str, *, vocab_size: int, cache_dir: Path
) -> TokenDataset:
    """Return the rows of data.train or data.eval as token sequences with loss masks (`chat` lists the forms of rows).

    vocab_size: rows of the model's embedding, above every token id.
    cache_dir: folder of the cache, with a folder per combination of file contents, tokenizer and options. Any number of
        processes may call at once: one tokenizes, the others wait and load.

    Raises UserError for any mistake in files, rows, tokenizer or options. Enters no collective.
    """
    paths, sources = files_and_sources(data.paths(split), f"data.{split}")
    options = {"max_length": data.max_length, "overlong": data.overlong, "vocab_size": vocab_size}
    options |= {"columns": dict(data.columns), "system": data.system}
    name = cache_key(paths, tokenizer_dir, **options, template_kwargs=dict(data.template_variables))
    folder = cache_dir / name
    dataset = load_cached(folder, paths)
    if dataset is None:
        with exclusively(folder):
            job = Job(f"data.{split}", paths, tokenizer_dir, vocab_size, data, SHARD_ROWS)
            dataset = load_cached(folder, paths) or tokenize_into(folder, job)
    # data.max_rejects is not part of the folder's name, as the remaining rows do not depend on it.
    check(f"data.{split}", paths, dataset.rejects, data.max_rejects)
    if split == "train" and data.is_mixture:
        dataset = dataclasses.replace(dataset, mixture=mixture_of(data, dataset.origins[:, 0], sources))
    return dataset


def check_files(data: DataConfig) -> None:
    """Raise UserError unless data.train names readable files, and data.eval none or readable ones."""
    if not data.train:
        raise UserError("data.train=[] must name at least one file of rows, such as train.jsonl")
    check_mapping(data)
    files_of(data.paths("train"), "data.train")
    files_of(data.eval or data.paths("train"), "data.eval")


def tokenize_into(folder: Path, job: Job) -> TokenDataset:
    """Tokenize a split into a cache folder. What a killed process had finished is used. Raises UserError."""
    data, tokenizer_dir, vocab_size = job.data, job.tokenizer_dir, job.vocab_size
    shards = folder.with_name(f".{folder.name}.shards")
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size)
    check_template_kwargs(data.template_kwargs, tokenizer)
    try:
        tokenized = tokenize(job, tokenizer, turn_ends(tokenizer, data.template_variables), shards)
        if not tokenized.stats.rows:
            rejects = Rejects(job.key, job.paths, job.data.max_rejects, tokenized.rejects)
            raise nothing_left(rejects, tokenized.stats.dropped, "rows", f"data.max_length={data.max_length}")
        dataset = write_cache(folder, tokenized)
    except LostProcessError:
        raise
    except UserError:
        shutil.rmtree(shards, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds other rows
            folder.parent.rmdir()
        raise
    except OSError as problem:
        shutil.rmtree(shards, ignore_errors=True)
        if theirs := load_cached(folder, job.paths):  # another machine was faster, and has deleted the shards
            return theirs
        raise UserError(
            f"tokenized rows could not be written into data.cache_dir={folder.parent} ({problem}): make room there, or "
            "set data.cache_dir to another place"
        ) from None
    shutil.rmtree(shards, ignore_errors=True)
    return dataset


def nothing_left(rejects: Rejects, dropped: int, rows: str, limit: str) -> UserError:
    """Return the error for files without a usable row. rows: a word for rows. limit: the key that dropped rows."""
    key, files = rejects.key, ", ".join(rejects.paths)
    if rejects.rows:
        bad = f"{len(rejects.rows)} are bad, the first is {rejects.rows[0].message(rejects.paths)}"
        return UserError(f"{key}: none of the {rows} of {files} is left: {bad}; {dropped} are over {limit}")
    if dropped:
        return UserError(f"{key}: all {dropped} {rows} of {files} were dropped, being over {limit}: raise it")
    return UserError(f"{key}: no rows in {files}: give files with at least one row")


def step_indices(rows: int | Mixture, step: int, global_size: int, seed: int) -> np.ndarray:
    """Return the rows of optimizer step `step`, from 0: int64 [global_size], the same on every rank and layout.

    rows: number of rows, or the mixture that they are drawn from.
    A pure function, so a resumed run needs no state but the number of its step.
    """
    if global_size < 1:
        raise ValueError(f"step_indices needs a global_size={global_size} of at least 1")
    return draw_indices(rows, step * global_size, global_size, seed)


def draw_indices(rows: int | Mixture, start: int, count: int, seed: int) -> np.ndarray:
    """Return rows `start` to `start + count` of the stream of rows: int64 [count].

    The stream is a permutation of all rows per epoch, one after the other; a call may span several epochs. That of a
    mixture is in `Mixture`.
    """
    if isinstance(rows, Mixture):
        return rows.draw(start, count, seed)
    if rows < 1 or start < 0 or count < 1:
        raise ValueError(f"draw_indices needs rows={rows} and count={count} of at least 1, start={start} of 0")
    stop = start + count
    first, last = start // rows, (stop - 1) // rows
    stream = [np.random.default_rng([seed, epoch]).permutation(rows) for epoch in range(first, last + 1)]
    return np.concatenate(stream)[start - first * rows : stop - first * rows].astype(np.int64)


def steps_for_epochs(num_rows: int, epochs: float, global_size: int) -> int:
    """Return the steps after which every row was taken at least `epochs` times. The last may begin another epoch."""
    return int(np.ceil(num_rows * epochs / global_size))


def unigram_nats(train: TokenDataset, eval: TokenDataset, vocab_size: int) -> float:
    """Return the loss on eval's targets, in nats per token, of the token frequencies in train (add-one smoothed).

    No model that ignores the context does better, so a training that works ends below it.
    """
    counts = np.ones(vocab_size, np.int64)
    for start in range(0, len(train.tokens), BLOCK_TOKENS):  # the tokens may be more than fit into memory
        block = slice(start, start + BLOCK_TOKENS)
        counts += np.bincount(train.tokens[block][train.mask[block]], minlength=vocab_size)
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-log_probability[eval.tokens[eval.mask]].mean())
