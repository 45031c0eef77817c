"""Tokenize a split into shards: a few seconds' work in this process, what remains on all cores."""

import contextlib
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from isoloss.engine.data.bad_rows import Reject, check
from isoloss.engine.data.rows import count_rows
from isoloss.engine.data.token_dataset import DataStats
from isoloss.engine.data.token_processes import cores, shards_of_processes
from isoloss.engine.data.token_shards import (
    Job,
    Shard,
    finished_shards,
    read_shard,
    rows_by_shard,
    shard_path,
    tokenize_shard,
)
from isoloss.parallel.runtime.console import Progress
from isoloss.parallel.runtime.errors import UserError

# Seconds in which this process tokenizes alone. Processes take as long to start, as they import transformers: so what
# is done in one process and in several never takes more than twice the time of the better of both.
ALONE_SECONDS = 3.0


@dataclass
class Tokenized:
    """The shards of a split so far, in the order of its rows, and their counts.

    turn_ends: ids of the tokens that end learned turns, by token.
    """

    job: Job
    turn_ends: Mapping[str, int] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    unused: dict[str, None] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)

    def add(self, shard: Shard) -> None:
        """Add the next shard. Raises UserError for its mistake, or if more than data.max_rejects rows are bad by now.

        So the error is that of the first bad row, whichever process finds one first.
        """
        summary = shard.summary
        self.rejects += summary.rejects
        check(self.job.key, self.job.paths, self.rejects, self.job.data.max_rejects)
        if summary.error is not None:
            raise UserError(summary.error)
        self.shards.append(shard)
        self.forms.update(summary.forms)
        self.remarks.update(summary.remarks)
        self.unused |= dict.fromkeys(summary.unused)

    @property
    def stats(self) -> DataStats:
        counts = (self._sum(name) for name in ("rows", "dropped", "truncated", "tokens", "targets"))
        return DataStats(*counts, forms=dict(self.forms), remarks=dict(self.remarks))

    def _sum(self, name: str) -> int:
        return sum(getattr(shard.summary, name) for shard in self.shards)


def tokenize(job: Job, tokenizer, turn_ends: Mapping[str, int], folder: Path) -> Tokenized:
    """Tokenize into shards in `folder`, going on from the finished ones that it has.

    Raises UserError for a mistake in rows, LostProcessError for a process that was killed, and OSError if the disk
    refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = finished_shards(folder)
    done = sum(shard.summary.read for shard in shards.values())
    progress = Progress("tokenizing", f"rows of {job.key}", partial(count_rows, job.paths), done=done)
    tokenized = Tokenized(job, turn_ends)
    with contextlib.closing(new_shards(job, tokenizer, folder, shards.keys())) as finished:
        for index in finished:
            shard = read_shard(shard_path(folder, index))
            if shard is None:
                raise OSError(f"{shard_path(folder, index)} cannot be read back")
            shards[index] = shard
            progress.advance(shard.summary.read)
            _add_in_order(tokenized, shards)
    _add_in_order(tokenized, shards)
    return tokenized


def _add_in_order(tokenized: Tokenized, shards: Mapping[int, Shard]) -> None:
    while (shard := shards.get(len(tokenized.shards))) is not None:
        tokenized.add(shard)


def new_shards(job: Job, tokenizer, folder: Path, done: Collection[int]) -> Generator[int, None, None]:
    """Tokenize the shards that are not done, and yield the index of each; the caller adds it to `done`."""
    processes, started = cores(), monotonic()
    for index, rows in rows_by_shard(job):
        if index in done:
            continue
        if processes > 1 and monotonic() - started > ALONE_SECONDS:
            yield from shards_of_processes(job, folder, done, processes)
            return
        tokenize_shard(rows, job, tokenizer, shard_path(folder, index))
        yield index
