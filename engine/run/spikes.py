"""Report steps whose loss or gradient is not finite or far above earlier ones, with their samples; skip them."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import TrainConfig
from isoloss.engine.instruments.files import JsonLines
from isoloss.engine.run.metrics import finite_or_text
from isoloss.engine.step.engine import Limits, OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.parallel import UserError
from isoloss.parallel.runtime.console import say

WINDOW = 64  # steps of which the median is taken
FEWEST = 10  # steps before the median is used
NAME = "bad_steps.jsonl"


class BadStepGuard:
    """Reports bad steps, and ends a run with too many in a row. All ranks see the same numbers, so all end together.

    watched: "loss", "grad_norm" or both: metrics that are compared with earlier steps.
    state: result of `state` in the checkpoint that the run resumed from.
    file: file for bad steps with the ids of their samples; None on ranks that write none.
    """

    def __init__(
        self,
        config: TrainConfig,
        watched: Sequence[str] = ("loss", "grad_norm"),
        state: Mapping[str, Any] | None = None,
        file: JsonLines | None = None,
    ):
        state = state or {}
        self._config = config
        self._usual = {name: deque(state.get(name, ()), WINDOW) for name in watched}
        self._bad_steps = int(state.get("bad_steps", 0))
        self._file = file

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint, so that a resumed run judges steps as if it had never stopped."""
        return {"bad_steps": self._bad_steps, **{name: list(values) for name, values in self._usual.items()}}

    def limits(self) -> Limits:
        """Return the limits of the next step: train.spike_factor times the median of the last steps."""
        factor = self._config.spike_factor
        return Limits(
            **{
                name: factor * statistics.median(values)
                for name, values in self._usual.items()
                if factor and len(values) >= FEWEST and statistics.median(values) > 0
            }
        )

    def apply_limits(self) -> Limits:
        """Return the limits above which the engine must not apply the next step."""
        return self.limits() if self._config.skip_spikes else Limits()

    def check(self, step: int, metrics: StepMetrics, result: OptimResult, samples: Sequence[Sample] = ()) -> None:
        """Judge a step that was done. Raises UserError after train.max_bad_steps bad steps in a row that were not
        applied."""
        numbers, limits = {"loss": metrics.loss, "grad_norm": result.grad_norm}, self.limits()
        finite = all(map(math.isfinite, numbers.values()))
        usual = {name: getattr(limits, name) for name in numbers}
        above = [name for name, value in numbers.items() if value > usual[name]] if finite else []
        why = (
            "not finite"
            if not finite
            else ", ".join(
                f"{name} above {usual[name]:.6g}, {self._config.spike_factor:g} times the median before"
                for name in above
            )
        )
        skipped = not finite or (bool(above) and self._config.skip_spikes)
        self._bad_steps = self._bad_steps + 1 if skipped else 0
        for name, values in self._usual.items() if metrics.valid_tokens and not why else ():
            values.append(numbers[name])
        if why:
            self._report(step, why, numbers, skipped, samples)
        if self._bad_steps >= self._config.max_bad_steps:
            raise UserError(
                f"train.max_bad_steps={self._config.max_bad_steps} steps in a row were bad and not applied, up to step "
                f"{step} (loss {metrics.loss}, gradient norm {result.grad_norm}: {why}); lower optim.lr, or look at "
                f"the samples of these steps, which {NAME} names"
            )

    def _report(
        self, step: int, why: str, numbers: Mapping[str, float], skipped: bool, samples: Sequence[Sample]
    ) -> None:
        if self._file is None:
            return
        applied = "not applied" if skipped else "applied (train.skip_spikes=true leaves such steps out)"
        say(
            f"step {step}: loss {numbers['loss']:.6g}, gradient norm {numbers['grad_norm']:.6g}: {why}: {applied}; its "
            f"samples are in {self._file.path}",
            error=True,
        )
        row = {"step": step, "why": why, **finite_or_text(numbers), "applied": not skipped}
        self._file.write([{**row, "samples": [sample.id for sample in samples]}])
