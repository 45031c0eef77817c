"""Memory that is a mapped file: the system reads it from the disk when it is looked at."""

import ctypes
import errno
import json
import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from isoloss.parallel.runtime.errors import UserError

# The types that weights come in, as safetensors call them.
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PAGE = 4096
# Linux reads little more at one request. What follows is begun as well: the disk works while this thread hashes.
_REQUEST_BYTES, _AHEAD_BYTES = 128 << 10, 16 << 20
# Linux: begin to read; read to the end, and report what fails (since 5.14; older ones refuse it).
_WILLNEED, _POPULATE_READ = 3, 22
_EHWPOISON = 133
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path) -> mmap.mmap:
    """Map a file of any size; no memory is reserved for the mapping."""
    with path.open("rb") as file:
        # A private mapping: torch takes no read-only memory, and nothing is ever written to it.
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)


def view(mapped: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Numbers in a mapped file, of which nothing is read yet; not to be written to."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def safetensors_views(path: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, Tensor]:
    """The tensors of the types in `dtypes` of a file that the safetensors library has opened, by name."""
    mapped = map_file(path)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    return {
        name: view(mapped, start + entry["data_offsets"][0], dtypes[entry["dtype"]], entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in dtypes
    }


def fetch(view: Tensor, path: Path) -> Tensor:
    """Have what `view` shows of the mapped file `path` read in; other threads run meanwhile. Returns the view.

    Raises UserError where the disk fails or the file was cut short, which would kill a process that looks at it.
    """
    if sys.platform == "linux" and view.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
        start = view.data_ptr() // _PAGE * _PAGE
        nbytes = view.data_ptr() + span * view.itemsize - start
        for offset in (0, _AHEAD_BYTES):
            for at in range(start + offset, start + offset + nbytes, _REQUEST_BYTES):
                _madvise(at, _REQUEST_BYTES, _WILLNEED)
        if _madvise(start, nbytes, _POPULATE_READ) and ctypes.get_errno() in (errno.EFAULT, _EHWPOISON):
            raise UserError(f"{path} cannot be read: its disk fails, or it was cut short just now; copy it again")
    return view
