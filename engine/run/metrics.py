"""What a run reports: metrics.jsonl, TensorBoard scalars, a progress bar; and model FLOPs utilisation (MFU)."""

import contextlib
import math
import re
import sys
from collections.abc import Mapping
from functools import cache
from numbers import Integral
from pathlib import Path
from time import monotonic, perf_counter

import torch

from isoloss.engine.instruments.console import say
from isoloss.engine.instruments.files import AppendOnlyFile, JsonLines

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
        self._train = self.file("metrics.jsonl")
        self._eval = self.file("eval.jsonl", of_evaluations=True)
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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Report optimizer step `step`, counted from 1. Values are numbers or 0-d tensors; `step` is not among them."""
        if self.enabled:
            self._progress.show(step, self._record("train", self._train, step, values))

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Report an evaluation after optimizer step `step`, 0 for one before training."""
        if self.enabled:
            self._record("eval", self._eval, step, values)

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
    """Progress on a terminal."""

    def __init__(self, start_step: int, total_steps: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        self._bar.set_postfix_str(_summary(row), refresh=False)
        with contextlib.suppress(OSError):  # the terminal is gone
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
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
        left = round((now - self._started) / max(1, step - self._start_step) * (self._total_steps - step))
        eta = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        say(f"step {step}/{self._total_steps}  {_summary(row)}  ETA {eta}", error=True)

    def close(self) -> None:
        pass


def _summary(row: Mapping[str, float]) -> str:
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4f}")
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


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
