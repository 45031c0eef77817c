"""Hold the CPU seconds of `make test` and `make test-all` to tests/budget.toml: make budget, after either.

    make budget                              # fails if they grew by more than 5 %
    make budget ARGS="--write 'WHY'"         # after make test-all: what it took becomes the budget, and says why

Machines differ, in imports by another factor than in products of matrices. So rows are compared, not sums: a row that
the budget has counts what it took then, unless by now it takes half as much again, or so much less (which row pays for
the start of shared ranks is chance). A new row counts what it takes. Rows of less than a second are one row a folder.
How slow a machine is, is the median of its rows; if that is far from what calibration.py measured between the tests,
something makes all of them slower, and that fails too.

budget.toml: `calibration`, the CPU seconds of a fixed piece of work; CPU seconds of rows, by the verb that runs them
first (`test-all` runs both); and a history, whose last entry holds the totals, so that none is raised without a line
that says why.
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
VERBS = {"test": ("test",), "test-all": ("test", "test-all")}  # and whose rows each runs
GROWTH = 0.05  # of a total
# What noise does not do to a row: it takes so many times as long, and so many seconds more; or less.
CHANGED, CHANGED_SECONDS = 1.5, 2.0
NOTED = 1.0  # CPU seconds from which on a row is named
SHORT = "rows of less than a second"
# All rows may be so many times as slow as the calibration says, or as fast.
APART = 2.0
HEADER = """\
# CPU seconds that tests may take: written by `make budget ARGS="--write 'WHY'"`
# (tests/support/suite/budget.py).
"""

Seconds = Mapping[str, float]  # by the name of a row, without `tests/`


@dataclass(frozen=True)
class Budget:
    """calibration: CPU seconds of the fixed work when it was written. rows: by verb. history: the totals of every verb
    and the `why`, oldest first."""

    calibration: float
    rows: Mapping[str, Seconds]
    history: Sequence[Mapping[str, int | str]]

    @classmethod
    def parse(cls, text: str) -> "Budget":
        return cls(**tomllib.loads(text))

    @property
    def named(self) -> Seconds:
        return {name: seconds for rows in self.rows.values() for name, seconds in rows.items() if SHORT not in name}

    def total(self, verb: str) -> float:
        return sum(sum(self.rows[part].values()) for part in VERBS[verb])

    def text(self) -> str:
        lines = [HEADER, f"calibration = {self.calibration:.4f}"]
        for verb, rows in self.rows.items():
            lines += ["", f"[rows.{verb}]", *(f"{quoted(row)} = {seconds:.1f}" for row, seconds in rows.items())]
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
    for verb in VERBS:
        total, last = round(budget.total(verb)), budget.history[-1][verb]
        if total != last:
            found.append(f"the rows of {verb} add up to {total} and not to the {last} of the last history entry")
    return found


def table(rows: Sequence[Row], named: Seconds, slowness: float) -> dict[str, dict[str, float]]:
    """By verb, CPU seconds of rows on the budget's machine; short ones that `named` lacks are one row a folder."""
    found: dict[str, dict[str, float]] = {verb: defaultdict(float) for verb in VERBS}
    for row in sorted(rows, key=lambda row: row.name):
        name = row.name.removeprefix("tests/")
        short = name not in named and row.cpu / slowness < NOTED
        found[row.verb][f"{row.folder}: {SHORT}" if short else name] += row.cpu / slowness
    return found


def verbs_of(rows: Sequence[Row]) -> list[str]:
    """What was run whole: a run of `make test` says nothing about `make test-all`."""
    return [verb for verb in VERBS if verb == "test" or any(row.verb == verb for row in rows)]


def slowness_of(rows: Sequence[Row], calibrations: Sequence[float], budget: Budget) -> float:
    """Of this machine, by its rows; by the calibration where the budget knows none of them."""
    named = budget.named
    ratios = [row.cpu / named[name] for row in rows if (name := row.name.removeprefix("tests/")) in named]
    return statistics.median(ratios) if ratios else statistics.median(calibrations) / budget.calibration


def counted(measured: Mapping[str, Seconds], budget: Budget, verb: str) -> tuple[float, list[str]]:
    """The CPU seconds that a verb takes, and the rows by which they grew the most: `+SECONDS NAME`."""
    total, growths = 0.0, []
    for part in VERBS[verb]:
        for name, now in measured[part].items():
            before = budget.rows[part].get(name, 0.0)
            less, more = sorted((before, now))
            changed = more > CHANGED * less and (more > less + CHANGED_SECONDS or not before)
            total += now if changed else before
            if changed and now > before:
                growths.append((now - before, name + ("" if before else " (new)")))
    return total, [f"+{growth:.1f} {name}" for growth, name in sorted(growths, reverse=True)]


def check(rows: Sequence[Row], calibrations: Sequence[float], budget: Budget) -> list[str]:
    """What is wrong, a line each; none if all is within the budget."""
    found, slowness = faults(budget), slowness_of(rows, calibrations, budget)
    calibrated = statistics.median(calibrations) / budget.calibration
    if not 1 / APART <= slowness / calibrated <= APART:
        found.append(f"rows take {slowness:.2f} times what they took, the fixed work {calibrated:.2f} times")
    measured = table(rows, budget.named, slowness)
    for verb in verbs_of(rows):
        (total, growths), allowed = counted(measured, budget, verb), budget.total(verb)
        if total > (1 + GROWTH) * allowed:
            found.append(f"make {verb}: {total:.0f} CPU seconds of {allowed:.0f}: {', '.join(growths[:5])}")
    return found


def written(rows: Sequence[Row], calibrations: Sequence[float], why: str, before: Budget | None) -> Budget:
    """The budget of this run."""
    measured = {
        verb: {name: round(seconds, 1) for name, seconds in of.items()} for verb, of in table(rows, {}, 1.0).items()
    }
    budget = Budget(statistics.median(calibrations), measured, ())
    entry = {verb: round(budget.total(verb)) for verb in VERBS} | {"why": why}
    return Budget(budget.calibration, measured, [*(before.history if before else ()), entry])


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
    wrong, slowness = check(rows, calibrations, budget), slowness_of(rows, calibrations, budget)
    for verb in verbs_of(rows):
        seconds = sum(row.cpu for row in rows if row.verb in VERBS[verb])
        print(
            f"make {verb}: {seconds:.0f} CPU seconds, budget {budget.total(verb):.0f}"
            f" (this machine is {slowness:.2f} times as slow by its rows,"
            f" {statistics.median(calibrations) / budget.calibration:.2f} by the fixed work)"
        )
    for line in wrong:
        print(f"BUDGET: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
