"""What surrounds the steps of any run: checkpoints, export, a step's row of metrics, the guard against bad steps."""

import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from isoloss.engine import checkpoint
from isoloss.engine.config import Config
from isoloss.engine.engine import Engine, OptimResult
from isoloss.engine.output import identity
from isoloss.engine.step import StepMetrics
from isoloss.parallel import UserError


def is_main() -> bool:
    """Whether this rank writes files and speaks to the user."""
    return dist.get_rank() == 0


def due(step: int, every: int, total_steps: int) -> bool:
    """Whether something that happens every `every` steps, and after the last one, happens after `step`."""
    return step == total_steps or (every > 0 and step % every == 0)


def resume(engine: Engine, config: Config, output_dir: Path) -> dict[str, object] | None:
    """Go on from the newest checkpoint of the folder, if asked and if there is one: what `save` was given with it."""
    newest = checkpoint.latest(output_dir / "checkpoints") if config.checkpoint.resume else None
    return None if newest is None else engine.load(newest)


def spread(engine: Engine) -> str:
    """What the opening lines tell of the layout; of a pipeline the layers of each stage, in the order of the model."""
    layout = engine.mesh.layout
    stages = f" (layers {'+'.join(map(str, engine.model.stages))})" if layout.pp > 1 else ""
    return f"layout {layout}{stages} on {dist.get_world_size()} rank(s)"


def resumed(config: Config, output_dir: Path, step: int, total_steps: int) -> list[str]:
    """What the opening lines tell of checkpoint.resume: nothing, or where the run goes on."""
    if not config.checkpoint.resume:
        return []
    done = f"resumed after step {step}" if step else f"no checkpoint in {output_dir}: starting a new run"
    return [done + ("" if step < total_steps else f": nothing left of train.steps={total_steps}")]


def save(
    engine: Engine, config: Config, output_dir: Path, step: int, state: Mapping[str, object] | None = None
) -> Path:
    """Write a checkpoint after `step` and delete the oldest ones. Collective over the world.

    state: what else the run needs to go on, in plain containers and tensors.
    """
    folder = step_folder(output_dir, step)
    if folder.exists():  # a resumed run that went back past it; what is complete is never replaced
        return folder
    engine.save(folder, {"step": step, **identity(config), **(state or {})})
    if is_main():
        checkpoint.prune(folder.parent, config.checkpoint.keep)
    return folder


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / checkpoint.STEP_FOLDER.format(step)


def export(engine: Engine, config: Config, output_dir: Path) -> Path | None:
    """Leave a Hugging Face folder in output_dir/hf, if asked; that of an earlier end of this run is replaced."""
    if not config.checkpoint.export_hf:
        return None
    folder, partial = output_dir / "hf", output_dir / ".hf.partial"
    if is_main():
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    engine.export_hf(partial)
    if is_main():
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()
    return folder


def report(metrics: StepMetrics, result: OptimResult, seconds: float, utilization: float) -> dict[str, float]:
    """The row of metrics.jsonl of one optimizer step."""
    return {
        **metrics.terms,
        "loss": metrics.loss,  # the whole of it, not the term of that name
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "valid_tokens": metrics.valid_tokens,
        "total_tokens": metrics.total_tokens,
        "sequences": metrics.sequences,
        "micro_batches": metrics.micro_batches,
        "weight_sum": metrics.weight_sum,
        "applied": int(result.applied),
        "seconds": seconds,
        "tokens_per_second": metrics.total_tokens / seconds,
        "mfu": utilization,
    }


class BadStepGuard:
    """Ends a run whose loss or gradient stays non-finite. Every rank sees the same numbers, so all end together."""

    def __init__(self, max_bad_steps: int):
        self.max_bad_steps = max_bad_steps
        self.bad_steps = 0

    def check(self, step: int, metrics: StepMetrics, result: OptimResult) -> None:
        finite = math.isfinite(metrics.loss) and math.isfinite(result.grad_norm)
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if not finite and is_main():
            print(f"step {step}: loss {metrics.loss}, gradient norm {result.grad_norm}: not applied", file=sys.stderr)
        if self.bad_steps >= self.max_bad_steps:
            raise UserError(
                f"loss or gradient not finite for train.max_bad_steps={self.max_bad_steps} steps in a row, up to "
                f"step {step} (loss {metrics.loss}); lower optim.lr, or look at the data of these steps"
            )
