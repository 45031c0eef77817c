"""What `run.py --pin` finds: the cheapest row that notices each mutant. Kept in a file, so that a run can go on where
it was ended, and written into the catalogue."""

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

FILE = ".mutant-pins.jsonl"
UNKNOWN = 60.0  # seconds of a row that was not measured: more than most take


class MutantLike(Protocol):
    """What a pin is of: another bug of the same name, or other tests, need another one."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def tests(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Row:
    """name: as pytest has it. seconds, wall: CPU and wall seconds on the untouched copy, UNKNOWN if not measured."""

    name: str
    seconds: float
    wall: float


@dataclass(frozen=True)
class Pin:
    """The result of a mutant.

    bug: its file, before, after. tests: those that the catalogue named. verdict: "pinned", "SURVIVED" or "BROKEN".
    row: the row that notices, if pinned. told: the last lines of pytest. wall: seconds of the search.
    """

    mutant: str
    bug: tuple[str, str, str]
    tests: tuple[str, ...]
    verdict: str
    row: str | None
    told: str
    wall: float

    def __str__(self) -> str:
        return f"{self.verdict:8}  {self.wall:6.1f} s  {self.mutant:40}  {self.row or self.told}"

    @classmethod
    def of(cls, mutant: MutantLike, verdict: str, row: str | None, told: str, begun: float) -> "Pin":
        bug = (mutant.file, mutant.before, mutant.after)
        return cls(mutant.name, bug, mutant.tests, verdict, row, told, round(time.monotonic() - begun, 2))

    def fits(self, mutant: MutantLike) -> bool:
        """Also of a mutant whose tests are this row by now."""
        same_bug = tuple(self.bug) == (mutant.file, mutant.before, mutant.after)
        return same_bug and tuple(mutant.tests) in (tuple(self.tests), (self.row,))


class Found:
    """Pins, seconds of rows, and the probes that rows reach (fresh.py), by lines of JSON in `path`, which are written
    as they are found."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self._path, self._lock = path, threading.Lock()
        self.seconds: dict[str, list[float]] = {}  # CPU and wall
        self.reached: dict[str, dict[str, list[str]]] = {}  # by file of tests, of each row the probes
        self._pins: dict[str, Pin] = {}
        if fresh:
            path.unlink(missing_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                read = json.loads(line)
            except ValueError:  # the run was ended while it wrote
                continue
            if "rows" in read:
                self.seconds |= read["rows"]
            elif "reached" in read:
                self.reached[read["file"]] = read["reached"]
            else:
                self._pins[read["mutant"]] = Pin(**read)

    def add_seconds(self, rows: Mapping[str, list[float]]) -> None:
        self.seconds |= rows
        self._write({"rows": dict(rows)})

    def add_reached(self, file: str, rows: Mapping[str, list[str]]) -> None:
        self.reached[file] = dict(rows)
        self._write({"file": file, "reached": self.reached[file]})

    def add_pin(self, pin: Pin) -> None:
        self._pins[pin.mutant] = pin
        self._write(asdict(pin))

    def by_seconds(self, names: Iterable[str]) -> list[Row]:
        """The cheapest first, those that nobody measured last."""
        rows = (Row(name, *self.seconds.get(name, (UNKNOWN, UNKNOWN))) for name in names)
        return sorted(rows, key=lambda row: (row.seconds, row.name))

    def has(self, mutant: MutantLike) -> bool:
        """Whether anything was found of it, also that nothing notices it."""
        return self.pin_of(mutant) is not None

    def pin_of(self, mutant: MutantLike) -> Pin | None:
        pin = self._pins.get(mutant.name)
        return pin if pin is not None and pin.fits(mutant) else None

    def _write(self, line: object) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def name_rows(text: str, rows: Mapping[str, str]) -> str:
    """A file of the catalogue, in which mutants that `rows` has name that row alone. All else stays as it is."""
    parts = re.split(r"(?m)^(?=\[\[mutant\]\]$)", text)
    for place, part in enumerate(parts):
        name = re.search(r'(?m)^name = "(.*)"$', part)
        if name is None or name[1] not in rows:
            continue
        row = json.dumps(rows[name[1]], ensure_ascii=False)
        line = f"tests = [{row}]"
        # A list of one string to a line holds no bracket at the beginning of another line but its last.
        parts[place], times = re.subn(r"(?m)^tests = \[(?:.*\]$|\n(?:    .*\n)*\]$)", lambda _, line=line: line, part)
        if times != 1:
            raise ValueError(f"{name[1]}: {times} lists of tests, not one")
    return "".join(parts)
