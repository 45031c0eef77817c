"""Files -> Samples: tokenized once, cached on disk, read back as memory maps; and which rows a step takes.

Text becomes tokens in `chat`, files become rows in `rows`; here they become a data set. Nothing depends on the rank:
every rank sees every row, and `step_indices` says which of them make up a step.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import platform
import shutil
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Reject, Rejects, check
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.chat_template import check_template_kwargs
from isoloss.engine.data.columns import form_of, unused
from isoloss.engine.data.remarks import digest, remarks
from isoloss.engine.data.rows import check_paths, count_rows, place_of, unread_rows
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.engine.data.turns import TokensAndMask
from isoloss.engine.instruments.console import Progress
from isoloss.parallel.runtime.errors import UserError

FORMAT = 6  # of the cache folder and of the tokenization; a new number leaves old folders unread
ROWS = {"tokens": np.int32, "mask": np.bool_, "offsets": np.int64}
ARRAYS = ROWS | {"origins": np.int32}


@dataclass(frozen=True)
class DataStats:
    """rows: sequences kept; dropped, truncated: rows over max_length; tokens, targets: of the rows kept.

    forms: how many of them have which columns. remarks: how many deserve which of `remarks.TOLD`.
    """

    rows: int
    dropped: int
    truncated: int
    tokens: int
    targets: int
    forms: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)


class TokenDataset:
    """A sequence of Samples over arrays, with n sequences and `total` tokens in all.

    tokens: int32 [total].
    mask: bool [total], True at targets.
    offsets: int64 [n + 1], sequence i is offsets[i]:offsets[i + 1].
    origins: int32 [n, 2], which of the files `paths` a sequence comes from, from 0, and which line or row, from 1.
    fingerprint: the same for two data sets where tokens, mask and offsets are, whatever files they came from.
    rejects: bad rows that were left out.
    unused: columns that no row was read from.
    turn_ends: tokens, with their ids, that end what is learned.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        offsets: np.ndarray,
        origins: np.ndarray,
        paths: Sequence[str],
        stats: DataStats,
        fingerprint: str,
        rejects: Sequence[Reject] = (),
        unused: Sequence[str] = (),
        turn_ends: Mapping[str, int] = MappingProxyType({}),
    ):
        self.tokens, self.mask, self.offsets, self.stats = tokens, mask, offsets, stats
        self.origins, self.paths = origins, tuple(paths)
        self.fingerprint, self.rejects = fingerprint, tuple(rejects)
        self.unused, self.turn_ends = tuple(unused), dict(turn_ends)
        self.lengths: np.ndarray = np.diff(offsets).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def digests(self) -> Iterator[bytes]:
        """Of the tokens of each sequence."""
        for start, end in itertools.pairwise(self.offsets.tolist()):
            yield digest(self.tokens[start:end])

    def __getitem__(self, index: int) -> Sample:
        """Sequence `index` as int64 tokens and bool mask, copied out of the memory map."""
        index = range(len(self))[index]  # negative indices, and IndexError past the end
        part = slice(self.offsets[index], self.offsets[index + 1])
        tokens_T = torch.from_numpy(self.tokens[part].astype(np.int64))
        file, number = self.origins[index].tolist()
        return Sample(tokens_T, torch.from_numpy(np.array(self.mask[part])), id=place_of(self.paths[file], number))


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


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """One process of this machine at a time, for one cache folder.

    The lock lies in the system's temporary folder: a process that is killed while it waits (torchrun does that to the
    others when one rank fails) leaves nothing where the run writes. Everybody may write there: the lock has a folder of
    this user alone, no link is followed, and it is deleted again.
    """
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    path = own_temporary_folder() / f"{digest}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file closes, or the process dies
            if not is_of(lock, path):
                continue  # whoever held it has deleted it
            try:
                yield
            finally:
                path.unlink()
            return
        finally:
            os.close(lock)


