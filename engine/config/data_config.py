"""Define the keys of a run's data."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from isoloss.parallel.runtime.config_key import Keys, key, require

DATE = "strftime_now"  # transformers' name for the clock that chat templates may call


@dataclass(frozen=True)
class WeightedFile:
    """A file of a mixture. weight: its rows' part of all rows drawn, next to the weights of the other files."""

    path: str
    weight: float

    def __post_init__(self):
        holds = math.isfinite(self.weight) and self.weight > 0
        require(holds, f"data.train: weight of {self.path}", self.weight, "must be positive and finite")

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class DataConfig(Keys, group="data"):
    """The rows to train on and to evaluate."""

    train: tuple[str | WeightedFile, ...] = key(
        (),
        "Files, folders, globs or names of the hub to train on (docs/data.md); a recipe needs at least one. With "
        "weights, as [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}], rows are drawn in these proportions "
        "(docs/train.md).",
    )
    eval: tuple[str, ...] = key((), "The same for held-out rows, for evaluations, without weights; []: none.")
    max_length: int = key(
        2048,
        "Most tokens of a row; in reinforcement learning, of prompt and completion together.",
        at_least=2,
    )
    overlong: Literal["error", "drop", "truncate"] = key(
        "error",
        "What happens to a longer row: the run stops and names it, or the row is dropped, or its end is cut off. "
        "Prompts are never truncated.",
    )
    max_rejects: int = key(
        0,
        "Bad rows of data.train, and as many of data.eval, that may be left out; output_dir/rejects.jsonl names each "
        "with its file, line and reason. 0: the first one ends the run.",
        at_least=0,
    )
    show_rows: int | None = key(
        None,
        "How many of the first rows are printed as the model gets them, with the tokens that are trained marked; null: "
        "2 on a terminal, none elsewhere.",
        at_least=0,
    )
    columns: Mapping[str, Any] = key(
        {},
        "The columns to read, by isoloss's names of them, such as {question: problem, answer: reward_model.answer}. "
        "Then no other column makes the form of a row (docs/data.md).",
    )
    system: str | None = key(
        None, "A system message for the rows without one. Rows that have one keep it, and the banner counts them."
    )
    template_kwargs: Mapping[str, Any] = key(
        {}, "Variables for the chat template, such as {enable_thinking: false}. A row's own tools reach it as `tools`."
    )
    date: str | None = key(
        None,
        "The day for chat templates that ask for the date (strftime_now), as YYYY-MM-DD. null: the day of the run's "
        "first start, which its checkpoints keep.",
    )
    cache_dir: str | None = key(
        None, "Folder that keeps tokenized rows for the next run; null: .cache next to output_dir."
    )

    def __post_init__(self):
        super().__post_init__()
        try:
            valid = self.date is None or str(date.fromisoformat(self.date)) == self.date
        except ValueError:
            valid = False
        require(valid, "data.date", self.date, "must be a day such as 2026-11-28")
        if not self.is_mixture:
            return
        plain = [file for file in self.train if isinstance(file, str)]
        require(not plain, "data.train", plain, "has no weight, as others have: write {path: FILE, weight: NUMBER}")
        real = Counter(os.path.realpath(path) for path in self.paths("train"))
        twice = [path for path in self.paths("train") if real[os.path.realpath(path)] > 1]
        require(not twice, "data.train", twice, "is one file twice in a mixture: add its weights up")

    @property
    def is_mixture(self) -> bool:
        """Return whether the files of data.train have weights."""
        return any(isinstance(file, WeightedFile) for file in self.train)

    def paths(self, split: Literal["train", "eval"]) -> tuple[str, ...]:
        """Return the files of a split, in their order."""
        return tuple(map(str, self.train if split == "train" else self.eval))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Return the variables for chat templates: data.template_kwargs, and under DATE the day for `strftime_now`."""
        return self.template_kwargs if self.date is None else {**self.template_kwargs, DATE: self.date}
