"""Files -> Samples: tokenized once, cached on disk; and which rows a step takes.

Text becomes tokens in `chat`, files become rows in `rows`; here they become a data set. Nothing depends on the rank:
every rank sees every row, and `step_indices` says which of them make up a step.
"""

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Rejects, check
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.chat_template import check_template_kwargs
from isoloss.engine.data.columns import form_of, unused
from isoloss.engine.data.remarks import remarks
from isoloss.engine.data.rows import check_paths, count_rows, unread_rows
from isoloss.engine.data.token_cache import cache_key, exclusively, load_cached, write_cache
from isoloss.engine.data.token_dataset import DataStats, TokenDataset, fingerprint
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.engine.data.turns import TokensAndMask
from isoloss.engine.instruments.console import Progress
from isoloss.parallel.runtime.errors import UserError


def load_dataset(
    data: DataConfig, split: Literal["train", "eval"], tokenizer_dir: str, *, vocab_size: int, cache_dir: Path
) -> TokenDataset:
    """Rows of data.train or data.eval as token sequences with loss masks (see `chat` for the forms of rows).

    data: also says what happens to a row of more than max_length tokens, "error", "drop" or "truncate" (its end is cut
    off), how many bad rows may be left out, and gives the chat template its variables; a row's `tools` reach it as
        well.
    cache_dir: holds one folder for each combination of file contents, tokenizer and options; any number of processes
        may call at once: one tokenizes, the others wait and load.

    Raises UserError, one line, for every mistake in files, rows, tokenizer or options. Enters no collective.
    """
    paths: tuple[str, ...] = getattr(data, split)
    check_paths(paths, f"data.{split}")
    options = {"max_length": data.max_length, "overlong": data.overlong, "vocab_size": vocab_size}
    name = cache_key(paths, tokenizer_dir, **options, template_kwargs=dict(data.template_variables))
    folder = cache_dir / name
    dataset = load_cached(folder, paths)
    if dataset is None:
        with exclusively(folder):
            dataset = load_cached(folder, paths)
            if dataset is None:
                made = tokenize(data, split, tokenizer_dir, vocab_size)
                write_cache(folder, made)
                # None where another machine is about to put its own there: what is in memory is as good.
                dataset = load_cached(folder, paths) or made
    # The limit is not part of the folder's name: whatever it was, the rows that are left are the same.
    check(f"data.{split}", paths, dataset.rejects, data.max_rejects)
    return dataset


def check_files(data: DataConfig) -> None:
    """UserError unless data.train names files that can be read, and data.eval, where it names any."""
    if not data.train:
        raise UserError("data.train=[] must name at least one JSONL or Parquet file")
    check_paths(data.train, "data.train")
    check_paths(data.eval or data.train, "data.eval")


def tokenize(data: DataConfig, split: Literal["train", "eval"], tokenizer_dir: str, vocab_size: int) -> TokenDataset:
    """The data set, in memory."""
    paths: tuple[str, ...] = getattr(data, split)
    max_length = data.max_length
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size)
    check_template_kwargs(data.template_kwargs, tokenizer)
    tokens, mask, lengths, origins = [], [], [0], []
    dropped = truncated = 0
    ignored: dict[str, None] = {}  # columns, in the order of their appearance
    forms, counts = Counter[str](), Counter[str]()
    progress = Progress("tokenizing", f"rows of data.{split}", lambda: count_rows(paths))
    rejects = Rejects(f"data.{split}", paths, data.max_rejects)
    for row in unread_rows(paths, f"data.{split}"):
        progress.advance()
        with rejects.instead_of_error(row):
            read = row.read()
            tokens_T, mask_T = tokenize_row(read, tokenizer, data.template_variables)
            ignored |= dict.fromkeys(unused(read.values))
            form = form_of(read.values, read.place)
            odd = remarks(read, form, tokens_T, tokenizer)
            if len(tokens_T) > max_length:
                if data.overlong == "drop":
                    dropped += 1
                    continue
                tokens_T, mask_T = cut(tokens_T, mask_T, data, row.place)
                truncated += 1
            forms[" + ".join(form)] += 1
            counts.update(odd)
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
    of_rows = {"origins": np.array(origins, np.int32), "paths": paths, "stats": stats, "rejects": rejects.rows}
    of_rows |= {"unused": list(ignored), "turn_ends": turn_ends(tokenizer, data.template_variables)}
    return TokenDataset(**arrays, **of_rows, fingerprint=fingerprint(arrays))


def cut(tokens_T: list[int], mask_T: list[bool], data: DataConfig, place: str) -> TokensAndMask:
    """The first data.max_length tokens of a longer row. UserError where it must not be cut, or no target is left."""
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
    """The refusal of files without a row to take. rows: their name. limit: what the dropped ones were over."""
    key, files = rejects.key, ", ".join(rejects.paths)
    if rejects.rows:
        bad = f"{len(rejects.rows)} are bad, the first is {rejects.rows[0].told(rejects.paths)}"
        return UserError(f"{key}: none of the {rows} of {files} is left: {bad}; {dropped} are over {limit}")
    if dropped:
        return UserError(f"{key}: all {dropped} {rows} of {files} were dropped, being over {limit}: raise it")
    return UserError(f"{key}: no rows in {files}: give files with at least one row")


def step_indices(num_rows: int, step: int, global_size: int, seed: int) -> np.ndarray:
    """The rows of optimizer step `step` (from 0): int64 [global_size]. The same on every rank and for every layout.

    A pure function, so resuming needs the step's number and nothing else.
    """
    if num_rows < 1 or global_size < 1:
        raise ValueError(f"step_indices needs num_rows={num_rows} and global_size={global_size} of at least 1")
    return draw_indices(num_rows, step * global_size, global_size, seed)


def draw_indices(num_rows: int, start: int, count: int, seed: int) -> np.ndarray:
    """Rows `start` to `start + count` of the stream of rows: int64 [count].

    The stream is epoch 0's permutation, epoch 1's, and so on; a call may reach across the border of epochs.
    """
    if num_rows < 1 or start < 0 or count < 1:
        raise ValueError(f"draw_indices needs num_rows={num_rows} and count={count} of at least 1, start={start} of 0")
    stop = start + count
    first, last = start // num_rows, (stop - 1) // num_rows
    stream = [np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in range(first, last + 1)]
    return np.concatenate(stream)[start - first * num_rows : stop - first * num_rows].astype(np.int64)


def steps_for_epochs(num_rows: int, epochs: float, global_size: int) -> int:
    """Steps after which every row has been taken at least `epochs` times; the last may go into the next epoch."""
    return int(np.ceil(num_rows * epochs / global_size))


def unigram_nats(train: TokenDataset, eval: TokenDataset, vocab_size: int) -> float:
    """Loss on eval's targets, in nats per token, of train's token frequencies (add-one smoothed).

    The best that a model can do without looking at the context: training that works ends below it.
    """
    counts = np.bincount(train.tokens[train.mask], minlength=vocab_size) + 1
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-log_probability[eval.tokens[eval.mask]].mean())
