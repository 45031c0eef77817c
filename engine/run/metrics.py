"""Report the metrics of a run: metrics.jsonl, TensorBoard, the screen, and model FLOPs utilisation (MFU)."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache
from numbers import Integral
from pathlib import Path
from time import monotonic, perf_counter

import torch

from isoloss.engine.instruments.files import AppendOnlyFile, JsonLines
from isoloss.engine.run.metric_groups import eval_tag, tag
from isoloss.engine.run.records import EVALUATIONS, METRICS, RunRecords
from isoloss.engine.run.screen import Screen
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
MOST_POINTS = 1000  # of a curve that TensorBoard keeps


class MetricsLog:
    """Writes a run's metrics. A context manager, whose end closes all files.

    output_dir/metrics.jsonl: a JSON object per optimizer step, in the file when `log` returns. output_dir/eval.jsonl:
    one per evaluation. output_dir/tensorboard: the same scalars, by `metric_groups`. Steps and evaluations are shown
    on standard error: see `Screen`.
    A disk that refuses any of them for a while ends no run, and no row is lost: see `AppendOnlyFile`.

    enabled: True on the one rank that writes; on the others every method does nothing. No collective is entered.
    start_step: optimizer steps done before, 0 for a new run. Rows of later steps, and the evaluation after start_step,
        are removed from both files and hidden in TensorBoard, as this run repeats them.
    total_steps: last step of the run.
    hidden: keys that the screen does not show.
    """

    def __init__(
        self,
        output_dir: str | Path,
        enabled: bool,
        total_steps: int,
        start_step: int = 0,
        hidden: Collection[str] = (),
    ):
        self.enabled = enabled
        if not enabled:
            return
        # Its import takes a second, spent on this rank alone.
        from isoloss.engine.run.tensorboard import EventFile, has_earlier_names

        self._folder, self._start_step = Path(output_dir), start_step
        self._folder.mkdir(parents=True, exist_ok=True)
        renamed = start_step > 0 and has_earlier_names(self._folder / "tensorboard")
        hidden_from = start_step + 1 if start_step and not renamed else 0
        self._tensorboard = EventFile(self._folder / "tensorboard", hidden_from)
        self._files: list[AppendOnlyFile] = [self._tensorboard.file]
        self._train = self.file(METRICS)
        self._eval = self.file(EVALUATIONS, of_evaluations=True)
        self._screen, self._started = Screen(start_step, total_steps, hidden), monotonic()
        for row in self.earlier():
            self._screen.add(row)
        if renamed:
            self._replay()

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
        row = self._record(tag, self._train, step, values)
        self._screen.show(step, row, monotonic() - self._started)
        return row

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Report an evaluation after optimizer step `step`, 0 for one before training."""
        if self.enabled:
            row = self._record(eval_tag, self._eval, step, values)
            self._screen.show_evaluation(step, row)

    def earlier(self) -> list[defaultdict[str, float]]:
        """Return the rows of the steps that a resumed run has done, with 0 for keys that an earlier isoloss lacked."""
        if not self.enabled or not self._start_step:
            return []
        rows = RunRecords(self._folder).metrics()
        return [defaultdict(float, {key: float(value) for key, value in row.items()}) for row in rows]

    def _record(
        self, name: Callable[[str], str], file: JsonLines, step: int, values: Mapping[str, float]
    ) -> dict[str, int | float]:
        row = {key: _number(value) for key, value in values.items()}
        assert "step" not in row, "the step is an argument of its own"
        file.write([{"step": step, **finite_or_text(row)}])
        self._tensorboard.scalars(step, {name(key): value for key, value in row.items()})
        return row

    def _replay(self) -> None:
        """Give TensorBoard the steps so far under the names of this release, which continue the curves."""
        records = RunRecords(self._folder)
        for rows, name in ((records.metrics(), tag), (records.evaluations(), eval_tag)):
            every = 1 + self._start_step // MOST_POINTS
            for step, row in ((int(row.pop("step")), row) for row in rows):
                if step % every == 0:
                    self._tensorboard.scalars(step, {name(key): float(value) for key, value in row.items()})

    def text(self, name: str, markdown: str, step: int) -> None:
        """Write a text for TensorBoard."""
        if self.enabled:
            self._tensorboard.text(step, name, markdown)

    def retry(self) -> None:
        """Write again what the disk refused. Called before a checkpoint, so that the files have all rows up to it."""
        for file in self._files if self.enabled else ():
            file.retry()

    def end_progress(self) -> None:
        """End the live view with the last step, so that later lines stand below it. May be called again."""
        if self.enabled:
            self._screen.end()

    def close(self) -> None:
        """Flush and close all files, and leave the screen as it is. May be called again."""
        if not self.enabled:
            return
        self._screen.leave()
        for file in self._files:
            file.close()

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


def metrics_row(metrics: StepMetrics, result: OptimResult, seconds: float, utilization: float) -> dict[str, float]:
    """Return the row of metrics.jsonl of one optimizer step."""
    return {
        **metrics.terms,
        **metrics.observed,
        **({} if metrics.reruns is None else {"dispatch_reruns": metrics.reruns}),
        **({} if metrics.replayed is None else {"routes_replayed": metrics.replayed}),
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
