"""Count what the loss will see of a split: rows and their fate, tokens, targets, lengths, copies, and steps."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from isoloss.engine.batching.balance import CostModel, make_plan
from isoloss.engine.config.schema import Config
from isoloss.engine.data.dataset import step_indices, steps_for_epochs
from isoloss.engine.rl.config import RLConfig
from isoloss.models.architecture import Architecture
from isoloss.tools.audit.rows import Split

PLACES = 3  # named of each kind of row
CLASSES = 8  # of the histogram of lengths
STEPS = 20  # planned steps, from the first one
NO_TARGET = ("no token of `", "no assistant turn to learn from")  # beginnings of reasons of `engine.data.chat`


@dataclass(frozen=True)
class Reason:
    """A reason that rows have in common. text: the reason of the first of them. places: the first few."""

    text: str
    rows: int
    places: Sequence[str]


@dataclass(frozen=True)
class Copy:
    """A row that repeats another one. row, other: their places. near: whether it is no exact copy."""

    row: str
    other: str
    near: bool

    def __str__(self) -> str:
        return f"{self.row} {'nearly ' if self.near else ''}repeats {self.other}"


@dataclass(frozen=True)
class Copies:
    """Rows that repeat others.

    exact, near: numbers of rows that repeat another one; `near` are not exact copies.
    examples: the first few, exact ones first.
    """

    exact: int
    near: int
    examples: Sequence[Copy]


@dataclass(frozen=True)
class SplitFigures:
    """Counts of a split.

    read, used, cut, dropped, rejected, repeated: numbers of rows. `cut` are used too; read = used + dropped + rejected
        + repeated.
    no_targets: number of rejected rows without a token to learn.
    all_targets: number of used rows in which every token but the first is a target.
    over_budget: number of used rows of more than batch.max_tokens.
    tokens, targets: numbers in used rows.
    cut_tokens: number of tokens that are cut off.
    median, longest, percentile_90, percentile_99: tokens of all rows, before any is cut.
    histogram: (most tokens, rows) of classes of these lengths.
    reasons: why rows were rejected.
    copies: rows of this split that repeat an earlier one.
    in_train: rows of data.eval that are in data.train; None for data.train.
    forms, remarks: rows by their columns and by key of `remarks.MESSAGES`, before any is dropped for its length.
    unused: columns that nothing is read from.
    """

    key: str
    files: Sequence[str]
    read: int
    used: int
    cut: int
    dropped: int
    rejected: int
    repeated: int
    no_targets: int
    all_targets: int
    over_budget: int
    tokens: int
    targets: int
    cut_tokens: int
    median: int
    percentile_90: int
    percentile_99: int
    longest: int
    limit: int
    limit_key: str
    histogram: Sequence[tuple[int, int]]
    reasons: Sequence[Reason]
    copies: Copies
    in_train: Copies | None
    forms: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)
    unused: Sequence[str] = ()


def split_figures(split: Split, budget: int, copies: Copies, in_train: Copies | None) -> SplitFigures:
    """Return the counts of a split. budget: batch.max_tokens."""
    used = split.used > 0
    after_cut = int((split.refused & (split.targets == 0)).sum()) if split.overlong == "truncate" else 0
    return SplitFigures(
        split.key,
        split.paths,
        read=len(split) + len(split.bad) + split.repeated,
        used=int(used.sum()),
        cut=int(split.cut.sum()),
        dropped=int(split.dropped.sum()),
        rejected=len(split.rejects),
        repeated=split.repeated,
        no_targets=sum(reject.reason.startswith(NO_TARGET) for reject in split.bad) + after_cut,
        all_targets=int(split.all_targets.sum()),
        over_budget=int((split.used > budget).sum()),
        tokens=int(split.used.sum()),
        targets=int(split.targets[used].sum()),
        cut_tokens=int((split.lengths - split.used)[split.cut].sum()),
        median=percentile(split.lengths, 50),
        percentile_90=percentile(split.lengths, 90),
        percentile_99=percentile(split.lengths, 99),
        longest=int(split.lengths.max()),
        limit=split.limit,
        limit_key=split.limit_key,
        histogram=histogram(split.lengths, split.limit),
        reasons=grouped((reject.place(split.paths), reject.reason) for reject in split.rejects),
        copies=copies,
        in_train=in_train,
        forms=split.forms,
        remarks=split.remarks,
        unused=split.unused,
    )


def percentile(lengths: np.ndarray, percent: int) -> int:
    """Return the smallest length that `percent` of the rows do not exceed."""
    return int(np.percentile(lengths, percent, method="inverted_cdf"))


def histogram(lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Count rows by length in classes that double, the last of which ends at the longest row. The limit is an end of a
    class, if a row is longer."""
    longest = int(lengths.max())
    ends = {-(-longest // 2**halvings) for halvings in range(CLASSES)} | ({limit} if limit < longest else set())
    classes, below = [], 0
    for end in sorted(ends):
        up_to = int((lengths <= end).sum())
        if up_to > below or classes:
            classes.append((end, up_to - below))
        below = up_to
    return classes


def grouped(reasons: Iterable[tuple[str, str]]) -> list[Reason]:
    """Return (place, reason) of rows by kind of reason, the most frequent first: numbers and quoted words in a reason
    do not count."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for place, reason in reasons:
        kind = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "''", re.sub(r"\d[\d,.]*", "0", reason))
        kinds.setdefault(kind, []).append((place, reason))
    return [
        Reason(rows[0][1], len(rows), [place for place, _ in rows[:PLACES]])
        for rows in sorted(kinds.values(), key=len, reverse=True)
    ]


@dataclass(frozen=True)
class Steps:
    """The steps of a run, as the rows of data.train fill them.

    rows: number of rows in a step; in reinforcement learning, prompts of a generated batch.
    total: number of optimizer steps of the run.
    epoch: number of steps in which every row is taken once.
    epochs: number of times that the run takes every row.
    micro_batches: fewest and most in a step, of one data-parallel rank that has all of its rows.
    filled: tokens of a step over micro-batches x batch.max_tokens, mean of the first steps.
    """

    rows: int
    total: int
    epoch: float
    epochs: float
    micro_batches: tuple[int, int]
    filled: float


def steps_of(config: Config, arch: Architecture, train: Split) -> Steps:
    """Plan the first steps. In reinforcement learning every completion has rollout.max_new_tokens tokens."""
    lengths, rows = train.used[train.used > 0], config.batch.global_size
    copies, per_batch = 1, 1
    if isinstance(config, RLConfig):
        lengths, copies = lengths + config.rollout.max_new_tokens, config.rollout.num_generations
        per_batch = config.steps_per_batch
    budget, costs = config.batch.max_tokens, CostModel.of(arch, config.lora)
    counts, filled = [], []
    for step in range(STEPS):
        taken = np.repeat(lengths[step_indices(len(lengths), step, rows, config.train.seed)], copies)
        part = taken[: -(-len(taken) // per_batch)]
        counts.append(make_plan(part, 1, budget, costs).num_micro_batches)
        filled.append(np.minimum(part, budget).sum() / (counts[-1] * budget))
    total = config.train.steps or per_batch * steps_for_epochs(len(lengths), config.train.epochs, rows)
    epoch = per_batch * len(lengths) / rows
    return Steps(rows, total, epoch, total / epoch, (min(counts), max(counts)), float(np.mean(filled)))
