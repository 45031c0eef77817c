"""Whether a checkpoint can be given to torch and Megatron-Core, which unpickle what is in it.

torch's reader unpickles `.metadata` without any limit, and its planner whatever `.metadata` calls an object: who wrote
these files could have run anything. `common.pt` goes through torch's own list of what is harmless; what is not ends in
a traceback, and an environment variable takes the list away. So the files are looked through first, without running
anything. Where a checkpoint is only a source of weights, `distcp` and `megatron_args` read them in the same way.
"""

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from isoloss.models.weights import distcp
from isoloss.parallel.runtime.errors import UserError

COMMON = "common.pt"  # what Megatron writes besides tensors
EXTRA_STATE = "._extra_state"  # of modules; the one kind of object that isoloss writes, and it reads none


def check(folder: Path) -> None:
    """UserError, naming the file and what it asks for, unless loading this checkpoint runs nothing that it brings.

    Reads `.metadata` and what `common.pt` holds besides tensors. Enters no collective.
    """
    check_common(folder)
    for key in distcp.read_objects(folder):
        if EXTRA_STATE not in key:
            raise UserError(
                f"{folder / distcp.METADATA} calls {key} an object, which torch would run to read it; {distcp.DISTRUST}"
            )


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Around a load of this checkpoint: torch reads tensors within a limit, and what it says beyond that is many lines,
    which propose to go without."""
    try:
        yield
    except CheckpointException as error:  # on every rank
        for failure, _ in error.failures.values():
            if isinstance(failure, pickle.UnpicklingError):
                asked = re.search(r"GLOBAL (\S+)", str(failure))
                raise UserError(
                    f"a .distcp file of {folder} asks for {asked[1] if asked else 'what is not told'} where a tensor "
                    f"should stand; {distcp.DISTRUST}"
                ) from None
        raise


def check_common(folder: Path) -> None:
    """As `check`, of `common.pt` alone."""
    path = folder / COMMON
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # whatever the parsers of zip and pickle raise
        raise UserError(f"{path} is not what torch.save writes ({error!r}); copy the checkpoint again") from None
    if asked:
        raise UserError(f"{path} asks for {min(asked)}, which is no plain value; {distcp.DISTRUST}")
