"""Reading a torch_dist checkpoint folder (torch.distributed.checkpoint) with no model and no process group.

`.metadata` is a pickle that says which tensor pieces stand in which `.distcp` file; a `.distcp` file is a row of
`torch.save` archives. Both are read without running anything that they could hold: by a reader of our own that makes
instances of the format's dataclasses and nothing else, and the numbers of a tensor straight from the mapped file,
where the archive stores them as they are.
"""

import contextlib
import dataclasses
import itertools
import math
import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner

from isoloss.models.weights import restricted_pickle, tensor_archive
from isoloss.models.weights.mmap import fetch, map_file, view
from isoloss.models.weights.restricted_pickle import Name, RefusedError, axes, inert, of_fields
from isoloss.parallel.runtime.errors import UserError

Shape = tuple[int, ...]
Box = tuple[slice, ...]
METADATA = ".metadata"
DISTRUST = "do not use this checkpoint, nor what came with it: save it anew, or get it from a source that you trust"
_BLOCK_BYTES = 4 << 20
_NONE = type(None)
_METADATA, _PLANNER = metadata.__name__, planner.__name__
_ENTRIES = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
# Megatron sets the last two on the instance.
_METADATA_FIELDS = {field.name for field in dataclasses.fields(metadata.Metadata)} | {"all_local_plans", "mcore_data"}


def is_checkpoint(folder: str | Path) -> bool:
    return (Path(folder) / METADATA).is_file()


@dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor: where it stands in the tensor, and which archive of which file holds it."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint and its pieces."""

    key: str
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[StoredChunk, ...]

    def at(self, index: Shape) -> Sequence[StoredChunk]:
        """The pieces that hold something of the tensor at these first coordinates."""
        return self._by_index(len(index)).get(index, ())

    def _by_index(self, axes: int) -> Mapping[Shape, Sequence[StoredChunk]]:
        if axes not in self._indexed:
            found: dict[Shape, list[StoredChunk]] = {}
            for piece in self.pieces:
                ranges = (range(start, start + size) for start, size in zip(piece.offsets[:axes], piece.sizes[:axes]))
                for index in itertools.product(*ranges):
                    found.setdefault(index, []).append(piece)
            self._indexed[axes] = found
        return self._indexed[axes]

    @cached_property
    def _indexed(self) -> dict[int, Mapping[Shape, Sequence[StoredChunk]]]:
        return {}


