"""Save, load and export in a dry run: tensors pass between device and files through the product's own code.

Three things are replaced, as they need values or other ranks: the contents of the files are made up (`made_up`), the
ranks do not divide the work among each other (this rank writes, and later finds, all that it holds), and no check is
made that the shards of all ranks make up whole tensors. Only rank 0 can do this: it makes the folder and writes the
manifest, without which the other ranks can neither save nor load.
"""

# A stand-in need not have the type of the attribute that it replaces.
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
    """Go through three phases, whose files go into `folder`. On rank 0 only."""
    with recorder.phase("checkpoint save"):
        engine.save(folder / "checkpoint")
    with recorder.phase("checkpoint load"):
        engine.load(folder / "checkpoint")
    with recorder.phase("export"):
        engine.export_hf(folder / "hf")


def stand_in() -> None:
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
