"""From a Hugging Face folder to a Megatron-Core checkpoint: a plan of bytes, made without a model or a process group.

`plan` reads config.json and the headers of the safetensors files. Every tensor of the source is used once, or listed
as left out; every tensor of the checkpoint is covered once. `transfer.run` then copies: gate and up become two chunks,
q, k and v are interleaved by kv head, the experts of gpt-oss are transposed, and all else is bytes as they are. The
checkpoint fits every layout: its tensors are whole, and a loader takes what it needs.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.conversion import transfer
from isoloss.models.conversion.distcp_write import Chunk, check_tiling, plan_files
from isoloss.models.conversion.safetensors_header import (
    DTYPES,
    ITEMSIZE,
    Header,
    Stored,
    published_checksum,
    read_header,
)
from isoloss.models.conversion.segments import Cast, Literal, Run, Segment, Strided, Zeros
from isoloss.models.conversion.shard_layout import SHARDS, ShardLayout, shard_layout
from isoloss.models.conversion.transfer import OutputFile, Source
from isoloss.models.families.registry import HUGGINGFACE, hf_folder, read_architecture
from isoloss.models.weights.checkpoint_names import Style, native_style, places
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, HFReader, check, config_text, sidecars
from isoloss.models.weights.manifest import NAME, FileRecord, Manifest
from isoloss.models.weights.mappings import GateUp, Vocabulary, padded_vocab_size
from isoloss.models.weights.weight_map import Part, Weight, weight_map
from isoloss.parallel.errors import UserError

# Larger tensors are cut, so that a loader which needs a part of one reads little more than that.
CHUNK_BYTES = 256 << 20
# Size of a file: a sixteenth of the checkpoint between these bounds, so that the workers end together and a killed run
# loses little.
MIN_FILE_BYTES, MAX_FILE_BYTES, NUM_FILES = 64 << 20, 2 << 30, 16


@dataclass(frozen=True)
class Plan:
    """A conversion.

    transfer: its files, byte by byte. arch: with the dtype of the checkpoint. dtypes: of all its tensors, sorted.
    num_source_tensors: those used; left_out: those of the source that are no weights. num_tensors: of the checkpoint.
    """

    transfer: transfer.Plan
    arch: Architecture
    style: Style
    dtypes: tuple[str, ...]
    num_source_tensors: int
    left_out: tuple[str, ...]
    num_tensors: int


def plan(folder: str | Path, dtype: str | None = None, file_bytes: int | None = None) -> Plan:
    """Plan the conversion of a Hugging Face folder.

    dtype: name of a torch dtype for the weights; None keeps each tensor's own. Weights that are not trained (the
    experts' selection bias) are float32 always. file_bytes: about the size of a file; None suits the model.
    Raises UserError where the folder is damaged or is not a model that isoloss knows.
    """
    folder = Path(os.path.abspath(folder))
    if hf_folder(folder) != folder:
        raise UserError(f"{folder} is a checkpoint already; give a Hugging Face folder with safetensors weights")
    arch = read_architecture(folder)
    if (folder / SINGLE).is_file():
        read_header(folder / SINGLE)  # tells what is wrong with it better than the reader
    reader = HFReader(folder)
    headers = {file: read_header(folder / file) for file in dict.fromkeys(reader.file_of.values())}
    for file, header in headers.items():
        for name in header.tensors:
            if reader.file_of.get(name) != file:
                raise UserError(f"{folder / file} holds {name}, which {INDEX} does not place there; copy it again")
    check(reader, arch)
    tensors = _Tensors(folder, headers, dtype)
    weights, style = weight_map(arch), native_style(arch)
    chunks = [chunk for weight in weights for chunk in _chunks(weight, arch, style, tensors)]
    _check_types(chunks)
    check_tiling(chunks)
    used = tensors.check_used({part.tensor for weight in weights for part in weight.parts})
    sizes = Counter[str]()
    for chunk in chunks:
        sizes[chunk.dtype] += math.prod(chunk.shape) * ITEMSIZE[chunk.dtype]
    arch = replace(arch, dtype=sizes.most_common(1)[0][0])
    file_bytes = file_bytes or min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, -(-sizes.total() // NUM_FILES)))
    layout = shard_layout(headers, used, (folder / INDEX).is_file())
    files = (*plan_files(chunks, _extra_states(weights, arch, style), file_bytes), *_huggingface(folder, layout, arch))
    dtypes, num_tensors = tuple(sorted(sizes)), len({chunk.key for chunk in chunks})
    text = partial(_manifest_text, arch, style, dtypes, num_tensors)
    left_out = tuple(sorted(set(reader.names) - used))
    return Plan(
        transfer.Plan(files, _sources(files), (NAME, text)), arch, style, dtypes, len(used), left_out, num_tensors
    )


class _Tensors:
    """The tensors of a folder as segments: where their bytes are, and what has been used of them."""

    def __init__(self, folder: Path, headers: Mapping[str, Header], dtype: str | None):
        self._stored = {
            name: (str(folder / file), stored)
            for file, header in headers.items()
            for name, stored in header.tensors.items()
        }
        self._dtype = dtype
        self._used = Counter[str]()

    def dtype(self, weight: Weight) -> str:
        """The dtype that the weight gets."""
        if not weight.trained:
            return "float32"
        if self._dtype:
            return self._dtype
        kinds = {part.tensor: self._of(part)[1] for part in weight.parts}
        if len(set(kinds.values())) > 1:
            text = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise UserError(f"{text} become one tensor and have different types; choose one for all with --dtype")
        return next(iter(kinds.values()))

    def segment(self, part: Part, view: Tensor, start: int, target: str) -> Segment:
        """The bytes of a view of `part`. start: of the part in the memory that the view is of, in elements."""
        path, dtype, stored = self._of(part)
        itemsize = ITEMSIZE[dtype]
        offset = stored.offset + (part.row or 0) * math.prod(part.shape) * itemsize
        offset += (int(view.storage_offset()) - start) * itemsize
        self._used[part.tensor] += view.numel() * itemsize
        if view.is_contiguous():
            inner: Run | Strided = Run(path, offset, view.numel() * itemsize)
        else:
            inner = Strided(path, offset, itemsize, tuple(view.shape), view.stride())
        return inner if dtype == target else Cast(inner, dtype, target, part.tensor)

    def check_used(self, expected: set[str]) -> set[str]:
        """That every byte of these tensors was used once; returns them."""
        sizes = {name: self._stored[name][1].nbytes for name in expected}
        assert dict(self._used) == sizes, "a tensor was not used exactly once"
        return expected

    def _of(self, part: Part) -> tuple[str, str, Stored]:
        path, stored = self._stored[part.tensor]
        if stored.dtype not in DTYPES:
            raise UserError(
                f"{part.tensor} in {path} has the type {stored.dtype}; only {', '.join(DTYPES)} can be converted: "
                "take the unquantized model"
            )
        return path, DTYPES[stored.dtype], stored


def _chunks(weight: Weight, arch: Architecture, style: Style, tensors: _Tensors) -> Iterator[Chunk]:
    (place,) = places(weight, arch, style)
    dtype, rest = tensors.dtype(weight), weight.shape[1:]
    runs = list(_runs(weight, tensors, dtype))
    if isinstance(weight.form, Vocabulary):
        padding = padded_vocab_size(arch.vocab_size, 1) - arch.vocab_size
        if padding:
            runs.append((padding, (Zeros(padding * math.prod(rest) * ITEMSIZE[dtype]),)))
    shape = (*place.axes, sum(rows for rows, _ in runs), *rest)
    start = 0
    for rows, segments in runs:
        offsets = (*place.index, start, *(0 for _ in rest))
        yield Chunk(place.key, shape, dtype, offsets, (*(1 for _ in place.axes), rows, *rest), segments)
        start += rows


def _runs(weight: Weight, tensors: _Tensors, dtype: str) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """The weight's rows in runs that become one chunk each: how many, and their bytes."""
    sizes = [math.prod(part.shape) for part in weight.parts]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    # All parts in one imagined memory, so that a view tells by its offset what it shows.
    memory = torch.empty(sum(sizes), device="meta")
    parts = [memory[start : start + size].view(part.shape) for start, size, part in zip(starts, sizes, weight.parts)]
    row_bytes = math.prod(weight.shape[1:]) * ITEMSIZE[dtype]
    most = max(1, CHUNK_BYTES // row_bytes)
    rows, segments = 0, []
    for piece in weight.form.pieces(parts):
        assert piece._is_view(), f"{weight.form} copies"
        for view in piece.split(most):
            if segments and (isinstance(weight.form, GateUp) or rows + view.shape[0] > most):
                yield rows, tuple(segments)
                rows, segments = 0, []
            k = max(k for k, start in enumerate(starts) if start <= view.storage_offset())
            segments.append(tensors.segment(weight.parts[k], view, starts[k], dtype))
            rows += view.shape[0]
    yield rows, tuple(segments)


def _check_types(chunks: Sequence[Chunk]) -> None:
    dtypes: dict[str, str] = {}
    for chunk in chunks:
        if dtypes.setdefault(chunk.key, chunk.dtype) != chunk.dtype:
            raise UserError(
                f"{chunk.key} is {dtypes[chunk.key]} in one layer and {chunk.dtype} in another; choose one with --dtype"
            )


def _extra_states(weights: Sequence[Weight], arch: Architecture, style: Style) -> tuple[str, ...]:
    """Keys of the `_extra_state` objects that Megatron's modules ask for, with Transformer Engine or without.

    Those of Transformer Engine keep scales of fp8 in them; here all are empty. More than a model asks for do no harm.
    """
    keys: dict[str, None] = {}
    for weight in weights:
        if weight.layer is None and weight.name != "decoder.final_layernorm.weight":
            continue
        (place,) = places(weight, arch, style)
        module, _, _ = place.key.rpartition(".")
        offset, shape = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.axes or (1,)))
        keys[f"{module}._extra_state/shard_{offset}_{shape}"] = None
        if module.endswith(".linear_proj"):  # attention itself need not have a weight
            keys[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{offset}_{shape}"] = None
    return tuple(keys)


def _huggingface(folder: Path, layout: ShardLayout, arch: Architecture) -> Iterator[OutputFile]:
    """All of the folder but its weights, and a list that tells in which file each of them was, for the way back."""
    yield OutputFile(f"{HUGGINGFACE}/config.json", (Literal(config_text(folder, arch).encode()),))
    yield OutputFile(f"{HUGGINGFACE}/{SHARDS}", (Literal(layout.to_json().encode()),))
    for name in sidecars(folder):
        yield OutputFile(f"{HUGGINGFACE}/{name}", (Run(str(folder / name), 0, (folder / name).stat().st_size),))


def _sources(files: Iterable[OutputFile]) -> tuple[Source, ...]:
    paths = dict.fromkeys(path for file in files for segment in file.segments for path in segment.paths)
    published = {path: published_checksum(Path(path)) for path in paths}
    return tuple(Source(path, *found) if (found := published[path]) else Source(path) for path in paths)


def _manifest_text(
    arch: Architecture, style: Style, dtypes: tuple[str, ...], num_tensors: int, files: Mapping[str, FileRecord]
) -> str:
    return Manifest("converted", arch.family, arch.vocab_size, style, dtypes, num_tensors, files).to_json()
