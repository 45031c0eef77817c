"""How rl_step.py drives its sides: a JSON line in for each turn, a JSON line out when it is over. Needs no isoloss.

A side waits for its turn, so that steps of several sides never run at the same time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MIB = 1 << 20


def of_status(field: str) -> float:
    """MiB, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")) / MIB


class Turns:
    """Made after the imports, before the model. What libraries print goes to standard error."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._imported = of_status("VmRSS")
        self._children: list[psutil.Process] = []

    def loaded(self, versions: dict[str, str]) -> None:
        """Model and optimizer are there. From here on the peak counts."""
        resident = of_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._tell({"versions": versions, "imported_mib": self._imported, "loaded_mib": resident})

    def begin(self) -> dict:
        """The next turn's order; the process ends where there is none."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self._children = psutil.Process().children(recursive=True)
        self._phases: dict[str, float] = {}
        self._started = self._cpu_seconds()
        return json.loads(line)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._cpu_seconds()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + self._cpu_seconds() - started

    def end(self, rest: str, **found: object) -> None:
        """rest: the phase of what was in none."""
        total = self._cpu_seconds() - self._started
        other = total - sum(self._phases.values())
        self._phases[rest] = self._phases.get(rest, 0.0) + other
        self._tell({"total": total, "phases": self._phases, "peak_mib": of_status("VmHWM"), **found})

    def _cpu_seconds(self) -> float:
        """Of this process, and of those that it started."""
        ended = os.times()
        alive = [child.cpu_times() for child in self._children if child.is_running()]
        of_children = sum(times.user + times.system for times in alive)
        return time.process_time() + ended.children_user + ended.children_system + of_children

    def _tell(self, answer: dict) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
