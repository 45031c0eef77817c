"""What a run writes and reads: its checkpoint, and its export. Of them a dry run takes the way of the tensors between
device and files, which is the product's own code.

Three things need what one rank without values does not have, and are stood in for: what stands in the files is made up
(`made_up`), the ranks do not divide the work among each other (this one writes, and later finds, all that it holds),
and nobody checks that the shards of all ranks make up whole tensors. Only rank 0 can go this way: on the others there
is no folder, which rank 0 makes, and no manifest, which it writes.
"""

# A stand-in puts another thing where the type says what stood there.
# pyright: reportAttributeAccessIssue=false

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.utils._pytree import tree_map_only

from isoloss.engine.checkpoint import checkpoint, writer
from isoloss.engine.step.engine import Engine
from isoloss.models.mcore import patches
from isoloss.models.weights import distcp, hf_checkpoint
from isoloss.tools.plan.recorder import Recorder, made_up


def save_load_export(engine: Engine, folder: Path, recorder: Recorder) -> None:
    """Three phases, whose files go into `folder`. On rank 0."""
    with recorder.phase("checkpoint save"):
        engine.save(folder / "checkpoint")
    with recorder.phase("checkpoint load"):
        engine.load(folder / "checkpoint")
    with recorder.phase("export"):
        engine.export_hf(folder / "hf")


def stand_in() -> None:
    """From now on files hold made-up values, and are this rank's alone."""
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
    """A plan of what is written or read, made without the other ranks."""
    del use_dist
    init(self, group, False, coordinator_rank)
