"""Make a data set of files, tokenized once and cached on disk, and choose the rows of a step.

`rows` reads files and `chat` tokenizes a row. Nothing here depends on the rank: every rank has all rows, and
`step_indices` gives those of a step.
"""

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Rejects, check
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.chat_template import check_template_kwargs
from isoloss.engine.data.columns import check_mapping, form_of, read_row, unused
from isoloss.engine.data.files.sources import files_of
from isoloss.engine.data.remarks import remarks
from isoloss.engine.data.rows import count_rows, unread_rows
from isoloss.engine.data.token_cache import cache_key, exclusively, load_cached, write_cache
from isoloss.engine.data.token_dataset import DataStats, TokenDataset, fingerprint
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.engine.data.turns import TokensAndMask
from isoloss.engine.instruments.console import Progress
from isoloss.parallel.runtime.errors import UserError


def load_dataset(
    data: DataConfig, split: Literal["train", "eval"], tokenizer_dir: str, *, vocab_size: int, cache_dir: Path
) -> TokenDataset:
    """Return the rows of data.train or data.eval as token sequences with loss masks (`chat` lists the forms of rows).

    vocab_size: rows of the model's embedding, above every token id.
    cache_dir: folder of the cache, with a folder per combination of file contents, tokenizer and options. Any number of
        processes may call at once: one tokenizes, the others wait and load.

    Raises UserError for any mistake in files, rows, tokenizer or options. Enters no collective.
    """
    paths = files_of(getattr(data, split), f"data.{split}")
    options = {"max_length": data.max_length, "overlong": data.overlong, "vocab_size": vocab_size}
    options |= {"columns": dict(data.columns), "system": data.system}
    name = cache_key(paths, tokenizer_dir, **options, template_kwargs=dict(data.template_variables))
    folder = cache_dir / name
    dataset = load_cached(folder, paths)
    if dataset is None:
        with exclusively(folder):
            dataset = load_cached(folder, paths)
            if dataset is None:
                in_memory = tokenize(data, split, tokenizer_dir, vocab_size)
                write_cache(folder, in_memory)
                # None while another machine replaces the folder by its own, equal one.
                dataset = load_cached(folder, paths) or in_memory
    # data.max_rejects is not part of the folder's name, as the remaining rows do not depend on it.
    check(f"data.{split}", paths, dataset.rejects, data.max_rejects)
    return dataset


def check_files(data: DataConfig) -> None:
    """Raise UserError unless data.train names readable files, and data.eval none or readable ones."""
    if not data.train:
        raise UserError("data.train=[] must name at least one file of rows, such as train.jsonl")
    check_mapping(data)
    files_of(data.train, "data.train")
    files_of(data.eval or data.train, "data.eval")


def tokenize(data: DataConfig, split: Literal["train", "eval"], tokenizer_dir: str, vocab_size: int) -> TokenDataset:
    """Read and tokenize a split; return the data set in memory. Raises UserError."""
    paths = files_of(getattr(data, split), f"data.{split}")
    max_length = data.max_length
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size)
    check_template_kwargs(data.template_kwargs, tokenizer)
    tokens, mask, lengths, origins = [], [], [0], []
    dropped = truncated = 0
    ignored: dict[str, None] = {}  # columns, in the order of their first row
    forms, counts = Counter[str](), Counter[str]()
    progress = Progress("tokenizing", f"rows of data.{split}", lambda: count_rows(paths))
    rejects = Rejects(f"data.{split}", paths, data.max_rejects)
    for row in unread_rows(paths, f"data.{split}"):
        progress.advance()
        with rejects.instead_of_error(row):
            read = read_row(row, data)
            tokens_T, mask_T = tokenize_row(read, tokenizer, data.template_variables)
            ignored |= dict.fromkeys([*unused(read.values), *read.aside])
            form = form_of(read.values, read.place)
            row_remarks = remarks(read, form, tokens_T, tokenizer)
            if len(tokens_T) > max_length:
                if data.overlong == "drop":
                    dropped += 1
                    continue
                tokens_T, mask_T = cut(tokens_T, mask_T, data, row.place)
                truncated += 1
            forms[read.form] += 1
            counts.update(row_remarks)
            tokens.append(np.array(tokens_T, np.int32))
            mask.append(np.array(mask_T, np.bool_))
            lengths.append(len(tokens_T))
            origins.append((row.file, row.number))
    if not tokens:
        raise nothing_left(rejects, dropped, "rows", f"data.max_length={max_length}")
    all_tokens, all_mask = np.concatenate(tokens), np.concatenate(mask)
    totals = len(all_tokens), int(all_mask.sum())
    stats = DataStats(len(tokens), dropped, truncated, *totals, forms=dict(forms), remarks=dict(counts))
    arrays = {"tokens": all_tokens, "mask": all_mask, "offsets": np.cumsum(lengths, dtype=np.int64)}
    return TokenDataset(
        **arrays,
        origins=np.array(origins, np.int32),
        paths=paths,
        stats=stats,
        fingerprint=fingerprint(arrays),
        rejects=tuple(rejects.rows),
        unused=tuple(ignored),
        turn_ends=turn_ends(tokenizer, data.template_variables),
    )


