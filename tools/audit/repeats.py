"""Find the rows of data.train and data.eval that repeat others, as the run reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isoloss.tools.audit.copies import Sketches, Tokens, exact_copies, near_copies
from isoloss.tools.audit.figures import PLACES, Copies, Copy
from isoloss.tools.audit.rows import Split


@dataclass(frozen=True, eq=False)
class Repeats:
    """Rows of a split that repeat others.

    inside: rows that repeat an earlier row of the split.
    in_train: rows of data.eval that repeat a row of data.train; None for data.train.
    remarks: words for the row that is repeated, by the row that repeats it.
    """

    inside: Copies
    in_train: Copies | None
    remarks: dict[int, str]


@dataclass(frozen=True, eq=False)
class Seen:
    """The used rows of a split as the run reads them. indices: their indices in the split, int64 [used]."""

    split: Split
    rows: Tokens
    indices: np.ndarray

    @classmethod
    def of(cls, split: Split) -> "Seen":
        indices = np.flatnonzero(split.used)
        if not split.over.any():  # tokens of a memory map stay there
            return cls(split, Tokens(split.tokens, split.offsets), indices)
        tokens = np.concatenate([split.row(i)[0][: split.limit] for i in indices.tolist()])
        return cls(split, Tokens(tokens, np.concatenate([[0], np.cumsum(split.used[indices])])), indices)

    def place(self, row: int) -> str:
        return self.split.place(int(self.indices[row]))


def find_repeats(splits: Sequence[Split]) -> list[Repeats]:
    """Compare the used rows of each split with each other, and those of data.eval with data.train."""
    train = Seen.of(splits[0])
    sketches = Sketches(train.rows, "rows of data.train")
    inside, remarks = _compare(train, sketches, None)
    found = [Repeats(inside, None, remarks)]
    for split in splits[1:]:
        mine = Seen.of(split)
        own_sketches = Sketches(mine.rows, f"rows of {split.key}", sketches.common)
        inside, remarks = _compare(mine, own_sketches, None)
        in_train, more = _compare(mine, own_sketches, (train, sketches))
        found.append(Repeats(inside, in_train, remarks | more))
    return found


def _compare(rows: Seen, sketches: Sketches, of: tuple[Seen, Sketches] | None) -> tuple[Copies, dict[int, str]]:
    """Return the copies, and what each row repeats, by its index in the split."""
    others = of[0] if of else rows
    exact = exact_copies(rows.rows, others.rows if of else None)
    near = near_copies(sketches, exact < 0, of[1] if of else None)
    remarks, examples = {}, []
    for found, is_near in ((exact, False), (near, True)):
        for row in np.flatnonzero(found >= 0).tolist():
            copy = Copy(rows.place(row), others.place(int(found[row])), is_near)
            remarks[int(rows.indices[row])] = str(copy).removeprefix(f"{copy.row} ")
            examples += [copy] if len(examples) < PLACES else []
    return Copies(int((exact >= 0).sum()), int((near >= 0).sum()), examples), remarks
