"""Resume, evaluate, save, guard, log and export a run. All recipes share it; each has its own optimizer step."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.saver import Saver
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.config.schema import Config
from isoloss.engine.instruments import watchdog
from isoloss.engine.instruments.profiling import StepProfile
from isoloss.engine.instruments.startup import Garbage
from isoloss.engine.instruments.watchdog import Watchdog
from isoloss.engine.memory import preflight
from isoloss.engine.run.callbacks import NO_CALLBACKS, Callbacks
from isoloss.engine.run.folder import (
    DATE_KEY,
    Fingerprint,
    changed_settings,
    replace_export,
    resume_fingerprint,
    settings,
    step_folder,
)
from isoloss.engine.run.health import Health, Stragglers, Watched
from isoloss.engine.run.metrics import MetricsLog, metrics_row, mfu, peak_flops
from isoloss.engine.run.preemption import Preemption
from isoloss.engine.run.result import RunResult
from isoloss.engine.run.spikes import NAME as BAD_STEPS
from isoloss.engine.run.spikes import BadStepGuard
from isoloss.engine.step.engine import Engine, Limits, OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.engine.step.optimizer import learning_rate
from isoloss.models.architecture import Architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import num_factors
from isoloss.models.mcore import transformer_engine
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import PreemptedError
from isoloss.parallel.ops import flash_linear_attention
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime import device
from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.process_group import host_group

FIRST_EVAL = "first_eval"  # in the state of a checkpoint: the evaluation before training, and the files of its rows


class Run:
    """A run on every rank: new, or with checkpoint.resume continued from the newest undamaged checkpoint.

    A context manager, whose end closes the metrics. Collective over the world.

    output_dir: folder that `open_folder` created.
    done: number of optimizer steps done so far.
    total_steps: number of optimizer steps of the whole run.
    metrics: metrics.jsonl, TensorBoard and the screen.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        output_dir: Path,
        total_steps: int,
        fingerprints: Sequence[Fingerprint],
        watched: Watched,
        callbacks: Callbacks = NO_CALLBACKS,
    ):
        self._engine, self._config, self._fingerprints = engine, config, fingerprints
        self._callbacks, self._stopped = callbacks, False
        self.output_dir, self.total_steps = output_dir, total_steps
        self._state = state = self._load_newest() if config.checkpoint.resume else None
        self._changed = changed_settings(config, (state or {}).get("settings", {}))
        self.done = 0 if state is None else int(state["step"])
        hidden = ("mfu",) if engine.device.type == "cpu" else ()  # its peak, and so its MFU, depend on other processes
        self.metrics = MetricsLog(output_dir, is_main(), total_steps, self.done, hidden)
        self._health = Health(watched, self.metrics.earlier())
        bad_steps = self.metrics.file(BAD_STEPS, begun=False) if is_main() else None
        self._guard = BadStepGuard(config.train, config.judged_by, (state or {}).get("guard"), bad_steps)
        self._peak = peak_flops(engine.device)
        self._memory = preflight.PeakReport(self._planned_peak)
        self._garbage = Garbage(config.train.gc_every)
        self._saver = Saver(config.checkpoint)
        self._group = host_group()
        self._preemption = Preemption(self._group)
        self._stragglers = Stragglers(self._group)
        self._watchdog = Watchdog(output_dir / "stacks", config.train.timeout, dist.get_rank(), dist.get_world_size())
        self._profile = StepProfile(config.train.profiled(total_steps), dist.get_rank())
        self._started = time.perf_counter()
        before = (state or {}).get(FIRST_EVAL, {})
        self._first_eval: Mapping[str, float] = before.get("metrics", {}) if self._same_eval(before) else {}
        self._last_eval: Mapping[str, float] = {}

    def pop_resume_state(self) -> Mapping[str, Any] | None:
        """Return the state given to `save` in the resumed checkpoint; None for a new run. May be called once."""
        state, self._state = self._state, None  # freed, as it may be large
        return state

    def __enter__(self) -> "Run":
        self._garbage.begin()
        self._preemption.begin()
        self._watchdog.begin()
        return self

    def __exit__(self, *_) -> None:
        self._watchdog.end()
        self._saver.close()
        self._preemption.end()
        self._garbage.end()
        self.metrics.close()
        dist.destroy_process_group(self._group)
        del self._group  # ends its threads

    def steps(
        self, evaluate: Callable[[int], Mapping[str, float]], save: Callable[[], None] | None = None
    ) -> Iterator[int]:
        """Yield the optimizer steps still to be done, from 0. The body of the loop does a step and calls `log`.

        evaluate: function of the number of steps done that returns metrics, empty without rows to evaluate on; called
            before the first step, every train.eval_every steps and after the last.
        save: function that writes a checkpoint, by default `save`; called every checkpoint.every and after the last.

        A callback may end the steps early. Raises PreemptedError, after a checkpoint, if a rank received a signal to
        end.
        """
        self._evaluate(evaluate)
        if self._stopped:
            (save or self.save)()
        while self.done < self.total_steps and not self._stopped:
            self._started = time.perf_counter()
            with self._profile.of(self.done + 1):
                yield self.done
            self.done += 1
            watchdog.beat()
            self._garbage.after_step(self.done)
            if self._due(self._config.train.eval_every):
                self._evaluate(evaluate)
            due = self._due(self._config.checkpoint.every)
            every = self._config.train.check_replicas_every
            if due:
                (save or self.save)()
            elif every and self.done % every == 0:
                self._check_replicas()
            if self.done < self.total_steps and not self._stopped and (received := self._preemption.received()):
                if not due:
                    (save or self.save)()
                self._leave(received)

    def lr(self) -> float:
        """Return the learning rate of the current step."""
        return learning_rate(self.done, self._config.optim, self.total_steps)

    def limits(self) -> Limits:
        """Return the loss and gradient norm above which the current step is not applied."""
        return self._guard.apply_limits()

    def log(
        self,
        samples: Sequence[Sample],
        metrics: StepMetrics,
        result: OptimResult,
        more: Mapping[str, float] = {},
        texts: Mapping[str, str] = {},
    ) -> None:
        """Log the step just done. Raises UserError after train.max_bad_steps bad steps in a row.

        more: further values for the row of metrics.
        texts: texts that warnings quote, by name.
        """
        step, seconds = self.done + 1, time.perf_counter() - self._started
        utilization = mfu(metrics.total_cost, seconds, self._peak, dist.get_world_size())
        row = self.metrics.log(step, {**metrics_row(metrics, result, seconds, utilization), **more})
        if is_main():
            for warning in self._health.warnings(step, {**row, **texts}):
                say(warning, error=True)
        if line := self._memory.after_step(device.peak_bytes()):
            self.print([line])
        self.print(self._stragglers.after_step(step, metrics, seconds))
        self._guard.check(step, metrics, result, samples)
        self._stopped |= self._callbacks.call("on_step_end", self._group, step, row)

    def save(
        self,
        state: Mapping[str, object] = {},
        stage_other: Callable[[Path, int, HostCopies | None], checkpoint.Staged] | None = None,
    ) -> None:
        """Write a checkpoint and delete the oldest ones. Collective over the world.

        state: further state of the run, in plain containers and tensors; the engine's is saved anyway.
        stage_other: function of (output_dir, step, copies) that stages another checkpoint, written before this one.
        Raises NotWrittenError if two in a row could not be written, and DivergedError if replicas of weights differ.
        """
        folder = step_folder(self.output_dir, self.done)
        if folder.exists():  # a run that resumed from an earlier step repeats this one. Checkpoints are never replaced
            return
        if self._config.train.check_replicas_every:
            self._check_replicas()
        self.metrics.retry()
        fingerprint = resume_fingerprint(self._config, self._engine.arch)
        contents = {content.name: content.value for content in self._fingerprints}
        progress = {"step": self.done, "guard": self._guard.state(), "settings": settings(self._config)}
        before = {"files": list(self._config.data.eval), "metrics": dict(self._first_eval)}
        extra = {**progress, FIRST_EVAL: before, DATE_KEY: self._config.data.date, **fingerprint, **contents, **state}
        stage = partial(self._engine.stage, folder, extra)
        self._saver.save(*((partial(stage_other, self.output_dir, self.done), stage) if stage_other else (stage,)))
        if self._callbacks.on_save is not None:
            self._saver.wait()
            self._callbacks.call("on_save", self._group, self.done, folder)

    def finish(self) -> RunResult:
        """Wait for the last checkpoint and export the model. Raises NotWrittenError. Collective over the world."""
        self.metrics.end_progress()
        self.print([f"a callback ended the run after step {self.done} of {self.total_steps}"] if self._stopped else [])
        self._saver.wait(last=True)
        folder = step_folder(self.output_dir, self.done)
        with watchdog.patient():
            is_adapter = self._config.lora.rank > 0
            kind = ("adapter", self._engine.export_adapter) if is_adapter else ("hf", self._engine.export_hf)
            exported = replace_export(self.output_dir, *kind) if self._config.checkpoint.export_hf else None
        return RunResult(
            self.output_dir,
            folder,
            self._first_eval,
            self._last_eval,
            self._health.summary(),
            stopped=self._stopped,
            export=None if is_adapter else exported,
            adapter=exported if is_adapter else None,
            base=None if self._config.model.from_scratch else self._engine.source.path,
        )

    def print(self, lines: Sequence[str]) -> None:
        """Print lines on rank 0."""
        if lines and is_main():
            say(*lines)

    def banner(self, weights: str, data: Sequence[str], work: str) -> list[str]:
        """Return lines about the model, the data and the outputs, so that a wrong path or preset shows at the start.

        weights, work: source of the weights and contents of a step, in words.
        data: lines about the data.
        """
        config, model = self._config, self._engine.model
        layers = transformer_engine.description(config.model.transformer_engine)
        work = work if self.total_steps > 1 else work.replace("steps", "step", 1)
        stages = f" (layers {'+'.join(map(str, model.stages))})" if model.mesh.layout.pp > 1 else ""
        source = self._engine.source.path
        kernels = config.kernels.delta_rule, config.train.precision
        slow = flash_linear_attention.missed(*kernels) if any(model.arch.linear) else None
        lines = [
            f"device: {device.describe(dist.get_world_size())}, {config.train.precision}",
            f"model: {source}, {num_parameters(model.arch):,} parameters{weights}, layers of {layers}",
            *adapter_lines(config.lora, model.arch),
            *([slow] if slow else []),
            *data,
            f"run: {self.total_steps} {work}, layout {model.mesh.layout}{stages} on {dist.get_world_size()} rank(s), "
            f"into {self.output_dir}",
        ]
        if not config.checkpoint.resume:
            return lines
        done = f"resumed after step {self.done}" if self.done else f"no checkpoint in {self.output_dir}: a new run"
        left = "" if self.done < self.total_steps else f": nothing left of train.steps={self.total_steps}"
        return [*lines, done + left, *self._changed]

    def _load_newest(self) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoint, and return its state. Damaged newer ones are reported and renamed, so
        that their steps can be saved again. Raises DamagedError, and renames none, if all are damaged."""
        newest = checkpoint.newest_undamaged(self.output_dir / "checkpoints", self._engine.load)
        if newest is None:
            return None
        folder, state, damaged = newest
        for damaged_folder, problem in damaged.items() if is_main() else ():
            aside = checkpoint.set_aside(damaged_folder)
            say(f"passed over, and kept as {aside}: {problem}; going on from {folder}", error=True)
        return state

    def _check_replicas(self) -> None:
        self._engine.check_replicas(self._group, f"after step {self.done}")

    def _leave(self, received: signal.Signals) -> NoReturn:
        self._saver.wait(last=True)
        folder = step_folder(self.output_dir, self.done)
        self.metrics.end_progress()
        self.print([f"told to end by {received.name}: saved {folder}; go on with checkpoint.resume=true"])
        raise PreemptedError(received)

    def _planned_peak(self) -> float:
        mesh = self._engine.mesh
        return preflight.planned(self._config, self._engine.arch, mesh.layout)[mesh.pp.rank()].peak

    def _due(self, every: int) -> bool:
        return self.done == self.total_steps or self._stopped or (every > 0 and self.done % every == 0)

    def _evaluate(self, evaluate: Callable[[int], Mapping[str, float]]) -> None:
        self._last_eval = evaluate(self.done)
        if self._last_eval:
            self._first_eval = self._first_eval or self._last_eval
            self.metrics.log_eval(self.done, self._last_eval)
            self._stopped |= self._callbacks.call("on_evaluate", self._group, self.done, self._last_eval)

    def _same_eval(self, before: Mapping[str, Any]) -> bool:
        return list(before.get("files", ())) == list(self._config.data.eval)


def adapter_lines(lora: LoraConfig, arch: Architecture) -> list[str]:
    """Return a line about the adapter that is trained; none without one."""
    if lora.rank == 0:
        return []
    numbers, expert_rank = num_factors(arch, lora), lora.rank_of(expert=True)
    experts = f" ({expert_rank} for experts)" if expert_rank != lora.rank else ""
    return [
        f"adapter: rank {lora.rank}{experts}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}: {numbers:,} "
        f"parameters are trained, {numbers / num_parameters(arch):.2%} of the model's"
    ]