class Folder:
    """The tensors of a torch_dist checkpoint, by key. Files are mapped as they are needed.

    Raises UserError where `.metadata` is missing or is not one, a file is missing or shorter than it says, or the
    pieces of a tensor do not make it up.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._maps: dict[str, mmap.mmap] = {}
        self._pieces: dict[StoredChunk, Tensor] = {}
        with _reading(self.path) as found:
            entries = found.state_dict_metadata.items()
            where = {(index.fqn, index.offset): info for index, info in found.storage_data.items()}
            tensors = {key: entry for key, entry in entries if isinstance(entry, metadata.TensorStorageMetadata)}
            self.tensors = {key: _stored(key, entry, where) for key, entry in tensors.items()}
            self.objects = [key for key, _ in entries if key not in tensors]
        self._check_files()

    def metadata(self) -> metadata.Metadata:
        """Return the part of `.metadata` that torch's planners need, made anew from what was read."""
        described: dict[str, Any] = {key: _described(stored) for key, stored in self.tensors.items()}
        return metadata.Metadata(described | {key: metadata.BytesStorageMetadata() for key in self.objects})

    def stored_piece(self, stored: StoredTensor, piece: StoredChunk) -> Tensor:
        """Return the same as `piece`, without comparing the checksum, once that of the whole file was compared."""
        offset, _ = self.payload(stored, piece)
        return view(self._map(piece.file), offset, stored.dtype, piece.sizes)

    def rows(self, stored: StoredTensor, index: Shape, first_row: int, shape: Shape) -> Tensor:
        """stored[index] from row `first_row` on, of this shape: a view of the mapped file, not to be written to, where
        it stands in one piece."""
        found = self.boxes(stored, index, first_row, shape)
        read = [fetch(self.piece(stored, piece)[of], self.path / piece.file) for piece, _, of in found]
        if len(read) == 1:
            return read[0].view(shape)
        target = torch.empty((*(1,) * len(index), *shape), dtype=stored.dtype)
        for (_, into, _), part in zip(found, read):
            target[into].copy_(part)
        return target.view(shape)

    def boxes(
        self, stored: StoredTensor, index: Shape, first_row: int, shape: Shape
    ) -> list[tuple[StoredChunk, Box, Box]]:
        """Return the pieces of stored[index] from row `first_row` on, of this shape, each with the box that the piece
        fills and the box of the piece that fills it. Both boxes have the axes of `index`. Reads no numbers.

        Raises UserError where the pieces do not cover it once.
        """
        start = (*index, *((first_row,) if shape else ()), *(0,) * (len(shape) - 1))
        size = (*(1,) * len(index), *shape)
        found, corners = [], []
        for piece in stored.at(index):
            low = [max(a, b) for a, b in zip(start, piece.offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, size, piece.offsets, piece.sizes)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            into = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))
            of = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, piece.offsets))
            found.append((piece, into, of))
            corners.append((low, high))
        filled = sum(math.prod(b - a for a, b in zip(*box)) for box in corners)
        if filled != math.prod(size) or any(_overlap(*pair) for pair in itertools.combinations(corners, 2)):
            raise UserError(
                f"{self.path}: the pieces of {stored.key} do not cover {list(start)} to "
                f"{[a + n for a, n in zip(start, size)]} once; the checkpoint is not whole, save or copy it again"
            )
        return found

    def piece(self, stored: StoredTensor, piece: StoredChunk) -> Tensor:
        """A view of a piece in the mapped file, compared with its checksum the first time; not to be written to."""
        if piece not in self._pieces:
            offset, crc32 = self.payload(stored, piece)
            numbers = view(self._map(piece.file), offset, stored.dtype, piece.sizes)
            # Writers may leave the checksum out; that of the whole file then stands in the manifest.
            if crc32 and self._crc32(numbers, piece.file) != crc32:
                raise UserError(f"{self.path / piece.file} is damaged: {stored.key} fails its checksum; copy it again")
            self._pieces[piece] = numbers
        return self._pieces[piece]

    def payload(self, stored: StoredTensor, piece: StoredChunk) -> tuple[int, int]:
        """Return the offset of a piece's numbers in its file, and their checksum, 0 if there is none."""
        archive = memoryview(self._map(piece.file))[piece.start : piece.start + piece.length]
        try:
            payload = tensor_archive.locate(archive)
            if payload.dtype != stored.dtype or math.prod(payload.shape) != math.prod(piece.sizes):
                raise ValueError(f"{payload.dtype} of shape {list(payload.shape)}")
        except RefusedError as error:
            raise UserError(
                f"{self.path / piece.file} asks for what no tensor needs at byte {piece.start}, where {stored.key} "
                f"should stand ({error}); {DISTRUST}"
            ) from None
        except Exception as error:  # whatever the parsers of zip and pickle raise at damage
            raise UserError(
                f"{self.path / piece.file} is damaged at byte {piece.start}, where {stored.key} should stand "
                f"({error!r}); copy it again"
            ) from None
        return piece.start + payload.offset, payload.crc32

    # ---- how --------------------------------------------------------------------------------------------------------

    def _crc32(self, numbers: Tensor, file: str) -> int:
        crc32 = 0
        for block in numbers.flatten().view(torch.uint8).split(_BLOCK_BYTES):
            crc32 = zlib.crc32(fetch(block, self.path / file).numpy().data, crc32)
        return crc32

    def _check_files(self) -> None:
        end: dict[str, int] = {}
        for stored in self.tensors.values():
            for piece in stored.pieces:
                end[piece.file] = max(end.get(piece.file, 0), piece.start + piece.length)
        for file, nbytes in end.items():
            path = self.path / file
            if not path.is_file():
                raise UserError(f"{self.path} lacks {file}, which its {METADATA} names; copy the checkpoint again")
            if path.stat().st_size < nbytes:
                raise UserError(
                    f"{path} has {path.stat().st_size} bytes where {METADATA} calls for at least {nbytes}; it was cut "
                    "short, copy it again"
                )

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(self.path / file)
        return self._maps[file]


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[metadata.Metadata]:
    """Yield the content of `.metadata`, without running any of it, restricted to what is needed to find tensors. An
    error within the context is one of the file."""
    path = folder / METADATA
    if not path.is_file():
        raise UserError(f"{folder} is not a torch_dist checkpoint: it has no {METADATA}; give the folder that does")
    try:
        found = restricted_pickle.read(path.read_bytes(), _find, keys=(metadata.MetadataIndex,))
        if type(found) is not metadata.Metadata:
            raise ValueError(f"it is a {type(found).__name__}")
        for index, info in found.storage_data.items():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{index.fqn} is stored outside of the folder, at {info.relative_path}")
        yield found
    except RefusedError as error:
        raise UserError(f"{path} asks for {error}, which has no place in a checkpoint's metadata; {DISTRUST}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged or not a checkpoint's ({error!r}); copy it again") from None


