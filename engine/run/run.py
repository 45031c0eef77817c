"""A run of a recipe: resume, evaluate, save, guard, log, export. SFT and reinforcement learning share it; what they do
in an optimizer step is theirs."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from isoloss.engine.instruments.console import say
from isoloss.engine.instruments.garbage import Garbage
from isoloss.engine.instruments.profiling import StepProfile
from isoloss.engine.instruments.watchdog import Watchdog
from isoloss.engine.memory import preflight
from isoloss.engine.run.folder import DATE_KEY, Fingerprint, resume_fingerprint, settings, settings_told
from isoloss.engine.run.health import Health, Watched
from isoloss.engine.run.metrics import MetricsLog, mfu, peak_flops
from isoloss.engine.run.preemption import Preemption
from isoloss.engine.run.spikes import NAME as BAD_STEPS
from isoloss.engine.run.spikes import BadStepGuard
from isoloss.engine.run.stragglers import Stragglers
from isoloss.engine.step.engine import Engine, Limits, OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.engine.step.optimizer import learning_rate
from isoloss.models.mcore import transformer_engine
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import PreemptedError
from isoloss.parallel.ops import flash_linear_attention
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime import device
from isoloss.parallel.runtime.process_group import host_group


@dataclass(frozen=True)
class RunResult:
    """Where a run ended.

    checkpoint: the last one.
    export: the Hugging Face folder, None without checkpoint.export_hf.
    first_eval, last_eval: metrics of the evaluations; empty without data.eval.
    idle: a line about the steps that learned nothing, on the rank that speaks to the user.
    """

    output_dir: Path
    checkpoint: Path
    export: Path | None
    first_eval: Mapping[str, float]
    last_eval: Mapping[str, float]
    idle: Sequence[str] = ()

    def closing_line(self, what: str, file: str) -> str:
        """Where everything is and what to do next. what: is in this `file` of the run's folder."""
        model = f"model for transformers in {self.export}; " if self.export else ""
        return (
            f"done: {model}checkpoint in {self.checkpoint}; {what} in {self.output_dir}/{file}; "
            f"next: tensorboard --logdir {self.output_dir}/tensorboard"
        )


