"""Load the rows of a split at their full length, and decide what the run makes of each.

Rows are tokenized by the run's own functions, with a limit that no row reaches. So the length of a row that the run
drops or cuts is known, and one cache serves every data.max_length.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from isoloss.engine.config.schema import Config
from isoloss.engine.data.bad_rows import Reject
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.rows import Row, place_of, unread_rows
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.prompts import load_prompts
from isoloss.engine.rl.setup import prompt_room
from isoloss.engine.rl.trajectory import Prompt
from isoloss.engine.run.folder import cache_folder, tokenizer_folder
from isoloss.models.architecture import Architecture

UNLIMITED = 2**31 - 1  # tokens of a row, and bad rows


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of data.train or data.eval that can be tokenized, n rows of `total` tokens in all.

    key: "data.train" or "data.eval".
    tokens, mask: int32 and bool [total]; the mask is True at targets. Prompts of reinforcement learning have none.
    offsets: int64 [n + 1]; row i is offsets[i]:offsets[i + 1].
    origins: int32 [n, 2]; index of the row's file in `paths`, and its line or row in it, from 1.
    bad: rows that cannot be trained on, whatever the limit is.
    limit, limit_key: most tokens of a row, and the key or the difference of keys that it follows from.
    overlong: data.overlong, the fate of a longer row.
    repeated: number of rows that data.duplicates=drop leaves out.
    prompts: the rows as prompts of reinforcement learning; empty for supervised fine-tuning.
    """

    key: str
    paths: tuple[str, ...]
    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    origins: np.ndarray
    bad: Sequence[Reject]
    limit: int
    limit_key: str
    overlong: str
    forms: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)
    unused: Sequence[str] = ()
    turn_ends: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    prompts: tuple[Prompt, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [T] and mask [T] of a row at its full length."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.mask[part]

    def place(self, index: int) -> str:
        """Return "file:line" of a row."""
        file, number = self.origins[index].tolist()
        return place_of(self.paths[file], number)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each row, int64 [n]."""
        return np.diff(self.offsets).astype(np.int64)

    @cached_property
    def over(self) -> np.ndarray:
        """Return which rows are longer than the limit, bool [n]."""
        return self.lengths > self.limit

    @cached_property
    def targets(self) -> np.ndarray:
        """Return the number of targets of each row within the limit, int64 [n]."""
        if not len(self):
            return np.zeros(0, np.int64)
        counts = np.add.reduceat(self.mask, self.offsets[:-1], dtype=np.int64)
        for index in np.flatnonzero(self.over).tolist():
            counts[index] = self.row(index)[1][: self.limit].sum()
        return counts

    @cached_property
    def cut(self) -> np.ndarray:
        """Return which rows the run trains on without their end, bool [n]."""
        return self.over & (self.targets > 0) if self.overlong == "truncate" else np.zeros(len(self), bool)

    @cached_property
    def dropped(self) -> np.ndarray:
        """Return which rows data.overlong=drop leaves out, bool [n]."""
        return self.over if self.overlong == "drop" else np.zeros(len(self), bool)

    @cached_property
    def refused(self) -> np.ndarray:
        """Return which rows the run takes for bad ones because of their length, bool [n]."""
        return self.over & ~self.cut & ~self.dropped

    @cached_property
    def used(self) -> np.ndarray:
        """Return the number of tokens of each row that the run reads, int64 [n]; 0 for a row that it leaves out."""
        return np.where(self.dropped | self.refused, 0, np.minimum(self.lengths, self.limit))

    @cached_property
    def all_targets(self) -> np.ndarray:
        """Return which used rows have nothing but targets after their first token, bool [n]; none if all rows are of
        the form `text`, which has no other tokens."""
        return (self.used > 1) & (self.targets >= self.used - 1) & (set(self.forms) != {"text"})

    @cached_property
    def rejects(self) -> list[Reject]:
        """Return all bad rows, with the reason of each."""
        left = "" if self.overlong == "error" else ", and no target is left within it"
        ends = f"tokens are more than {self.limit_key}={self.limit}{left}: raise it, or set data.overlong=drop"
        late = []
        for row in np.flatnonzero(self.refused).tolist():
            file, number = self.origins[row].tolist()
            late.append(Reject(file, number, f"{self.lengths[row]} {ends}"))
        return sorted([*self.bad, *late], key=lambda reject: (reject.file, reject.number))


def load_split(config: Config, arch: Architecture, split: Literal["train", "eval"], tokenizer: Any) -> Split:
    """Return data.train or data.eval. Raises UserError for a mistake that no row can be read with."""
    if isinstance(config, RLConfig):
        return _prompts(config, arch, split, tokenizer)
    whole = replace(config.data, max_length=UNLIMITED, overlong="error", max_rejects=UNLIMITED)
    folders = {"vocab_size": arch.vocab_size, "cache_dir": cache_folder(config)}
    rows = load_dataset(whole, split, str(tokenizer_folder(config)), **folders)
    return Split(
        f"data.{split}", rows.paths, rows.tokens, rows.mask, rows.offsets, rows.origins, rows.rejects,
        config.data.max_length, "data.max_length", config.data.overlong,
        forms=rows.stats.forms, remarks=rows.stats.remarks, unused=rows.unused, turn_ends=rows.turn_ends,
    )  # fmt: skip


def _prompts(config: RLConfig, arch: Architecture, split: Literal["train", "eval"], tokenizer: Any) -> Split:
    room, limit_key = prompt_room(config, arch)
    whole = replace(config.data, overlong="drop", max_rejects=UNLIMITED)
    duplicates = config.data.duplicates if split == "train" else "keep"
    found = load_prompts(whole, split, tokenizer, max_prompt_tokens=UNLIMITED, duplicates=duplicates)
    paths: tuple[str, ...] = getattr(config.data, split)
    tokens = np.concatenate([np.array(prompt.tokens, np.int32) for prompt in found.prompts])
    lengths = [len(prompt.tokens) for prompt in found.prompts]
    file_of = {os.path.basename(path): file for file, path in enumerate(paths)}
    file_of |= {path: file for file, path in enumerate(paths)}
    parts = [prompt.id.rpartition(":") for prompt in found.prompts]
    return Split(
        f"data.{split}", paths, tokens, np.zeros(len(tokens), bool), np.cumsum([0, *lengths], dtype=np.int64),
        np.array([(file_of[name], int(number)) for name, _, number in parts], np.int32), found.rejects,
        room, limit_key, config.data.overlong, forms=dict(found.forms), repeated=found.repeated, prompts=found.prompts,
    )  # fmt: skip


def read_again(split: Split, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], Row]:
    """Return the rows of these origins, as their files hold them."""
    found: dict[tuple[int, int], Row] = {}
    for row in unread_rows(split.paths, split.key):
        if len(found) == len(wanted):
            break
        if (row.file, row.number) in wanted:
            found[row.file, row.number] = row.read()
    return found
