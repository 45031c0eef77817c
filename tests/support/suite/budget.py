"""Hold the CPU seconds of `make test` and `make test-all` to tests/budget.toml: make budget, after either.

    make budget                              # fails if they grew by more than 5 %
    make budget ARGS="--write 'WHY'"         # after make test-all: what it took becomes the budget, and says why

What a run took is compared as *seconds x calibration of the budget / calibration of the run*. A calibration is the
median of what calibration.py measured between the tests: the CPU seconds of a fixed piece of work. So a slower machine,
or one with more beside it, has proportionally more seconds to spend.

budget.toml: `calibration`; CPU seconds by folder for each verb (`test-all` includes what `test` runs); of rows of one
second or more; and a history, whose last entry holds the totals, so that no folder is raised without a line that says
why.
"""

import argparse
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.suite.durations import FILE, ROOT, Row, read

BUDGET = ROOT / "tests/budget.toml"
VERBS = {"test": {"test"}, "test-all": {"test", "test-all"}}  # and the rows that each runs
GROWTH = 0.05
# A folder may also grow by this part of the total: which one pays for the start of shared ranks is chance.
OF_TOTAL = 0.01
NOTED = 1.0  # CPU seconds from which on a row is in the budget
HEADER = """\
# CPU seconds that tests may take: written by `make budget ARGS="--write 'WHY'"`
# (tests/support/suite/budget.py).
"""


@dataclass(frozen=True)
class Budget:
    """calibration: CPU seconds of the fixed work when it was written. folders: by verb. rows: without `tests/`.
    history: the totals of every verb and the `why`, oldest first."""

    calibration: float
    folders: Mapping[str, Mapping[str, int]]
    rows: Mapping[str, float]
    history: Sequence[Mapping[str, int | str]]

    @classmethod
    def parse(cls, text: str) -> "Budget":
        data = tomllib.loads(text)
        return cls(data["calibration"], {verb: data[verb] for verb in VERBS}, data["rows"], data["history"])

    def text(self) -> str:
        lines = [HEADER, f"calibration = {self.calibration:.4f}"]
        for verb, folders in self.folders.items():
            lines += ["", f"[{verb}]", *(f"{folder} = {seconds}" for folder, seconds in folders.items())]
        lines += ["", "[rows]", *(f"{quoted(row)} = {seconds:.1f}" for row, seconds in self.rows.items())]
        for entry in self.history:
            totals = [f"{verb} = {entry[verb]}" for verb in VERBS]
            lines += ["", "[[history]]", *totals, f"why = {quoted(str(entry['why']))}"]
        return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A basic string of TOML."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in text) + '"'


def faults(budget: Budget) -> list[str]:
    """What nobody explained: seconds that the last entry of the history does not have, and entries without a reason."""
    found = [
        f"history entry {n} says no why" for n, entry in enumerate(budget.history) if not str(entry["why"]).strip()
    ]
    for verb, folders in budget.folders.items():
        total, last = sum(folders.values()), budget.history[-1][verb]
        if total != last:
            found.append(f"the folders of {verb} add up to {total} and not to the {last} of the last history entry")
    return found


def sums(rows: Sequence[Row], verb: str) -> dict[str, float]:
    """CPU seconds by folder of what the verb runs."""
    folders: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.verb in VERBS[verb]:
            folders[row.folder] += row.cpu
    return folders


def verbs_of(rows: Sequence[Row]) -> list[str]:
    """What was run whole: a run of `make test` says nothing about `make test-all`."""
    return [verb for verb in VERBS if verb == "test" or any(row.verb == verb for row in rows)]


def grown(rows: Sequence[Row], budget: Budget, folder: str | None, slowness: float, count: int = 5) -> str:
    """The rows that grew the most, of a folder or of all: `+SECONDS NAME`, and whether the budget has them."""
    told = []
    for row in rows:
        name = row.name.removeprefix("tests/")
        growth = row.cpu / slowness - budget.rows.get(name, 0.0)
        if growth >= NOTED / 2 and folder in (None, row.folder):
            told.append((growth, f"+{growth:.1f} {name}" + ("" if name in budget.rows else " (new)")))
    return ", ".join(text for _, text in sorted(told, reverse=True)[:count]) or "no row by much"


def excesses(rows: Sequence[Row], budget: Budget, slowness: float) -> list[str]:
    """One line for each total, and each folder, that takes more than its budget."""
    found = []
    for verb in verbs_of(rows):
        measured, allowed = sums(rows, verb), budget.folders[verb]
        of_verb = [row for row in rows if row.verb in VERBS[verb]]
        total = sum(allowed.values())
        parts = {folder: (measured[folder], allowed.get(folder, 0), OF_TOTAL * total) for folder in sorted(measured)}
        for folder, (seconds, budgeted, least) in {"all": (sum(measured.values()), total, 0.0), **parts}.items():
            if seconds / slowness > budgeted + max(GROWTH * budgeted, least):
                most = grown(of_verb, budget, None if folder == "all" else folder, slowness)
                found.append(f"make {verb}, {folder}: {seconds / slowness:.0f} CPU seconds of {budgeted}: {most}")
    return found


def check(rows: Sequence[Row], calibrations: Sequence[float], budget: Budget) -> list[str]:
    """What is wrong, a line each; none if all is within the budget."""
    return faults(budget) + excesses(rows, budget, statistics.median(calibrations) / budget.calibration)


def written(rows: Sequence[Row], calibrations: Sequence[float], why: str, before: Budget | None) -> Budget:
    """The budget of this run."""
    folders = {verb: {folder: round(seconds) for folder, seconds in sorted(sums(rows, verb).items())} for verb in VERBS}
    noted = {row.name.removeprefix("tests/"): row.cpu for row in rows if row.verb in VERBS and row.cpu >= NOTED}
    entry = {verb: sum(of.values()) for verb, of in folders.items()} | {"why": why}
    history = [*(before.history if before else ()), entry]
    return Budget(statistics.median(calibrations), folders, dict(sorted(noted.items())), history)


def main(argv: Sequence[str], file: Path = ROOT / FILE, path: Path = BUDGET) -> int:
    parser = argparse.ArgumentParser(prog="make budget")
    parser.add_argument("--write", metavar="WHY", help="make the last run the budget, and say why it is what it is")
    why = parser.parse_args(argv).write
    rows, calibrations = read(file)
    rows = [row for row in rows if row.verb != "none"]
    if not rows or not calibrations:
        parser.error(f"{file.name} is not of make test or make test-all")
    budget = Budget.parse(path.read_text()) if path.exists() else None
    if why is not None:
        if not why.strip() or verbs_of(rows) != list(VERBS):
            parser.error("--write wants a reason, and a run of make test-all before it")
        path.write_text(written(rows, calibrations, why, budget).text())
        return 0
    if budget is None:
        parser.error(f"there is no {path.name}: write one after make test-all")
    wrong = check(rows, calibrations, budget)
    slowness = statistics.median(calibrations) / budget.calibration
    for verb in verbs_of(rows):
        seconds = sum(sums(rows, verb).values())
        print(
            f"make {verb}: {seconds / slowness:.0f} CPU seconds of {sum(budget.folders[verb].values())}"
            f" ({seconds:.0f} on this machine, which is {slowness:.2f} times as slow)"
        )
    for line in wrong:
        print(f"BUDGET: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
