"""Report the metrics of a run: metrics.jsonl, TensorBoard, a progress bar, and model FLOPs utilisation (MFU)."""

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
from isoloss.engine.step.engine import OptimResult
from isoloss.engine.step.forward_backward import StepMetrics

# Dense bf16 FLOPs per second of a device, from NVIDIA's data sheets (which give twice this, with sparsity). The first
# pattern that matches torch.cuda.get_device_name() counts, so variants come before the plain name.
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
PLAIN_LINE_SECONDS = 10.0  # seconds between progress lines if stderr is a file

# Parts of a progress line, by the key of the row that a part needs.
PROGRESS_FIELDS = {
    "reward_mean": "reward {reward_mean:.3f}",
    "pass@1": "pass@1 {pass@1:.3f}",
    "groups_drawn": "no variance {groups_without_variance}/{groups_drawn}",
    "truncated_fraction": "truncated {truncated_fraction:.0%}",
    "response_length_mean": "length {response_length_mean:,.0f}",
    "loss": "loss {loss:.4f}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
}


class MetricsLog:
    """Writes a run's metrics. A context manager, whose end closes all files.

    output_dir/metrics.jsonl: a JSON object per optimizer step, in the file when `log` returns. output_dir/eval.jsonl:
    one per evaluation. output_dir/tensorboard: the same scalars as train/<key> and eval/<key>. Progress goes to stderr:
    a bar on a terminal, else a line at the first and last step and at most every 10 seconds between.
    A disk that refuses any of them for a while ends no run, and no row is lost: see `AppendOnlyFile`.

    enabled: True on the one rank that writes; on the others every method does nothing. No collective is entered.
    start_step: optimizer steps done before, 0 for a new run. Rows of later steps, and the evaluation after start_step,
        are removed from both files and hidden in TensorBoard, as this run repeats them.
    total_steps: last step of the run.
    """

    def __init__(self, output_dir: str | Path, *, enabled: bool, total_steps: int, start_step: int = 0):
        self.enabled = enabled
        if not enabled:
            return
        from isoloss.engine.run.tensorboard import EventFile  # takes a second, spent on this rank alone

        self._folder, self._start_step = Path(output_dir), start_step
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = EventFile(self._folder / "tensorboard", start_step + 1 if start_step else 0)
        self._files: list[AppendOnlyFile] = [self._tensorboard.file]
        self._train = self.file(METRICS)
        self._eval = self.file(EVALUATIONS, of_evaluations=True)
        progress = _Bar if sys.stderr.isatty() else _Lines
        self._progress = progress(start_step, total_steps)

    def file(self, name: str, *, of_evaluations: bool = False, begun: bool = True) -> JsonLines:
        """Open another file of the run's folder, which is resumed and closed with this log. Only if `enabled`.

        of_evaluations: whether the row of start_step is removed too, as the run repeats that evaluation.
        begun: whether the file exists from now on; else from its first row on.
        """
        file = JsonLines(self._folder / name, self._start_step - of_evaluations)
        self._files.append(file)
        if begun:
            file.append()
        return file

    def log(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Report optimizer step `step`, counted from 1. Return the values as plain numbers; {} if not enabled.

        values: numbers or 0-d tensors, without "step".
        """
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
        """Return the rows of the steps that a resumed run has done, with 0 for keys that an earlier isoloss lacked."""
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
        """Write a text for TensorBoard."""
        if self.enabled:
            self._tensorboard.text(step, name, markdown)

    def retry(self) -> None:
        """Write again what the disk refused. Called before a checkpoint, so that the files have all rows up to it."""
        for file in self._files if self.enabled else ():
            file.retry()

    def end_progress(self) -> None:
        """End the progress bar, so that later lines appear below it. May be called again."""
        if self.enabled:
            self._progress.close()

    def close(self) -> None:
        """Flush and close all files and the progress bar. May be called again."""
        if not self.enabled:
            return
        for output in (*self._files, self._progress):
            output.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _number(value: float) -> int | float:
    """Convert a Python, numpy or 0-d torch number to a plain int or float."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return int(value) if isinstance(value, Integral) else float(value)


def finite_or_text(row: Mapping[str, float]) -> dict[str, float | str]:
    """Replace nan and infinities, which JSON lacks, by "nan", "inf" and "-inf"."""
    return {key: value if math.isfinite(value) else str(value) for key, value in row.items()}


class _Bar:
    """Shows progress on a terminal, from the first step on."""

    # The numbers come first, so that a narrow terminal shows them.
    FORMAT = "step {n_fmt}/{total_fmt}  {desc}  ETA {remaining} {bar}"

    def __init__(self, start_step: int, total_steps: int):
        self._total_steps = total_steps
        self._bar: Any = None

    def show(self, step: int, row: Mapping[str, float]) -> None:
        from tqdm import tqdm

        text = summary(row)
        with contextlib.suppress(OSError):  # the terminal was closed
            if self._bar is None:
                options = {"dynamic_ncols": True, "bar_format": self.FORMAT}
                self._bar = tqdm(desc=text, total=self._total_steps, initial=step, **options)
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines:
    """Shows progress in a log file, by few lines."""

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
    """Return the line about a step or an evaluation."""
    # In reinforcement learning the loss is about 0 and says nothing, so rewards stand for it.
    hidden = "loss" if "reward_mean" in row else None
    texts = [text for key, text in PROGRESS_FIELDS.items() if key in row and key != hidden]
    return "  ".join(text.format_map(row) for text in texts)


def metrics_row(metrics: StepMetrics, result: OptimResult, seconds: float, utilization: float) -> dict[str, float]:
    """Return the row of metrics.jsonl of one optimizer step."""
    return {
        **metrics.terms,
        **metrics.observed,
        **({} if metrics.reruns is None else {"dispatch_reruns": metrics.reruns}),
        "loss": metrics.loss,  # the sum of all terms replaces the term of that name
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "valid_tokens": metrics.valid_tokens,
        "total_tokens": metrics.total_tokens,
        "computed_tokens": metrics.computed_tokens,
        "sequences": metrics.sequences,
        "micro_batches": metrics.micro_batches,
        "weight_sum": metrics.weight_sum,
        "applied": int(result.applied),
        "seconds": seconds,
        "train_seconds": metrics.seconds + result.seconds,
        "tokens_per_second": metrics.total_tokens / seconds,
        "mfu": utilization,
    }


def mfu(forward_flops: float, seconds: float, peak_flops_per_device: float, num_devices: int) -> float:
    """Return model FLOPs utilisation of a training step, 0..1: its FLOPs over what the devices could do in that time.

    Recomputation of activations does not count. Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    # A step takes three times the FLOPs of its forward, as backward has two matrix products for each of forward.
    return 3.0 * forward_flops / (seconds * peak_flops_per_device * num_devices)


def peak_flops(device: torch.device | str) -> float:
    """Return the peak FLOPs per second of one device, for `mfu`.

    A GPU in PEAK_FLOPS: its dense bf16 figure, whatever the precision of the run. Any other device: the best of three
    square matrix products (CPU: 1024, fp32, with the threads of this process; GPU: 8192, bf16), measured once per
    process. A measured peak depends on the load of the machine, and processes that share cores share the peak, so
    compare such MFU within a run only.
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peaks = [peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)]
        return peaks[0] if peaks else _measured_peak(str(device), 8192, torch.bfloat16)
    return _measured_peak(str(device), 1024, torch.float32)


@cache
def _measured_peak(device: str, size: int, dtype: torch.dtype) -> float:
    """Measure the FLOPs per second of [size, size] x [size, size], 2 * size^3 FLOPs, after a product to warm up."""
    # Random, as GPUs run constant matrices at higher clocks. A separate generator, as the run's must not advance.
    a = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    out = a @ a
    best = math.inf
    for _ in range(3):
        start = perf_counter()
        torch.mm(a, a, out=out)
        out[0, 0].item()  # waits for a GPU
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
