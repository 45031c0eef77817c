"""From a Hugging Face folder to a Megatron-Core checkpoint: a plan, made without a model or a process group.

`plan` reads config.json and the headers of the safetensors files. Every tensor of the source is used once, or listed
as left out; every tensor of the checkpoint is covered once. `transfer.run` then writes: gate and up become two chunks,
q, k and v are interleaved by kv head, the experts of gpt-oss are transposed, and all else is numbers as they are. The
checkpoint fits every layout: its tensors are whole, and a loader takes what it needs.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from isoloss.models.architecture import Architecture
from isoloss.models.conversion.distcp_write import Chunk, check_tiling, plan_files
from isoloss.models.conversion.hf_files import SHARDS, ShardLayout, other_files
from isoloss.models.conversion.plan import FilePlan, OutputFile, Source, published_checksum
from isoloss.models.conversion.tensors import MergedRows, parts_of
from isoloss.models.families.registry import HUGGINGFACE, read_architecture
from isoloss.models.kinds.mappings import GatedMLP, Vocabulary, padded_vocab_size
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.checkpoint_names import Style, checkpoint_rows, native_style
from isoloss.models.weights.distcp import is_checkpoint
from isoloss.models.weights.hf_checkpoint import INDEX, HFReader, check
from isoloss.models.weights.manifest import NAME, FileRecord, Manifest
from isoloss.models.weights.mmap import DTYPES
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError

# Larger tensors are cut, so that a loader which needs a part of one reads little more than that.
CHUNK_BYTES = 256 << 20
# Size of a file: a sixteenth of the checkpoint between these bounds, so that the threads end together and a killed run
# loses little.
MIN_FILE_BYTES, MAX_FILE_BYTES, NUM_FILES = 64 << 20, 2 << 30, 16


@dataclass(frozen=True)
class Import:
    """A planned conversion of a Hugging Face folder into a checkpoint.

    transfer: plan of the files.
    arch: architecture, with the dtype of the checkpoint.
    dtypes: types of all tensors of the checkpoint, sorted.
    num_source_tensors: number of source tensors used.
    left_out: names of source tensors that are no weights.
    num_tensors: number of tensors of the checkpoint.
    """

    transfer: FilePlan
    arch: Architecture
    style: Style
    dtypes: tuple[str, ...]
    num_source_tensors: int
    left_out: tuple[str, ...]
    num_tensors: int


def plan(folder: str | Path, dtype: str | None = None, file_bytes: int | None = None) -> Import:
    """Plan the conversion of a Hugging Face folder.

    dtype: name of a torch dtype for the weights; None keeps each tensor's own. Weights that are not trained (the
        experts' selection bias) are float32 always.
    file_bytes: about the size of a file; None suits the model.
    Raises UserError where the folder is damaged or is not a model that isoloss knows.
    """
    folder = Path(os.path.abspath(folder))
    if is_checkpoint(checkpoint_folder(folder)):
        raise UserError(f"{folder} is a checkpoint already; give a Hugging Face folder with safetensors weights")
    arch = read_architecture(folder)
    reader = HFReader(folder)
    for file in dict.fromkeys(reader.file_of.values()):
        for name in reader.opened(file).offset_keys():
            if reader.file_of.get(name) != file:
                raise UserError(f"{folder / file} holds {name}, which {INDEX} does not place there; copy it again")
    check(reader, arch)
    weights, style = weight_map(arch), native_style(arch)
    used = parts_of(weights).keys()
    chunks = [chunk for weight in weights for chunk in _chunks(weight, arch, style, reader, dtype)]
    _check_types(chunks)
    check_tiling(chunks)
    sizes = Counter[torch.dtype]()
    for chunk in chunks:
        sizes[chunk.rows.dtype] += chunk.rows.nbytes
    kinds = tuple(sorted(_name(kind) for kind in sizes))
    arch = replace(arch, dtype=_name(sizes.most_common(1)[0][0]))
    file_bytes = file_bytes or min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, -(-sizes.total() // NUM_FILES)))
    files = (
        *plan_files(chunks, _extra_states(weights, arch, style), file_bytes),
        *other_files(folder, arch, f"{HUGGINGFACE}/"),
        OutputFile(f"{HUGGINGFACE}/{SHARDS}", (ShardLayout.of(reader, used).to_json().encode(),)),
    )
    num_tensors = len({chunk.key for chunk in chunks})
    text = partial(_manifest_text, arch, style, kinds, num_tensors)
    left_out = tuple(sorted(set(reader.names) - used))
    return Import(FilePlan(files, _sources(files), (NAME, text)), arch, style, kinds, len(used), left_out, num_tensors)


def _dtype(weight: Weight, reader: HFReader, asked: str | None) -> torch.dtype:
    """Return the type of the weight in the checkpoint. asked: name of the type requested, or None."""
    kinds = {part.tensor: DTYPES[reader.dtype(part.tensor)] for part in weight.parts}
    if not weight.trained:
        return torch.float32
    if asked:
        return getattr(torch, asked)
    if len(set(kinds.values())) > 1:
        text = ", ".join(f"{name} ({_name(kind)})" for name, kind in kinds.items())
        raise UserError(f"{text} become one tensor and have different types; choose one for all with --dtype")
    return next(iter(kinds.values()))


def _chunks(weight: Weight, arch: Architecture, style: Style, reader: HFReader, asked: str | None) -> Iterator[Chunk]:
    dtype = _dtype(weight, reader, asked)
    rest = weight.shape[1:]
    views = tuple(reader.view(part) for part in weight.parts)
    paths = tuple(reader.folder / reader.file_of[part.tensor] for part in weight.parts)
    for place in checkpoint_rows(weight, arch, style):
        edges = _edges(weight, *place.rows, most=max(1, CHUNK_BYTES // (math.prod(rest) * dtype.itemsize)))
        first = edges[0]
        shape = (*place.axes, edges[-1] - first, *rest)
        for start, stop in pairwise(edges):
            offsets = (*place.index, start - first, *(0 for _ in rest))
            box = (*(1 for _ in place.axes), stop - start, *rest)
            yield Chunk(place.key, shape, offsets, box, MergedRows(weight, start, stop, dtype, paths, views))


def _edges(weight: Weight, first: int, last: int, most: int) -> list[int]:
    """Return the edges of the chunks of rows [first, last) of a weight, each chunk of at most `most` rows."""
    run = (last - first) // 2 if isinstance(weight.mapping, GatedMLP) else last - first
    edges = [edge for start in range(first, last, run) for edge in range(start, start + run, most)] + [last]
    if isinstance(weight.mapping, Vocabulary) and padded_vocab_size(last, 1) > last:
        edges.append(padded_vocab_size(last, 1))
    return edges


def _check_types(chunks: Sequence[Chunk]) -> None:
    dtypes: dict[str, torch.dtype] = {}
    for chunk in chunks:
        one, other = dtypes.setdefault(chunk.key, chunk.rows.dtype), chunk.rows.dtype
        if one != other:
            raise UserError(
                f"{chunk.key} is {_name(one)} in one layer and {_name(other)} in another; choose one with --dtype"
            )


def _extra_states(weights: Sequence[Weight], arch: Architecture, style: Style) -> tuple[str, ...]:
    """Keys of the `_extra_state` objects that Megatron's modules ask for, with Transformer Engine or without.

    Those of Transformer Engine keep scales of fp8 in them; here all are empty. More than a model asks for do no harm.
    """
    keys: dict[str, None] = {}
    for weight in weights:
        if weight.layer is None and weight.name != "decoder.final_layernorm.weight":
            continue
        place = checkpoint_rows(weight, arch, style)[0]
        module, _, _ = place.key.removesuffix(".query").rpartition(".")
        offset, shape = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.axes or (1,)))
        keys[f"{module}._extra_state/shard_{offset}_{shape}"] = None
        if module.endswith(".linear_proj"):  # attention itself need not have a weight
            keys[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{offset}_{shape}"] = None
    return tuple(keys)


def _sources(files: Iterable[OutputFile]) -> tuple[Source, ...]:
    paths = dict.fromkeys(path for file in files for path in file.paths)
    return tuple(Source.of(path, *(published_checksum(path) or ())) for path in paths)


def _manifest_text(
    arch: Architecture, style: Style, dtypes: tuple[str, ...], num_tensors: int, files: Mapping[str, FileRecord]
) -> str:
    return Manifest("converted", arch.family, arch.vocab_size, style, dtypes, num_tensors, files).to_json()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
