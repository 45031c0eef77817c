"""The files of a Megatron-Core distributed checkpoint (format torch_dist), planned with the place of every tensor.

A `.distcp` file is a sequence of blobs, each what torch.save makes of one tensor; `.metadata`, a pickle of PyTorch's
classes, maps chunks of tensors to blobs. An envelope is such a blob without the tensor's bytes, so the
place of every blob is known before a tensor is read.
"""

import io
import json
import math
import mmap
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from isoloss.models.conversion.plan import Content, OutputFile
from isoloss.models.conversion.tensors import MergedRows

Shape = tuple[int, ...]
# What megatron.core.dist_checkpointing 0.16 writes itself; it refuses other backends and later versions.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_METADATA_VERSION = "1.0.0"


@dataclass(frozen=True)
class Chunk:
    """A box of a checkpoint tensor.

    key, global_shape: name and shape of the tensor.
    offsets, shape: start and size of the box.
    rows: numbers in the box.
    """

    key: str
    global_shape: Shape
    offsets: Shape
    shape: Shape
    rows: MergedRows


def plan_files(chunks: Sequence[Chunk], empty_objects: Iterable[str], file_bytes: int) -> tuple[OutputFile, ...]:
    """Every file of the checkpoint: the chunks in their order, in files of about `file_bytes` bytes.

    empty_objects: keys of objects that a loader asks for and that hold nothing (Megatron's `_extra_state`).
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    nothing = _saved([None])
    files: list[list[Content]] = [[nothing]]
    written = len(nothing)
    for key in empty_objects:  # all of them are the same bytes
        state[key] = BytesStorageMetadata()
        where[MetadataIndex(key)] = _StorageInfo(_name(0), 0, len(nothing))
    for chunk in chunks:
        before, after = envelope(chunk.shape, chunk.rows.dtype)
        blob_bytes = len(before) + chunk.rows.nbytes + len(after)
        if written and written + blob_bytes > file_bytes:
            files.append([])
            written = 0
        tensor = state.setdefault(
            chunk.key,
            TensorStorageMetadata(TensorProperties(chunk.rows.dtype), torch.Size(chunk.global_shape), []),
        )
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)))
        where[MetadataIndex(chunk.key, chunk.offsets)] = _StorageInfo(_name(len(files) - 1), written, blob_bytes)
        files[-1] += [before, chunk.rows, after]
        written += blob_bytes
    return (
        *(OutputFile(_name(k), tuple(contents)) for k, contents in enumerate(files)),
        OutputFile("common.pt", (_saved({}),)),
        OutputFile(".metadata", (pickle.dumps(Metadata(state, None, where, version=_METADATA_VERSION)),)),
        OutputFile("metadata.json", (json.dumps(_FORMAT).encode(),)),
    )


@cache
def envelope(shape: Shape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the bytes of a contiguous tensor.

    torch.save itself makes it, from zeros. It is a zip archive, whose checksums are left out: loaders do not look at
    them, and the manifest has a better one.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # Untouched memory: reading it takes none.
    zeros = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(zeros, dtype=dtype).view(shape)
    recorder = _Recorder(tensor.data_ptr(), nbytes)
    compute = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, recorder)
    finally:
        set_crc32_options(compute)
    before, after = recorder.parts
    return bytes(before), bytes(after)


class _Recorder(io.BytesIO):
    """Keeps what is written, in parts around the one write that comes from the given memory."""

    def __init__(self, address: int, nbytes: int):
        super().__init__()
        self.parts = [bytearray()]
        self._payload = (address, nbytes)

    def write(self, data) -> int:
        view = np.frombuffer(data, np.uint8)
        if (view.ctypes.data, view.nbytes) == self._payload:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += data
        return view.nbytes


def check_tiling(chunks: Iterable[Chunk]) -> None:
    """Assert that the chunks of each tensor agree on its type and shape and cover it once.

    For chunks that are runs in memory: one index on the first axes, a range on the next, everything on the rest.
    A fault is a mistake of the planner, so an AssertionError.
    """
    by_key: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    for key, parts in by_key.items():
        shape = parts[0].global_shape
        assert {(chunk.global_shape, chunk.rows.dtype) for chunk in parts} == {(shape, parts[0].rows.dtype)}, key
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        runs = []
        for chunk in parts:
            ranged = next((axis for axis, size in enumerate(chunk.shape) if size > 1), len(shape))
            assert chunk.shape[ranged + 1 :] == shape[ranged + 1 :], (key, chunk.shape)
            assert chunk.rows.nbytes == math.prod(chunk.shape) * chunk.rows.dtype.itemsize, (key, chunk.offsets)
            runs.append((sum(map(math.prod, zip(chunk.offsets, strides))), math.prod(chunk.shape)))
        starts, sizes = zip(*sorted(runs))
        assert [*starts, math.prod(shape)] == list(accumulate(sizes, initial=0)), key


def _name(k: int) -> str:
    return f"__0_{k}.distcp"


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
