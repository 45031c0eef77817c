"""What a run reports: metrics.jsonl, TensorBoard scalars, a progress bar; and model FLOPs utilisation (MFU)."""

import contextlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from numbers import Integral
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from isoloss.engine.instruments.console import duration, say
from isoloss.engine.instruments.files import AppendOnlyFile, JsonLines
from isoloss.engine.run.records import EVALUATIONS, METRICS, RunRecords

# Dense bf16 FLOPs per second of a device, from NVIDIA's data sheets (which give twice this, with sparsity). The first
# pattern found in torch.cuda.get_device_name() counts, so variants come before the plain name.
PEAK_FLOPS = (
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H200 NVL", 835e12),
    (r"H200", 989e12),
    (r"H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H100", 989e12),
    (r"A100", 312e12),
)
PLAIN_LINE_SECONDS = 10.0  # between progress lines where stderr is a file

# What a line of progress has of a row, by the key that must be there.
TOLD = {
    "reward_mean": "reward {reward_mean:.3f}",
    "pass@1": "pass@1 {pass@1:.3f}",
    "groups_drawn": "no variance {groups_without_variance}/{groups_drawn}",
    "truncated_fraction": "truncated {truncated_fraction:.0%}",
    "response_length_mean": "length {response_length_mean:,.0f}",
    "loss": "loss {loss:.4f}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
}