def is_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def own_temporary_folder() -> Path:
    """A folder in the system's temporary one that nobody else may enter. Raises UserError where its name is taken."""
    folder = Path(tempfile.gettempdir()) / f"isoloss-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder of yours alone: delete it, or set TMPDIR to another folder")
    return folder


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


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """Of the rows that the arrays of a TokenDataset hold: their order, tokens and targets."""
    digest = hashlib.sha256()
    for name, dtype in ROWS.items():
        digest.update(np.ascontiguousarray(arrays[name], np.dtype(dtype).newbyteorder("<")).data)
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------- cache


def cache_key(paths: Sequence[str], tokenizer_dir: str, **options) -> str:
    """Name of the cache folder: everything that the tokens depend on, file contents rather than names."""
    tokenizer_files = tokenizer_configuration(Path(tokenizer_dir))
    parts = {
        "format": FORMAT,
        "versions": [version("transformers"), version("tokenizers")],
        # A row's kind of file matters, and so does the order of the files.
        "data": [[Path(path).suffix.lower(), file_hash(Path(path))] for path in paths],
        "tokenizer": {str(path.relative_to(tokenizer_dir)): file_hash(path) for path in tokenizer_files},
        "options": options,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_configuration(folder: Path) -> list[Path]:
    """The files of a model folder that a tokenizer may read: anything small, no weights and no weight index."""
    suffixes = (".json", ".jinja", ".model", ".txt", ".tiktoken")
    if not folder.is_dir():
        return []
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]
    return sorted(p for p in files if p.name.endswith(suffixes) and not p.name.endswith(".index.json"))


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_cache(folder: Path, dataset: TokenDataset) -> None:
    """Write under a name of this process's own, then rename: a folder of the right name is complete. Raises UserError,
    and leaves nothing, where the disk refuses."""
    temporary = folder.with_name(f".{folder.name}.{platform.node()}-{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same number
    try:
        _fill(temporary, dataset)
    except OSError as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"tokenized rows could not be written into data.cache_dir={folder.parent} ({problem}): make room there, or "
            "set data.cache_dir to another place"
        ) from None
    if load_cached(folder, dataset.paths) is None:
        aside = temporary.with_suffix(".damaged")
        with contextlib.suppress(OSError):  # nothing is there
            os.rename(folder, aside)
        with contextlib.suppress(OSError):
            # Put there since by another machine that shares this file system, which reads it now.
            if load_cached(aside, dataset.paths) is not None:
                os.rename(aside, folder)
        with contextlib.suppress(OSError):  # another machine was faster, with the same contents
            os.rename(temporary, folder)
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def _fill(folder: Path, dataset: TokenDataset) -> None:
    folder.mkdir(parents=True)
    checksums = {}
    for name, dtype in ARRAYS.items():
        path = folder / f"{name}.npy"
        np.save(path, np.ascontiguousarray(getattr(dataset, name), dtype))
        checksums[name] = checksum(path)
    stats = asdict(dataset.stats)
    meta = {"format": FORMAT, "stats": stats, "fingerprint": dataset.fingerprint, "crc32": checksums}
    meta["rejects"] = [asdict(reject) for reject in dataset.rejects]
    meta |= {"unused": dataset.unused, "turn_ends": dataset.turn_ends}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def load_cached(folder: Path, paths: Sequence[str]) -> TokenDataset | None:
    """The data set of a cache folder, memory-mapped; None where it is missing, incomplete or damaged.

    paths: what its files are called now.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for name in ARRAYS:
            if checksum(folder / f"{name}.npy") != meta["crc32"][name]:
                return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        rejects = [Reject(**reject) for reject in meta["rejects"]]
        stats = DataStats(**meta["stats"])
        kept = {name: meta[name] for name in ("fingerprint", "unused", "turn_ends")}
        return TokenDataset(**arrays, paths=paths, stats=stats, rejects=rejects, **kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)


# --------------------------------------------------------------------------------------------------------------- order


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