class Run:
    """One run, on every rank: a new one in the folder that `open_folder` made, or with checkpoint.resume one that goes
    on from the newest whole checkpoint there. A context manager, whose end closes its metrics. Collective over the
    world.

    done: optimizer steps done so far.
    total_steps: of the whole run.
    metrics: metrics.jsonl, TensorBoard and the progress bar.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        output_dir: Path,
        total_steps: int,
        fingerprints: Sequence[Fingerprint],
        watched: Watched,
    ):
        self._engine, self._config, self._fingerprints = engine, config, fingerprints
        self.output_dir, self.total_steps = output_dir, total_steps
        state = self._load_newest() if config.checkpoint.resume else None
        self._state = state
        self._changed = settings_told(config, (state or {}).get("settings", {}))
        self.done = 0 if state is None else int(state["step"])
        self.metrics = MetricsLog(output_dir, enabled=is_main(), total_steps=total_steps, start_step=self.done)
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
        self._first_eval: Mapping[str, float] = {}
        self._last_eval: Mapping[str, float] = {}

    def pop_resume_state(self) -> Mapping[str, Any] | None:
        """What `save` was given in the checkpoint that the run resumed from; None for a new run. It may be large: the
        run has it no more."""
        taken, self._state = self._state, None
        return taken

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
        del self._group  # whose threads end with it

    def steps(
        self, evaluate: Callable[[int], Mapping[str, float]], save: Callable[[], None] | None = None
    ) -> Iterator[int]:
        """The optimizer steps still to be done, from 0; the body of the loop does one and calls `log`.

        evaluate: metrics after so many steps, empty where there is nothing to evaluate on; called before the first step
            and every train.eval_every.
        save: writes a checkpoint, by default `save`; called every checkpoint.every. Both also after the last step.

        Raises PreemptedError after a checkpoint, where a rank was told to end.
        """
        self._first_eval = self._evaluate(evaluate)
        while self.done < self.total_steps:
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
            if self.done < self.total_steps and (told := self._preemption.told()):
                if not due:
                    (save or self.save)()
                self._leave(told)

    def lr(self) -> float:
        """The learning rate of the step under way."""
        return learning_rate(self.done, self._config.optim, self.total_steps)

    def limits(self) -> Limits:
        """What the step under way must not exceed to be applied."""
        return self._guard.not_to_apply()

    def log(
        self,
        samples: Sequence[Sample],
        metrics: StepMetrics,
        result: OptimResult,
        more: Mapping[str, float] = {},
        told: Mapping[str, str] = {},
    ) -> None:
        """Log the step that has just been done. Raises UserError where too many in a row were not finite.

        told: what warnings may quote, by the names that their checks have for it.
        """
        step, seconds = self.done + 1, time.perf_counter() - self._started
        utilization = mfu(metrics.total_cost, seconds, self._peak, dist.get_world_size())
        row = self.metrics.log(step, {**metrics_row(metrics, result, seconds, utilization), **more})
        if is_main():
            for warning in self._health.warnings(step, {**row, **told}):
                say(warning, error=True)
        if line := self._memory.after_step(device.peak_bytes()):
            self.print([line])
        self.print(self._stragglers.after_step(step, metrics, seconds))
        self._guard.check(step, metrics, result, samples)

    def save(
        self,
        state: Mapping[str, object] = {},
        beside: Callable[[Path, int, HostCopies | None], checkpoint.Staged] | None = None,
    ) -> None:
        """Write a checkpoint, beside training with checkpoint.asynchronous, and delete the oldest ones. Collective over
        the world.

        state: what the run needs besides the engine's to go on, in plain containers and tensors.
        beside: stages another checkpoint, of (output_dir, step, copies), which is on the disk before this one.
        Raises NotWrittenError where two in a row could not be written, and DivergedError for weights that must not be.
        """
        folder = step_folder(self.output_dir, self.done)
        if folder.exists():  # a resumed run that went back past it; what is complete is never replaced
            return
        if self._config.train.check_replicas_every:
            self._check_replicas()
        self.metrics.retry()
        fingerprint = resume_fingerprint(self._config, self._engine.arch)
        of_data = {each.of: each.value for each in self._fingerprints}
        own_state = {"step": self.done, "guard": self._guard.state(), "settings": settings(self._config)}
        extra = {**own_state, DATE_KEY: self._config.data.date, **fingerprint, **of_data, **state}
        own = partial(self._engine.stage, folder, extra)
        self._saver.save(*((partial(beside, self.output_dir, self.done), own) if beside else (own,)))

    def finish(self) -> RunResult:
        """Wait for the last checkpoint, and export the model, if asked. Raises NotWrittenError."""
        self.metrics.end_progress()
        self._saver.wait(last=True)
        folder = step_folder(self.output_dir, self.done)
        with watchdog.patient():
            export = self._export()
        return RunResult(self.output_dir, folder, export, self._first_eval, self._last_eval, self._health.summary())

    def print(self, lines: Sequence[str]) -> None:
        """Print on the rank that speaks to the user."""
        if lines and is_main():
            say(*lines)

    def banner(self, weights: str, data: Sequence[str], work: str) -> list[str]:
        """What is about to be trained, on what, and where it goes: a wrong path or preset shows here, not hours later.

        weights: where they come from.
        data: lines about it.
        work: what a step is made of.
        """
        config, model = self._config, self._engine.model
        layers = transformer_engine.description(config.model.transformer_engine)
        stages = f" (layers {'+'.join(map(str, model.stages))})" if model.mesh.layout.pp > 1 else ""
        source = self._engine.source.path
        kernels = config.kernels.delta_rule, config.train.precision
        slow = flash_linear_attention.missed(*kernels) if any(model.arch.linear) else None
        lines = [
            f"device: {device.describe(dist.get_world_size())}, {config.train.precision}",
            f"model: {source}, {num_parameters(model.arch):,} parameters{weights}, layers of {layers}",
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
        """Go on from the newest checkpoint that is whole; damaged ones are told of and kept under another name, so that
        their steps can be saved again. Raises DamagedError, and renames nothing, where all are damaged."""
        found = checkpoint.newest_whole(self.output_dir / "checkpoints", self._engine.load)
        if found is None:
            return None
        folder, state, damaged = found
        for each, problem in damaged.items() if is_main() else ():
            kept = checkpoint.set_aside(each)
            say(f"passed over, and kept as {kept}: {problem}; going on from {folder}", error=True)
        return state

    def _check_replicas(self) -> None:
        self._engine.check_replicas(self._group, f"after step {self.done}")

    def _leave(self, told: signal.Signals) -> NoReturn:
        self._saver.wait(last=True)
        folder = step_folder(self.output_dir, self.done)
        self.print([f"told to end by {told.name}: saved {folder}; go on with checkpoint.resume=true"])
        raise PreemptedError(told)

    def _planned_peak(self) -> float:
        mesh = self._engine.mesh
        return preflight.planned(self._config, self._engine.arch, mesh.layout)[mesh.pp.rank()].peak

    def _due(self, every: int) -> bool:
        return self.done == self.total_steps or (every > 0 and self.done % every == 0)

    def _evaluate(self, evaluate: Callable[[int], Mapping[str, float]]) -> Mapping[str, float]:
        self._last_eval = evaluate(self.done)
        if self._last_eval:
            self.metrics.log_eval(self.done, self._last_eval)
        return self._last_eval

    def _export(self) -> Path | None:
        """Leave a Hugging Face folder in output_dir/hf; that of an earlier end of this run is replaced."""
        if not self._config.checkpoint.export_hf:
            return None
        folder, unfinished = self.output_dir / "hf", self.output_dir / ".hf.partial"
        if is_main():
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        self._engine.export_hf(unfinished)
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        dist.barrier()
        return folder


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / checkpoint.STEP_FOLDER.format(step)


def metrics_row(metrics: StepMetrics, result: OptimResult, seconds: float, utilization: float) -> dict[str, float]:
    """The row of metrics.jsonl of one optimizer step."""
    return {
        **metrics.terms,
        **metrics.observed,
        **({} if metrics.reruns is None else {"dispatch_reruns": metrics.reruns}),
        "loss": metrics.loss,  # the whole of it, not the term of that name
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