def cut(tokens_T: list[int], mask_T: list[bool], data: DataConfig, place: str) -> TokensAndMask:
    """Return the first data.max_length tokens of a longer row, and their mask.

    Raises UserError if data.overlong is "error", or if no target is left.
    """
    length, most = len(tokens_T), data.max_length
    if data.overlong == "error":
        raise UserError(
            f"{place}: {length} tokens are more than data.max_length={most}: raise it, or set data.overlong to drop "
            f"(leave such rows out) or truncate (cut their end off); now it is error"
        )
    tokens_T, mask_T = tokens_T[:most], mask_T[:most]
    if not any(mask_T):
        raise UserError(
            f"{place}: truncated from {length} tokens to data.max_length={most}, it has no target left: raise it or "
            f"set data.overlong=drop"
        )
    return tokens_T, mask_T


def nothing_left(rejects: Rejects, dropped: int, rows: str, limit: str) -> UserError:
    """Return the error for files without a usable row. rows: a word for rows. limit: the key that dropped rows."""
    key, files = rejects.key, ", ".join(rejects.paths)
    if rejects.rows:
        bad = f"{len(rejects.rows)} are bad, the first is {rejects.rows[0].message(rejects.paths)}"
        return UserError(f"{key}: none of the {rows} of {files} is left: {bad}; {dropped} are over {limit}")
    if dropped:
        return UserError(f"{key}: all {dropped} {rows} of {files} were dropped, being over {limit}: raise it")
    return UserError(f"{key}: no rows in {files}: give files with at least one row")


def step_indices(num_rows: int, step: int, global_size: int, seed: int) -> np.ndarray:
    """Return the rows of optimizer step `step`, from 0: int64 [global_size], the same on every rank and layout.

    A pure function, so a resumed run needs no state but the number of its step.
    """
    if num_rows < 1 or global_size < 1:
        raise ValueError(f"step_indices needs num_rows={num_rows} and global_size={global_size} of at least 1")
    return draw_indices(num_rows, step * global_size, global_size, seed)


def draw_indices(num_rows: int, start: int, count: int, seed: int) -> np.ndarray:
    """Return rows `start` to `start + count` of the stream of rows: int64 [count].

    The stream is a permutation of all rows per epoch, one after the other; a call may span several epochs.
    """
    if num_rows < 1 or start < 0 or count < 1:
        raise ValueError(f"draw_indices needs num_rows={num_rows} and count={count} of at least 1, start={start} of 0")
    stop = start + count
    first, last = start // num_rows, (stop - 1) // num_rows
    stream = [np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in range(first, last + 1)]
    return np.concatenate(stream)[start - first * num_rows : stop - first * num_rows].astype(np.int64)


def steps_for_epochs(num_rows: int, epochs: float, global_size: int) -> int:
    """Return the steps after which every row was taken at least `epochs` times. The last may begin another epoch."""
    return int(np.ceil(num_rows * epochs / global_size))


def unigram_nats(train: TokenDataset, eval: TokenDataset, vocab_size: int) -> float:
    """Return the loss on eval's targets, in nats per token, of the token frequencies in train (add-one smoothed).

    No model that ignores the context does better, so a training that works ends below it.
    """
    counts = np.bincount(train.tokens[train.mask], minlength=vocab_size) + 1
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-log_probability[eval.tokens[eval.mask]].mean())
