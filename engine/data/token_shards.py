"""Tokenize rows of files by shards of SHARD_ROWS rows. Each shard is a file, so that memory does not grow with the rows
and a tokenization that was killed goes on from its finished shards.

A file holds int32 tokens [total], bool mask [total], int32 rows [n, 3] (tokens, file, number), a ShardSummary as JSON,
and at the end SIZES: bytes of the JSON, and CRC-32 of everything before SIZES.
"""

import json
import os
import platform
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Reject, Rejects
from isoloss.engine.data.chat import tokenize_row
from isoloss.engine.data.columns import form_of, read_row, unused
from isoloss.engine.data.remarks import remarks
from isoloss.engine.data.rows import UnreadRow, unread_rows
from isoloss.engine.data.turns import TokensAndMask
from isoloss.parallel.runtime.errors import UserError

SHARD_ROWS = 1024  # a constant, so that a tokenization goes on with another number of processes
SIZES = struct.Struct("<II")


@dataclass(frozen=True)
class Job:
    """All that the tokens of a split depend on.

    key: "data.train" or "data.eval". paths: its files.
    vocab_size: number of rows of the model's embedding.
    shard_rows: rows of a shard.
    """

    key: str
    paths: tuple[str, ...]
    tokenizer_dir: str
    vocab_size: int
    data: DataConfig
    shard_rows: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values. A subclass of DataConfig has keys that no token depends on: they are left out."""
        names = {each.name for each in fields(DataConfig)}
        data = {name: value for name, value in asdict(self.data).items() if name in names}
        return {**asdict(self), "data": data}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Job":
        return cls(**{**values, "paths": tuple(values["paths"]), "data": build(DataConfig, values["data"])})


@dataclass(frozen=True)
class ShardSummary:
    """Counts of a shard.

    read: number of rows read. rows: number of rows kept, with `tokens` tokens.
    forms, remarks, unused, dropped, truncated: counts and names, with their meaning in DataStats and TokenDataset.
    rejects: bad rows. error: the mistake that reading ended with; None if the shard is whole.
    """

    read: int
    rows: int
    tokens: int
    targets: int
    dropped: int
    truncated: int
    forms: Mapping[str, int]
    remarks: Mapping[str, int]
    unused: tuple[str, ...]
    rejects: tuple[Reject, ...]
    error: str | None

    @classmethod
    def from_json(cls, text: bytes) -> "ShardSummary":
        values = json.loads(text)
        rejects = tuple(Reject(**reject) for reject in values.pop("rejects"))
        return cls(**values | {"rejects": rejects, "unused": tuple(values["unused"])})


@dataclass(frozen=True)
class Shard:
    """A file of tokens. summary_bytes: length of its JSON."""

    path: Path
    summary: ShardSummary

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return (first byte, bytes) of the tokens, the mask and the rows."""
        tokens, rows = self.summary.tokens, self.summary.rows
        return {"tokens": (0, 4 * tokens), "mask": (4 * tokens, tokens), "rows": (5 * tokens, 12 * rows)}

    def bytes_of(self, name: str) -> bytes:
        start, size = self.parts()[name]
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def rows(self) -> np.ndarray:
        """Return for each row its number of tokens, its file and its number there: int32 [n, 3]."""
        return np.frombuffer(self.bytes_of("rows"), "<i4").reshape(-1, 3)


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:08}.shard"


def finished_shards(folder: Path) -> dict[int, Shard]:
    """Return the whole shards of a folder by index; files that are damaged or end with an error are deleted."""
    shards = {}
    for path in folder.glob("*"):
        shard = read_shard(path) if path.suffix == ".shard" else None
        if shard is None or shard.summary.error is not None:
            path.unlink(missing_ok=True)
        else:
            shards[int(path.stem)] = shard
    return shards


def read_shard(path: Path) -> Shard | None:
    """Return a shard whose checksum is right; None if it is damaged or missing."""
    try:
        data = path.read_bytes()
        size, checksum = SIZES.unpack(data[-SIZES.size :])
        if zlib.crc32(memoryview(data)[: -SIZES.size]) != checksum:
            return None
        return Shard(path, ShardSummary.from_json(data[-SIZES.size - size : -SIZES.size]))
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


def tokenize_shard(rows: Iterable[UnreadRow], job: Job, tokenizer, path: Path) -> Shard:
    """Tokenize rows into the file `path`, which is whole as soon as it exists. A UserError becomes its error.

    Raises OSError if the disk refuses.
    """
    unfinished = path.with_suffix(f".{platform.node()}-{os.getpid()}.partial")
    checksum, mask, kept = 0, bytearray(), []
    counts, forms, found, ignored = Counter[str](), Counter[str](), Counter[str](), dict[str, None]()
    rejects, error = Rejects(job.key, job.paths, job.data.max_rejects), None
    with open(unfinished, "wb") as file:
        try:
            for row in rows:
                counts["read"] += 1
                with rejects.instead_of_error(row):
                    read = read_row(row, job.data)
                    tokens_T, mask_T = tokenize_row(read, tokenizer, job.data.template_variables)
                    ignored |= dict.fromkeys([*unused(read.values), *read.aside])
                    form = form_of(read.values, read.place)
                    row_remarks = remarks(read, form, tokens_T, tokenizer)
                    if len(tokens_T) > job.data.max_length:
                        if job.data.overlong == "drop":
                            counts["dropped"] += 1
                            continue
                        tokens_T, mask_T = cut(tokens_T, mask_T, job, row.place)
                        counts["truncated"] += 1
                    forms[read.form] += 1
                    found.update(row_remarks)
                    data = np.array(tokens_T, "<i4").tobytes()
                    checksum = zlib.crc32(data, checksum)
                    file.write(data)
                    mask += np.array(mask_T, np.bool_).tobytes()
                    kept.append((len(tokens_T), row.file, row.number))
        except UserError as problem:
            error = str(problem)
        summary = ShardSummary(
            read=counts["read"], rows=len(kept), tokens=len(mask), targets=mask.count(1),
            dropped=counts["dropped"], truncated=counts["truncated"], forms=dict(forms), remarks=dict(found),
            unused=tuple(ignored), rejects=tuple(rejects.rows), error=error,
        )  # fmt: skip
        text = json.dumps(asdict(summary)).encode()
        rest = bytes(mask) + np.array(kept, "<i4").tobytes() + text
        file.write(rest + SIZES.pack(len(text), zlib.crc32(rest, checksum)))
    os.replace(unfinished, path)
    return Shard(path, summary)


def cut(tokens_T: list[int], mask_T: list[bool], job: Job, place: str) -> TokensAndMask:
    """Return the first data.max_length tokens of a longer row, and their mask.

    Raises UserError if data.overlong is "error", or if no target is left.
    """
    length, most = len(tokens_T), job.data.max_length
    if job.data.overlong == "error":
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


def rows_by_shard(job: Job) -> Iterator[tuple[int, Iterator[UnreadRow]]]:
    """Yield (index, rows) of every shard. Rows that are not taken are skipped.

    A file that cannot be read ends the last shard with a UserError.
    """
    rows = unread_rows(job.paths, job.key)
    for index in count():
        shard = islice(rows, job.shard_rows)
        try:
            first = next(shard, None)
        except UserError as error:
            yield index, _failing(error)
            return
        if first is None:
            return
        yield index, chain([first], shard)
        try:
            deque(shard, maxlen=0)
        except UserError:  # found by the process that tokenizes this shard
            return


def _failing(error: UserError) -> Iterator[UnreadRow]:
    raise error
    yield
