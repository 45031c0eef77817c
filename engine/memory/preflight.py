"""Check by counting that a run fits its GPUs, before it starts; compare the plan with measured peaks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, MemoryConfig
from isoloss.engine.memory.estimate import StageMemory, resident_memory, step_memory
from isoloss.engine.memory.limits import GIB, room
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout, UserError

TOLERATED = 0.1  # part by which the measured peak may exceed the planned one without a second report
WORKSPACES = 64 << 20  # memory that cuBLAS keeps on a Hopper GPU; no plan counts it


def planned(config: Config, arch: Architecture, layout: Layout) -> list[StageMemory]:
    """Return the memory of every pipeline rank, with micro-batches of batch.max_tokens or, if more, data.max_length.

    With Transformer Engine's layers, which cannot be counted without a GPU, there are no activations.
    """
    longest = max(config.batch.max_tokens, config.data.max_length)
    full = replace(config, batch=replace(config.batch, max_tokens=longest))
    return (resident_memory if config.model.transformer_engine else step_memory)(full, arch, layout)


def check(config: Config, arch: Architecture, layout: Layout, device_bytes: float) -> None:
    """Raise UserError, with a key that helps, where a stage needs more. device_bytes: memory of each GPU."""
    stages = planned(config, arch, layout)
    worst = max(range(len(stages)), key=lambda rank: stages[rank].peak)
    stage = stages[worst]
    if stage.peak <= room(config, device_bytes):
        return
    parts = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    set_aside = device_bytes - room(config, device_bytes)
    parts |= {"activations": stage.activations, "CUDA, NCCL and servers": set_aside}
    raise UserError(
        f"the plan needs {(stage.peak + set_aside) / GIB:.1f} GiB on each GPU of pipeline rank {worst} ("
        + ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in parts.items())
        + f") and a GPU has {device_bytes / GIB:.1f}: {_remedy(config, arch, layout, device_bytes)}, or "
        "memory.check=false to go on as it is"
    )


def _remedy(config: Config, arch: Architecture, layout: Layout, device_bytes: float) -> str:
    for keys, changed in _changes(config):
        try:
            rules.check(changed, arch, layout)
        except UserError:
            continue
        if max(stage.peak for stage in planned(changed, arch, layout)) <= room(config, device_bytes):
            return f"set {keys}"
    return "take more GPUs, or a layout that python -m isoloss.tools.plan finds with --search"


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield keys and the changed configuration, from the change that costs the least time."""
    budgets, recomputed = [], MemoryConfig(recompute="full", offload_optimizer=config.memory.offload_optimizer)
    tokens = config.batch.max_tokens // 2
    while tokens >= config.data.max_length:
        budgets.append(tokens)
        tokens //= 2
    for tokens in budgets:
        yield f"batch.max_tokens={tokens}", _with_budget(config, tokens)
    full = replace(config, memory=recomputed)
    for tokens in (config.batch.max_tokens, *budgets):
        keys = "memory.recompute=full" + (f" and batch.max_tokens={tokens}" if tokens in budgets else "")
        yield keys, _with_budget(full, tokens)
    offloaded = replace(full, memory=replace(recomputed, offload_optimizer=1.0))
    lowest = min([config.batch.max_tokens, *budgets])
    keys = "memory.recompute=full, memory.offload_optimizer=1" + (f", batch.max_tokens={lowest}" if budgets else "")
    yield keys, _with_budget(offloaded, lowest)


def _with_budget(config: Config, tokens: int) -> Config:
    return replace(config, batch=replace(config.batch, max_tokens=tokens))


class PeakReport:
    """Planned and measured peak of a rank side by side: after its first step, and once more where a later step exceeds
    the plan by more than a tenth.

    planned: function that returns the planned bytes; called once, and never on a CPU.
    """

    def __init__(self, planned: Callable[[], float]):
        self._planned, self._told, self._exceeded = cache(planned), False, False

    def after_step(self, measured: float | None) -> str | None:
        """Return a line to report, or None. measured: peak bytes of the device's allocator; None on a CPU."""
        if measured is None:
            return None
        planned = self._planned()
        exceeded = measured > (1 + TOLERATED) * planned + WORKSPACES
        if self._told and (self._exceeded or not exceeded):
            return None
        first, self._told, self._exceeded = not self._told, True, exceeded
        line = f"device memory of rank 0: planned peak {planned / GIB:.1f} GiB, measured {measured / GIB:.1f} GiB"
        if exceeded:
            return f"{line}: more than planned; if it runs out, lower batch.max_tokens"
        return f"{line} in the first step" if first else line
