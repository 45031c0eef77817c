"""Choose the rows to show, and mark their text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isoloss.engine.data.rows import listed
from isoloss.engine.data.turn_ends import special_ids
from isoloss.parallel import UserError
from isoloss.tools.audit.audit import Audit
from isoloss.tools.audit.pieces import Piece, pieces
from isoloss.tools.audit.rows import Split, read_again
from isoloss.tools.audit.template_facts import muted


@dataclass(frozen=True)
class ShownRow:
    """A row with its text.

    place: "file:line".
    why: oddities of the row, and reasons to show it.
    length, used, targets: numbers of tokens: of the whole row, of what the run reads of it, and of its targets.
    answer: the answer of a prompt; None for a row of supervised fine-tuning.
    """

    key: str
    place: str
    why: Sequence[str]
    length: int
    used: int
    targets: int
    pieces: Sequence[Piece]
    answer: str | None = None


def worst(split: Split, remarks: Mapping[int, Sequence[str]], count: int) -> dict[int, str]:
    """Return `count` rows that are worth a look, and why: the longest, the one with the smallest share of targets, one
    of each kind of remark, and then the first ones."""
    chosen: dict[int, str] = {}
    kinds: dict[str, int] = {}
    for row in sorted(remarks):
        for remark in remarks[row]:
            kinds.setdefault(remark.split()[0], row)
    candidates = [(int(split.lengths.argmax()), "longest")]
    if not split.prompts:
        share = np.where(split.used > 0, split.targets / np.maximum(split.used, 1), 2.0)
        candidates.append((int(share.argmin()), "fewest targets"))
    candidates += [(row, "") for row in kinds.values()]
    candidates += [(row, "") for row in range(min(count, len(split)))]
    for row, why in candidates:
        if row in chosen or len(chosen) < count:
            chosen[row] = ", ".join(filter(None, (chosen.get(row, ""), why)))
    return chosen


def for_page(split: Split, remarks: Mapping[int, Sequence[str]], count: int) -> dict[int, str]:
    """Return about `count` rows: at most half of them chosen by their remarks, the others evenly spaced."""
    chosen = worst(split, remarks, count // 10)
    odd = sorted(remarks)
    chosen |= {row: chosen.get(row, "") for row in _spaced(odd, count // 2)}
    chosen |= {row: chosen.get(row, "") for row in _spaced(range(len(split)), count - len(chosen))}
    return dict(sorted(chosen.items()))


def _spaced(rows: Sequence[int], count: int) -> list[int]:
    steps = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int) if len(rows) else ()
    return [rows[step] for step in steps]


def shown_rows(audit: Audit, number: int, chosen: Mapping[int, str]) -> list[ShownRow]:
    """Return rows of audit.splits[number] with their text. chosen: why a row is shown, by row."""
    split, tokenizer = audit.splits[number], audit.tokenizer
    origins = {row: tuple(split.origins[row].tolist()) for row in chosen}
    read = {} if split.prompts else read_again(split, {*origins.values()})
    special, variables, shown = special_ids(tokenizer), audit.config.data.template_variables, []
    for row, why in chosen.items():
        tokens_T, mask_T = split.row(row)
        muted_T = [False] * len(tokens_T)
        if not split.prompts:
            muted_T = muted(read[origins[row]], mask_T.tolist(), tokenizer, variables)
        used = int(split.used[row])
        shown.append(
            ShownRow(
                split.key,
                split.place(row),
                [*filter(None, [why]), *audit.remarks[number].get(row, ())],
                len(tokens_T),
                used,
                int(split.targets[row]) if used else 0,
                pieces(tokens_T, mask_T, muted_T, used, tokenizer, special),
                str(split.prompts[row].answer) if split.prompts else None,
            )
        )
    return shown


def rows_at(audit: Audit, places: Iterable[str]) -> list[ShownRow | str]:
    """Return the rows of --row FILE:LINE, or for a bad row its place and reason. Raises UserError."""
    found: list[ShownRow | str] = []
    for place in places:
        name, _, line = place.rpartition(":")
        files = [
            (number, file)
            for number, split in enumerate(audit.splits)
            for file, path in enumerate(split.paths)
            if name in (path, Path(path).name)
        ]
        if not files or not line.isdecimal():
            paths = listed(path for split in audit.splits for path in split.paths)
            raise UserError(f"--row {place} is no FILE:LINE of the data: files are {paths}; lines are counted from 1")
        here = [shown for number, file in files for shown in _rows_from(audit, number, (file, int(line)))]
        if not here:
            raise UserError(f"--row {place}: the file has no such row, or data.duplicates=drop leaves it out")
        found += here
    return found


def _rows_from(audit: Audit, number: int, origin: tuple[int, int]) -> list[ShownRow | str]:
    split = audit.splits[number]
    bad = [reject for reject in split.bad if (reject.file, reject.number) == origin]
    if bad:
        return [f"{split.key} {bad[0].place(split.paths)}: rejected: {bad[0].reason}"]
    rows = np.flatnonzero((split.origins == origin).all(axis=1)).tolist()
    return [*shown_rows(audit, number, dict.fromkeys(rows, ""))]
