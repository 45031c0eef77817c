"""Profile one optimizer step for `train.profile`: a trace, and a table of phases. Time work on a device."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from isoloss.parallel.runtime.console import say

# Depth by phase, in the order of a step. A phase of depth 2 is part of the one of depth 1 before it.
PHASES = {
    "step": 0,
    "sync weights": 1,
    "generate": 1,
    "rewards": 1,
    "log-probabilities": 1,
    "forward and backward": 1,
    "forward": 2,
    "loss": 2,
    "optimizer": 1,
    "reduce gradients": 2,
}


def phase(name: str) -> record_function:
    """Return a context manager, or decorator of functions without recursion, that marks one of PHASES for the profile.

    It costs a microsecond while no profile is taken.
    """
    assert name in PHASES, name
    return record_function(name)


class StepProfile:
    """Profiles one step of a run into a folder: rankN.json.gz, a trace for ui.perfetto.dev, and rankN.txt, a table.

    chosen: step, from 1 on, and folder; None: no profile.
    """

    def __init__(self, chosen: tuple[int, Path] | None, rank: int):
        self._step, self._folder = chosen or (0, Path())
        self._rank = rank

    @contextlib.contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Run the work of a step, counted from 1, in this block: the chosen step is profiled."""
        if step != self._step:
            yield
            return
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            with phase("step"):
                yield
            if on_gpu:
                torch.cuda.synchronize()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank{self._rank}.txt").write_text(table(profiler, on_gpu))
            profiler.export_chrome_trace(str(self._folder / f"rank{self._rank}.json.gz"))
        except OSError as problem:  # a missing profile is no reason to end a run
            say(f"isoloss: the profile of step {step} could not be written: {problem}", error=True)


def table(profiler: profile, on_gpu: bool) -> str:
    """Return a table of phases: calls, seconds on the host, their share of the step, and seconds of launched kernels.

    Below it is a table of the operations that took longest.
    """
    averages = profiler.key_averages()
    phases = {event.key: event for event in averages if event.key in PHASES and event.is_user_annotation}
    step_time = phases["step"].cpu_time_total
    head = f"{'phase':<28}{'calls':>7}{'seconds':>11}{'share':>8}" + (f"{'on the GPU':>13}" if on_gpu else "")
    lines = [head]
    for name, depth in PHASES.items():
        if event := phases.get(name):
            seconds, share = event.cpu_time_total / 1e6, event.cpu_time_total / step_time
            kernels = f"{event.device_time_total / 1e6:>13.4f}" if on_gpu else ""
            lines.append(f"{'  ' * depth + name:<28}{event.count:>7}{seconds:>11.4f}{share:>8.1%}{kernels}")
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return "\n".join(lines) + "\n\n" + averages.table(sort_by=by, row_limit=40, max_name_column_width=60)


class Stopwatch:
    """Times the device from the constructor to `stop`, without waiting for it."""

    def __init__(self):
        self._on_gpu = torch.cuda.is_available()
        self._from = self._now()

    def stop(self) -> None:
        self._to = self._now()

    def seconds(self) -> float:
        """Return the seconds. The device must have finished what was launched before `stop`."""
        return self._from.elapsed_time(self._to) / 1000 if self._on_gpu else self._to - self._from

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
