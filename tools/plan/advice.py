"""Find changes that make a run fit which does not, by the estimate of memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.memory.limits import GIB, room
from isoloss.models.architecture import Architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import num_factors
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import Layout, UserError
from isoloss.tools.plan.hardware import Gpu
from isoloss.tools.plan.search import DEGREES

IN_CPU_MEMORY = 16  # bytes of an offloaded parameter: weight, two moments and gradient in fp32
MOST_GPUS = 1024
RANK = 32  # of adapters that are advised


def to_fit(config: Config, arch: Architecture, layout: Layout, gpu: Gpu) -> str:
    """Return advice: fewer tokens or recomputation, or, where weights, gradients and optimizer alone exceed a GPU,
    changes that reduce these. A change is named only where the run fits with it."""
    available, stages = room(config, gpu.memory), step_memory(config, arch, layout)
    states = max(stage.peak - stage.activations for stage in stages)
    if states <= available:
        return (
            f"to fit: lower batch.max_tokens={config.batch.max_tokens}, or recompute (docs/memory.md), or ask --search"
        )
    changes = [*_adapters(config, arch, layout, gpu), *_offloading(config, arch, layout, gpu)]
    changes += [_more_gpus(config, arch, layout, gpu), "a smaller model"]
    return (
        f"to fit: weights, gradients and optimizer alone take {states / GIB:.1f} GiB of {available / GIB:.1f}, "
        f"whatever batch.max_tokens and memory.recompute are; what helps: {'; '.join(changes)}"
    )


def _adapters(config: Config, arch: Architecture, layout: Layout, gpu: Gpu) -> Iterator[str]:
    """Yield the key of adapters, which leave the weights without gradients and optimizer; of attention alone where
    those of all matrices do not fit."""
    if config.lora.rank > 0:
        return
    for targets in (("all",), ("attention",)):
        keys = _keys_by_which(config, arch, layout.world_size, gpu, lora=LoraConfig(rank=RANK, targets=targets))
        if keys is not None:
            named = "" if targets == ("all",) else f" lora.targets=[{','.join(targets)}]"
            yield f"lora.rank={RANK}{named}{keys} (docs/lora.md)"
            return


def _offloading(config: Config, arch: Architecture, layout: Layout, gpu: Gpu) -> Iterator[str]:
    offloaded = replace(config, memory=replace(config.memory, offload_optimizer=1.0))
    keys = _keys_by_which(offloaded, arch, layout.world_size, gpu)
    if config.memory.offload_optimizer < 1 and keys is not None:
        trained = num_factors(arch, config.lora) if config.lora.rank > 0 else num_parameters(arch)
        nbytes = IN_CPU_MEMORY * config.trained_models * trained
        yield f"memory.offload_optimizer=1{keys} ({nbytes / 1e9:,.0f} GB in CPU memory, over all nodes)"


def _more_gpus(config: Config, arch: Architecture, layout: Layout, gpu: Gpu) -> str:
    """Return the fewest GPUs, with more tensor and expert parallelism where data-parallel ranks are not enough."""
    world = 2 * layout.world_size
    while world <= MOST_GPUS:
        for tp, ep in product(DEGREES, DEGREES):
            if tp < layout.tp or ep < layout.ep:
                continue
            changed = replace(config, parallel=replace(config.parallel, tp=tp, ep=ep))
            keys = _keys_by_which(changed, arch, world, gpu)
            if keys is not None:
                degrees = f" parallel.tp={tp}" * (tp > layout.tp) + f" parallel.ep={ep}" * (ep > layout.ep)
                return f"--gpus {world}{degrees}{keys}"
        world *= 2
    return "more GPUs, in a layout that --search finds"


def _keys_by_which(config: Config, arch: Architecture, world: int, gpu: Gpu, **changes: Any) -> str | None:
    """Return "" where the configuration fits unchanged, the key of recomputation where it fits with that, and None
    where it is not legal or does not fit. changes: groups of keys that replace those of the configuration."""
    again = replace(config.memory, recompute="full", recompute_modules=(), recompute_layers=None)
    for keys, memory in (("", config.memory), (" memory.recompute=full", again)):
        try:
            changed = replace(config, memory=memory, **changes)
            layout = changed.parallel.layout().with_world(world)
            rules.check(changed, arch, layout)
        except UserError:
            continue
        if max(stage.peak for stage in step_memory(changed, arch, layout)) <= room(changed, gpu.memory):
            return keys
    return None
