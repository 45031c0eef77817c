"""Say what earlier releases of other trainers divided their losses by, and by which factor that was off.

A release is a day: of the commit that ran (`git log -1 --format=%cs`), or on which a package index got the release. A
line of releases.toml holds from the day of the change that brought it to the day of the one that mended it.
"""

import datetime
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss.parallel import UserError
from isoloss.tools.migrate.denominator import Denominator

NAMES = {"verl": "verl", "trl": "TRL", "slime": "slime", "skyrl": "SkyRL", "ms-swift": "ms-swift", "nemo-rl": "NeMo-RL"}
SIZE = re.compile(r"([a-z_]{2,})(?:\^(\d))?")


@dataclass(frozen=True)
class Sizes:
    """The sizes of an optimizer step; None if not known.

    ranks: number of ranks that hold different samples. micro_batches: number on each rank. sequences: number on all
    ranks. steps: number of optimizer steps that a generated batch feeds.
    """

    ranks: int | None = None
    micro_batches: int | None = None
    sequences: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Past:
    """A line of releases.toml, which explains the fields. loss: the name of the line."""

    trainer: str
    loss: str
    thread: str
    divided: str
    since: str = ""
    until: str = ""
    proposed: bool = False
    kind: str = ""
    weights: Denominator | None = None
    formula: str = ""

    def factor(self, sizes: Sizes) -> float:
        """Return the value of the formula, such as `sequences / ranks^2`; 1 for a size that is not known."""
        above, below = (
            math.prod((getattr(sizes, name) or 1) ** int(power or 1) for name, power in SIZE.findall(part))
            for part in (*self.formula.partition(" / ")[::2],)
        )
        return above / below


def _read(path: Path) -> tuple[Past, ...]:
    """Return the lines of the file. An unknown field raises TypeError."""
    return tuple(
        Past(trainer, loss, **fields | ({"weights": Denominator(**fields["weights"])} if "weights" in fields else {}))
        for trainer, losses in tomllib.loads(path.read_text()).items()
        for loss, fields in losses.items()
    )


PASTS = _read(Path(__file__).with_suffix(".toml"))


def day(text: str) -> str:
    """Return a day as the table has it. Raise UserError if the text is none."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise UserError(
            f"--release {text}: must be a day, YYYY-MM-DD: of the commit (git log -1 --format=%cs), or of the release"
        ) from None


def in_effect(trainer: str, release: str, kinds: Sequence[str] | None = None) -> list[Past]:
    """Return the losses of that day. kinds: the losses of a configuration; None: all of the trainer's."""
    return [
        past
        for past in PASTS
        if past.trainer == trainer
        and past.since <= release
        and (not past.until or release < past.until or past.proposed)
        and (kinds is None or past.kind in kinds)
    ]


def describe(trainer: str, release: str, sizes: Sizes, kinds: Sequence[str] | None = None) -> list[str]:
    """Say what a run of that day computed, in a line for each loss."""
    lines = [_line(past, release, sizes) for past in in_effect(trainer, release, kinds)]
    return lines or [f"nothing is known of {NAMES[trainer]} of {release} that its documentation does not say"]


def _line(past: Past, release: str, sizes: Sizes) -> str:
    late = past.until and release >= past.until
    period = f"{f'from {past.since} ' if past.since else ''}{f'until {past.until} ' if past.until else ''}".strip()
    text = f"{past.loss} ({f'{period}, ' if period else ''}{past.thread}): divided by {past.divided}"
    if late:
        text += f"; the change was proposed on {past.until}, and the day of its merge is not known"
    if past.formula:
        missing = [name for name, _ in SIZE.findall(past.formula) if getattr(sizes, name) is None]
        number = f"; give {', '.join(f'{name}=N' for name in missing)}" if missing else f" = {past.factor(sizes):.6g}"
        text += f"; its loss and gradient were {past.formula}{number} times what they should be"
    if past.weights is not None and past.weights.scope != "step":
        text += "; a token of a micro-batch with half the average number of tokens weighed twice as much" + (
            f", among {sizes.ranks * sizes.micro_batches} micro-batches" if sizes.ranks and sizes.micro_batches else ""
        )
    return text


def sizes_of(words: Sequence[str]) -> Sizes:
    """Return the sizes that words such as `ranks=8 micro_batches=4` give."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in Sizes.__dataclass_fields__ or not value.isdigit() or int(value) < 1:
            names = ", ".join(f"{name}=N" for name in Sizes.__dataclass_fields__)
            raise UserError(f"cannot read {word!r}: write {names}, whole numbers above 0")
        values[name] = int(value)
    return Sizes(**values)
