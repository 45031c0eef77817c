"""How long each test took, written as the run goes on; `make slowest` makes the table of the slowest.

A file of tab-separated values: wall seconds and CPU seconds of a test with its fixtures, the verb that runs it first
(test, test-all, or none), and its id. CPU seconds count the whole tree of processes, so they hardly depend on what else
the machine does. Lines of the verb `calibration` are measurements of calibration.py, with the worker's name.
"""

import contextlib
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.suite import calibration

ROOT = Path(__file__).parents[3]
FILE = ".pytest-durations.tsv"
CALIBRATION = "calibration"


@dataclass(frozen=True)
class Row:
    """wall, cpu: seconds. verb: `test` or `test-all`, which runs it first; `none` of them; or CALIBRATION."""

    wall: float
    cpu: float
    verb: str
    name: str

    @property
    def folder(self) -> str:
        return self.name.split("/")[1]


def read(path: Path) -> tuple[list[Row], list[float]]:
    """The rows of tests, and the calibrations."""
    fields = [line.split("\t") for line in path.read_text().splitlines()]
    rows = [Row(float(wall), float(cpu), verb, name) for wall, cpu, verb, name in fields]
    return [row for row in rows if row.verb != CALIBRATION], [row.cpu for row in rows if row.verb == CALIBRATION]


def verb_of(item: pytest.Item) -> str | None:
    """None for the tests of `make test-docs` and `make test-sglang`, whose seconds are not written: each may run while
    `make test-all` does, and would overwrite its file."""
    if any(map(item.get_closest_marker, ("sglang", "docs"))):
        return None
    if item.get_closest_marker("slow"):
        return "none"
    return "test-all" if item.get_closest_marker("full") else "test"


def cpu_seconds() -> float:
    """User and system time of this process and of all that it started, those that have ended included."""
    own = psutil.Process()
    spent = sum(own.cpu_times()[:4])
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since: its parent has its time now
            spent += sum(process.cpu_times()[:4])
    return spent


class Durations:
    """In a worker: measure. In the process that gathers the reports: write."""

    def __init__(self, config: pytest.Config):
        self._path = config.rootpath / FILE
        self._writes = not hasattr(config, "workerinput") and not config.option.collectonly
        self._spent = 0.0
        self._calibrated = -math.inf
        self._wall: dict[str, float] = defaultdict(float)
        self._cpu: dict[str, float] = defaultdict(float)
        self._mode = "w"

    def pytest_collection_finish(self) -> None:
        self._spent = cpu_seconds()  # imports are no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        report.cpu = 0.0
        if report.when == "teardown":  # once a test, as it looks at every process of the machine
            spent = cpu_seconds()
            report.cpu, self._spent = max(0.0, spent - self._spent), spent
        report.group = "".join(f"@{mark.args[0]}" for mark in item.iter_markers("xdist_group"))
        report.verb = verb_of(item)
        if report.when == "teardown" and time.monotonic() - self._calibrated >= calibration.EVERY:
            if self._calibrated < 0:
                calibration.cpu_seconds()  # the first operations of a process are slow
            report.calibration = f"{calibration.cpu_seconds():.4f}", os.environ.get("PYTEST_XDIST_WORKER", "alone")
            self._calibrated, self._spent = time.monotonic(), cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes or getattr(report, "verb", None) is None:
            return
        name = report.nodeid.removesuffix(getattr(report, "group", ""))
        self._wall[name] += report.duration
        self._cpu[name] += getattr(report, "cpu", 0.0)
        if report.when == "teardown":
            with self._path.open(self._mode) as file:
                self._mode = "a"
                file.write(f"{self._wall.pop(name):.2f}\t{self._cpu.pop(name):.2f}\t{report.verb}\t{name}\n")
                if calibrated := getattr(report, "calibration", None):
                    file.write(f"0\t{calibrated[0]}\t{CALIBRATION}\t{calibrated[1]}\n")


def table(rows: list[Row], count: int = 20) -> str:
    """Sums by folder, then the slowest tests, as Markdown."""
    folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        sums = folders[row.folder]
        for index, value in enumerate((1, row.wall, row.cpu)):
            sums[index] += value
    lines = ["| folder | tests | CPU seconds | wall seconds |", "|---|---|---|---|"]
    for folder, (tests, wall, cpu) in sorted(folders.items(), key=lambda item: -item[1][2]):
        lines.append(f"| {folder} | {tests:.0f} | {cpu:.0f} | {wall:.0f} |")
    lines += ["", "| CPU seconds | wall seconds | test |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: -row.cpu)[:count]:
        lines.append(f"| {row.cpu:.1f} | {row.wall:.1f} | `{row.name.removeprefix('tests/')}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read(ROOT / FILE)[0]))
