"""Replace what a whole run asks other ranks and values for: packing, gathers of objects, and files.

In files three things are replaced: the contents are made up (`made_up`), the ranks do not divide the work among each
other (this rank writes, and later finds, all that it holds), and no check is made that the shards of all ranks make up
whole tensors. Only rank 0 can save, load and export: it makes the folder and writes the manifest, without which the
other ranks can do neither.
"""

# A stand-in need not have the type of the attribute that it replaces.
# pyright: reportAttributeAccessIssue=false

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.utils._pytree import tree_map_only

from isoloss.engine.batching.packing import PackedBatch, StepSamples
from isoloss.engine.checkpoint import checkpoint, writer
from isoloss.engine.memory import nowhere
from isoloss.engine.memory.live_bytes import made_up
from isoloss.engine.step import forward_backward, step_batch
from isoloss.engine.step.engine import Engine
from isoloss.models.architecture import Architecture
from isoloss.models.mcore import patches, weight_stream
from isoloss.models.mcore.weight_stream import Label
from isoloss.models.weights import distcp, hf_checkpoint
from isoloss.parallel import Layout, normalizer
from isoloss.tools.plan.recorder import Recorder


def join(simulated: nowhere.SimulatedRank) -> Recorder:
    """Become this rank (`nowhere.join`). Return the recorder of the ops of its device."""
    recorder = Recorder(simulated.device, simulated.gpus_per_node)
    nowhere.join(recorder, simulated)
    _stand_in()
    return recorder


@functools.cache
def _stand_in() -> None:
    normalizer.device_of = lambda group: nowhere.DEVICE  # on which tokens are counted
    forward_backward.check_canary = lambda *args, **kwargs: None  # the weights that were consumed have no values
    _pack_on_the_host()
    _exchange_objects()
    _write_alone()


def answer_exchanges(arch: Architecture, layout: Layout) -> None:
    """Make up the answers of other ranks: sizes of messages between experts, and labels of the weight stream."""
    nowhere.share_evenly(arch)
    weight_stream.gather_objects = partial(labels_of_all, layout=layout)


def _pack_on_the_host() -> None:
    """Pack on the host, which needs values: made-up ones for the weights, which the device has counted."""
    pack = step_batch.pack

    def pack_with_values(step: StepSamples, *more: Any) -> PackedBatch:
        with unset_fake_temporarily():
            weights = {i: torch.full(w.shape, made_up(w.dtype), dtype=w.dtype) for i, w in step.weights.items()}
            return pack(replace(step, weights=weights), *more)

    step_batch.pack = pack_with_values


def _exchange_objects() -> None:
    """Make gathers of objects return this rank's object for every rank."""

    def all_gather_object(objects: list, mine: Any, group: Any = None) -> None:
        del group
        objects[:] = [mine] * len(objects)

    dist.all_gather_object = dist.distributed_c10d.all_gather_object = all_gather_object


def labels_of_all(mine: Sequence[Label] | None, *, layout: Layout) -> list[Sequence[Label] | None]:
    """Return the labels that every rank sends in a round of the weight stream: the first rank of a stage those of this
    rank, the ranks that share its experts those of the experts, and all other ranks none."""
    of_all: list[Sequence[Label] | None] = [None if mine is None else () for _ in range(layout.world_size)]
    if mine is None:
        return of_all
    experts = [label for label in mine if ".experts." in label.name]
    for stage in range(layout.pp):
        first = stage * layout.world_size // layout.pp
        for sharing in range(layout.ep):
            of_all[first + sharing * layout.etp] = experts if sharing else mine
    return of_all


# ---- files -----------------------------------------------------------------------------------------------------------


def save_load_export(engine: Engine, folder: Path, recorder: Recorder) -> None:
    """Go through three phases, whose files go into `folder`. On rank 0 only."""
    with recorder.phase("checkpoint save"):
        engine.save(folder / "checkpoint")
    with recorder.phase("checkpoint load"):
        engine.load(folder / "checkpoint")
    with recorder.phase("export"):
        engine.export_hf(folder / "hf")


def _write_alone() -> None:
    """Make files hold made-up values and only this rank's tensors, from now on."""
    torch.save = _with_values(torch.save)
    hf_checkpoint.save_file = _with_values(hf_checkpoint.save_file)
    checkpoint.gather_objects = lambda mine, group=None: [mine]
    writer.share_writing = lambda state, replicas: None
    _DistWrapper.__init__ = functools.partialmethod(_alone, _DistWrapper.__init__)
    distcp.check_whole = lambda stored: None
    patches.trust_shards()


def _with_values(write: Callable[..., None]) -> Callable[..., None]:
    def made_up_write(what: Any, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            write(tree_map_only(Tensor, _made_up_tensor, what), *args, **kwargs)

    return made_up_write


def _made_up_tensor(tensor: Tensor) -> Tensor:
    has_values = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    return tensor if has_values else torch.full(tensor.shape, made_up(tensor.dtype), dtype=tensor.dtype)


def _alone(self: _DistWrapper, init: Callable[..., None], group: Any, use_dist: bool, coordinator_rank: int) -> None:
    """Initialize the wrapper without distribution, so that this rank alone plans what is written or read."""
    del use_dist
    init(self, group, False, coordinator_rank)