class MetricsLog:
    """Writes a run's metrics; a context manager, closed at the end of the block however it ends.

    output_dir/metrics.jsonl: a JSON object per optimizer step, in the file when `log` returns. output_dir/eval.jsonl:
    one per evaluation. output_dir/tensorboard: the same scalars as train/<key> and eval/<key>. Progress goes to stderr:
    a bar on a terminal, else a line at the first and last step and at most every 10 seconds between.
    A disk that refuses any of them for a while ends no run, and no row is lost: see `AppendOnlyFile`.

    enabled: True on the one rank that writes; on the others every method does nothing. No collective is entered.
    start_step: optimizer steps already done, 0 for a new run. What an earlier run wrote about later steps, which this
        run does again, is taken out of both files and hidden in TensorBoard, so every step is told once. So is its
        evaluation after start_step, with which this run begins.
    total_steps: the step at which the run ends.
    """

    def __init__(self, output_dir: str | Path, *, enabled: bool, total_steps: int, start_step: int = 0):
        self.enabled = enabled
        if not enabled:
            return
        from isoloss.engine.run.tensorboard import EventFile  # takes a second, which only this rank has to spend

        self._folder, self._start_step = Path(output_dir), start_step
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = EventFile(self._folder / "tensorboard", start_step + 1 if start_step else 0)
        self._files: list[AppendOnlyFile] = [self._tensorboard.file]
        self._train = self.file(METRICS)
        self._eval = self.file(EVALUATIONS, of_evaluations=True)
        progress = _Bar if sys.stderr.isatty() else _Lines
        self._progress = progress(start_step, total_steps)

    def file(self, name: str, *, of_evaluations: bool = False, begun: bool = True) -> JsonLines:
        """Another file of the run's folder, which goes on and ends with this log. Only where `enabled`.

        begun: it is there from now on, be it empty; else from its first row on.
        """
        file = JsonLines(self._folder / name, self._start_step - of_evaluations)
        self._files.append(file)
        if begun:
            file.append()
        return file

    def log(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Report optimizer step `step`, counted from 1. Values are numbers or 0-d tensors; `step` is not among them.
        Returns them as plain numbers, and nothing where it is not enabled."""
        if not self.enabled:
            return {}
        row = self._record("train", self._train, step, values)
        self._progress.show(step, row)
        return row

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Report an evaluation after optimizer step `step`, 0 for one before training."""
        if self.enabled:
            row = self._record("eval", self._eval, step, values)
            say(f"evaluation after step {step}: {summary(row)}", error=True)

    def earlier(self) -> list[defaultdict[str, float]]:
        """Return the rows of the steps that a resumed run has done, with 0 for keys of later versions of isoloss."""
        if not self.enabled or not self._start_step:
            return []
        rows = RunRecords(self._folder).metrics()
        return [defaultdict(float, {key: float(value) for key, value in row.items()}) for row in rows]

    def _record(self, group: str, file: JsonLines, step: int, values: Mapping[str, float]) -> dict[str, int | float]:
        row = {key: _number(value) for key, value in values.items()}
        assert "step" not in row, "the step is an argument of its own"
        file.write([{"step": step, **finite_or_text(row)}])
        self._tensorboard.scalars(step, {f"{group}/{key}": value for key, value in row.items()})
        return row

    def text(self, name: str, markdown: str, step: int) -> None:
        """Show a text in TensorBoard."""
        if self.enabled:
            self._tensorboard.text(step, name, markdown)

    def retry(self) -> None:
        """Write what the disk refused, if it takes it now: before a checkpoint, which is not to know of more."""
        for file in self._files if self.enabled else ():
            file.retry()

    def end_progress(self) -> None:
        """Leave the progress as it is: what is printed from now on stands below it. Twice does no harm."""
        if self.enabled:
            self._progress.close()

    def close(self) -> None:
        """Flush and close everything. Twice does no harm."""
        if not self.enabled:
            return
        for each in (*self._files, self._progress):
            each.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _number(value: float) -> int | float:
    """A plain int or float of a Python, numpy or 0-d torch number; counts stay integers."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return int(value) if isinstance(value, Integral) else float(value)


def finite_or_text(row: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no nan and no infinity: they are told as "nan", "inf" and "-inf"."""
    return {key: value if math.isfinite(value) else str(value) for key, value in row.items()}


class _Bar:
    """Progress on a terminal, from the first step on. The numbers come first, so that a narrow terminal has them."""

    FORMAT = "step {n_fmt}/{total_fmt}  {desc}  ETA {remaining} {bar}"

    def __init__(self, start_step: int, total_steps: int):
        self._total_steps = total_steps
        self._bar: Any = None

    def show(self, step: int, row: Mapping[str, float]) -> None:
        from tqdm import tqdm

        told = summary(row)
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._bar is None:
                options = {"dynamic_ncols": True, "bar_format": self.FORMAT}
                self._bar = tqdm(desc=told, total=self._total_steps, initial=step, **options)
            self._bar.set_description_str(told, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines:
    """Progress in a log file: few lines, each whole."""

    def __init__(self, start_step: int, total_steps: int):
        self._start_step, self._total_steps = start_step, total_steps
        self._started, self._last = monotonic(), -math.inf

    def show(self, step: int, row: Mapping[str, float]) -> None:
        now = monotonic()
        if now - self._last < PLAIN_LINE_SECONDS and step < self._total_steps:
            return
        self._last = now
        left = (now - self._started) / max(1, step - self._start_step) * (self._total_steps - step)
        say(f"step {step}/{self._total_steps}  {summary(row)}  ETA {duration(left)}", error=True)

    def close(self) -> None:
        pass


def summary(row: Mapping[str, float]) -> str:
    """Of a step or an evaluation. In reinforcement learning the loss is about 0, and the rewards tell how it goes."""
    told = {key: text for key, text in TOLD.items() if key in row and not (key == "loss" and "reward_mean" in row)}
    return "  ".join(text.format_map(row) for text in told.values())


def mfu(forward_flops: float, seconds: float, peak_flops_per_device: float, num_devices: int) -> float:
    """Model FLOPs utilisation of training, 0..1: FLOPs that the step needs, over what the devices could have done in
    that time. It needs three times those of the forward, as backward makes two products for each that forward made.

    Recomputing activations does not count as work of the model. Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 3.0 * forward_flops / (seconds * peak_flops_per_device * num_devices)


def peak_flops(device: torch.device | str) -> float:
    """FLOPs per second of one device, the yardstick of `mfu`.

    A GPU in PEAK_FLOPS: its dense bf16 figure, whatever the precision of the run. Any other device, the CPU above all:
    the best of three square matrix products (CPU: 1024, fp32, with the threads this process has; GPU: 8192, bf16),
    measured once per process. A measured figure shifts with the load of the machine, and processes that
    share cores share the peak: compare such MFU within a run only.
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        listed = [peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)]
        return listed[0] if listed else _measured_peak(str(device), 8192, torch.bfloat16)
    return _measured_peak(str(device), 1024, torch.float32)


@cache
def _measured_peak(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOPs per second of [size, size] x [size, size], 2 * size^3 FLOPs; one product first to warm up."""
    # Random, as GPUs run constant matrices at higher clocks; a generator of its own, as the run's must not be advanced.
    a = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    out = a @ a
    best = math.inf
    for _ in range(3):
        start = perf_counter()
        torch.mm(a, a, out=out)
        out[0, 0].item()  # waits for a GPU
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
