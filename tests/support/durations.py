"""How long each test took, written as the run goes on; `make slowest` makes the table of the slowest.

A file of tab-separated values: wall seconds and CPU seconds of a test with its fixtures, and its id. CPU seconds count
the whole tree of processes, so they hardly depend on what else the machine does.
"""

import contextlib
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

FILE = ".pytest-durations.tsv"


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
        self._wall: dict[str, float] = defaultdict(float)
        self._cpu: dict[str, float] = defaultdict(float)
        if self._writes:
            self._path.unlink(missing_ok=True)

    def pytest_collection_finish(self) -> None:
        self._spent = cpu_seconds()  # imports are no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        spent = cpu_seconds()
        report.cpu, self._spent = max(0.0, spent - self._spent), spent
        report.group = "".join(f"@{mark.args[0]}" for mark in item.iter_markers("xdist_group"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes:
            return
        name = report.nodeid.removesuffix(getattr(report, "group", ""))
        self._wall[name] += report.duration
        self._cpu[name] += getattr(report, "cpu", 0.0)
        if report.when == "teardown":
            with self._path.open("a") as file:
                file.write(f"{self._wall.pop(name):.2f}\t{self._cpu.pop(name):.2f}\t{name}\n")


def table(rows: list[tuple[float, float, str]], count: int = 20) -> str:
    """Sums by folder, then the slowest tests, as Markdown."""
    folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for wall, cpu, name in rows:
        sums = folders[name.split("/")[1]]
        for index, value in enumerate((1, wall, cpu)):
            sums[index] += value
    lines = ["| folder | tests | CPU seconds | wall seconds |", "|---|---|---|---|"]
    for folder, (tests, wall, cpu) in sorted(folders.items(), key=lambda item: -item[1][2]):
        lines.append(f"| {folder} | {tests:.0f} | {cpu:.0f} | {wall:.0f} |")
    lines += ["", "| CPU seconds | wall seconds | test |", "|---|---|---|"]
    for wall, cpu, name in sorted(rows, key=lambda row: -row[1])[:count]:
        lines.append(f"| {cpu:.1f} | {wall:.1f} | `{name.removeprefix('tests/')}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    fields = [line.split("\t") for line in Path(*sys.argv[1:2] or (FILE,)).read_text().splitlines()]
    print(table([(float(wall), float(cpu), name) for wall, cpu, name in fields]))
