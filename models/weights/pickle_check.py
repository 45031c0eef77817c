"""The objects of a checkpoint other than tensors, read without running any code that it brings.

Megatron-Core and torch would unpickle `.metadata` without any limit, `common.pt` with torch's list of what is harmless,
which an environment variable takes away, and whatever `.metadata` calls an object. They are given what was read here in
place of the files: a file that is checked and then read again can be another one, or read differently.
"""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from isoloss.models.weights import distcp
from isoloss.models.weights.distcp import Folder
from isoloss.parallel.runtime.errors import UserError

COMMON = "common.pt"  # Megatron's objects other than tensors
EXTRA_STATE = "._extra_state"  # of modules; the one kind of object that isoloss writes, and it reads none


def read_tensors(folder: Path) -> Folder:
    """The tensors of a checkpoint. UserError, naming the file and what it asks for, where it holds other objects than
    isoloss writes. Enters no collective."""
    found = Folder(folder)
    for key in found.objects:
        if EXTRA_STATE not in key:
            raise UserError(
                f"{folder / distcp.METADATA} calls {key} an object, which torch would run to read it; {distcp.DISTRUST}"
            )
    return found


def read_common(folder: Path) -> dict[str, Any]:
    """Return the content of `common.pt`, by torch's reader of plain values and tensors. Raises UserError, naming the
    file and the global it asks for, where it holds anything else. Enters no collective."""
    path = folder / COMMON
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise ValueError("compressed")
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        found = None if asked else torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the parsers of zip and pickle raise
        message = repr(error).splitlines()[0][:200]
        raise UserError(f"{path} is not what torch.save writes ({message}); copy the checkpoint again") from None
    if asked:
        raise UserError(f"{path} asks for {min(asked)}, which is no plain value; {distcp.DISTRUST}")
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__} where a dict should stand; copy the checkpoint again")
    return found


def problem_of(error: CheckpointException) -> UserError | None:
    """Return the UserError of a rank, which torch raises on every rank; None if the load failed for another reason."""
    failures = [failure for failure, _ in error.failures.values()]
    return next((failure for failure in failures if isinstance(failure, UserError)), None)