def _stored(key: str, entry: metadata.TensorStorageMetadata, where: Mapping[Any, Any]) -> StoredTensor:
    pieces = []
    for chunk in entry.chunks:
        info = where[key, chunk.offsets]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key} is stored as {info.transform_descriptors}")
        if min((*chunk.offsets, *chunk.sizes, info.offset, info.length)) < 0:
            raise ValueError(f"{key} is stored at a negative place")
        if any(a + n > m for a, n, m in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
            raise ValueError(f"a piece of {key} reaches beyond it")
        pieces.append(
            StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)
        )
    if len({piece.offsets for piece in pieces}) != len(pieces):
        raise ValueError(f"two pieces of {key} stand at the same place")
    stored = StoredTensor(key, entry.properties.dtype, tuple(entry.size), tuple(pieces))
    check_whole(stored)
    return stored


def check_whole(stored: StoredTensor) -> None:
    """Raises ValueError where pieces of the tensor are missing."""
    if sum(math.prod(piece.sizes) for piece in stored.pieces) != math.prod(stored.shape):
        raise ValueError(f"the pieces of {stored.key} do not add up to its shape {list(stored.shape)}")


def _overlap(one: tuple[list[int], list[int]], other: tuple[list[int], list[int]]) -> bool:
    return all(max(a, b) < min(c, d) for a, b, c, d in zip(one[0], other[0], one[1], other[1]))


def _described(stored: StoredTensor) -> metadata.TensorStorageMetadata:
    chunks = [metadata.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)


# ---- what `.metadata` may name --------------------------------------------------------------------------------------


def _properties() -> Name:
    def made() -> metadata.TensorProperties:
        return object.__new__(metadata.TensorProperties)

    def built(instance: metadata.TensorProperties, state: Any) -> None:
        if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
            raise RefusedError("TensorProperties without a type")
        instance.dtype = state[0]  # nobody reads the others: layout, requires_grad, memory format, pinned memory

    return Name(f"{_METADATA}.TensorProperties", made=made, built=built)


def _whole() -> Name:
    def made() -> metadata.Metadata:
        return object.__new__(metadata.Metadata)

    def built(instance: metadata.Metadata, state: Any) -> None:
        if type(state) is not dict or not _METADATA_FIELDS.issuperset(state):
            raise RefusedError("fields that Metadata does not have")
        entries, where = state.get("state_dict_metadata"), state.get("storage_data")
        if type(entries) is not dict or type(where) is not dict:
            raise ValueError("no dicts of tensors and of where they are")
        for key, entry in entries.items():
            if type(key) is not str or type(entry) not in _ENTRIES:
                raise ValueError(f"a {type(entry).__name__} where a tensor should stand")
        for index, info in where.items():
            if type(index) is not metadata.MetadataIndex or type(info) is not filesystem._StorageInfo:
                raise ValueError(f"a {type(info).__name__} where the place of a tensor should stand")
        instance.state_dict_metadata, instance.storage_data = entries, where

    return Name(f"{_METADATA}.Metadata", made=made, built=built)


def _of(kind: type, **fields: tuple[type, ...]) -> Name:
    return of_fields(f"{kind.__module__}.{kind.__name__}", kind, fields)


_NAMES: Mapping[tuple[str, str], Name] = {
    (name.text.rpartition(".")[0], name.text.rpartition(".")[2]): name
    for name in (
        _of(metadata.ChunkStorageMetadata, offsets=(torch.Size,), sizes=(torch.Size,)),
        _of(
            metadata.TensorStorageMetadata,
            properties=(metadata.TensorProperties,), size=(torch.Size,), chunks=(list,),
        ),
        _of(metadata.BytesStorageMetadata),
        _of(metadata.MetadataIndex, fqn=(str,), offset=(torch.Size, _NONE), index=(int, _NONE)),
        _of(
            filesystem._StorageInfo,
            relative_path=(str,), offset=(int,), length=(int,), transform_descriptors=(list, tuple, _NONE),
        ),
        _whole(),
        _properties(),
        Name("torch.Size", called=lambda sizes: torch.Size(axes(sizes))),
        Name("collections.OrderedDict", called=lambda: {}),
        # Of who wrote what, and how: nothing of it is needed to read.
        *(
            inert(text)
            for text in (
                f"{_METADATA}.StorageMeta", f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_PLANNER}.SavePlan",
                f"{_PLANNER}.WriteItem", f"{_PLANNER}.WriteItemType", f"{_PLANNER}.TensorWriteData",
                f"{_PLANNER}.BytesIOWriteData", f"{filesystem.__name__}._StoragePrefix",
                "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath", "builtins.set",
            )
        ),
    )
}  # fmt: skip


def _find(module: str, name: str) -> Any:
    if (module, name) in _NAMES:
        return _NAMES[module, name]
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise RefusedError(f"{module}.{name}")
