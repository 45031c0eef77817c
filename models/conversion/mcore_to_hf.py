"""A checkpoint into a Hugging Face folder: the plan, made from names, shapes and types alone.

Each weight of the model is in the checkpoint once, and each Hugging Face tensor is written once, of the weights that
it is part of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from isoloss.models.architecture import Architecture
from isoloss.models.conversion import certificate
from isoloss.models.conversion.hf_files import HFFile, HFTensor, ShardLayout, arrange, arrange_as, other_files
from isoloss.models.conversion.plan import Content, FilePlan, OutputFile, Source
from isoloss.models.conversion.tensors import SplitPart, parts_of
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, Entry, HFReader, check, index_text
from isoloss.models.weights.iterations import checkpoint_folder
from isoloss.models.weights.mapped import DTYPES
from isoloss.models.weights.weight_map import Weight, hf_shapes, weight_map

_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Export:
    """arch: of the folder that is written. dtypes: what each weight is written as, by its name."""

    arch: Architecture
    weights: CheckpointWeights
    dtypes: Mapping[str, torch.dtype]
    files: tuple[HFFile, ...]
    plan: FilePlan


def plan_export(checkpoint: str | Path, hf: str | Path | None = None, dtype: str | None = None) -> Export:
    """What turns `checkpoint` into a Hugging Face folder.

    hf: where config.json and the tokenizer are, and perhaps the files whose names are wanted; default the checkpoint's
        own.
    dtype: name of a torch dtype for the weights; default the one of config.json, or for a checkpoint that was converted
        each weight's own. Weights that are not trained (the experts' selection bias) keep theirs.
    Raises UserError where checkpoint and config.json do not belong together.
    """
    folder, checkpoint = Path(hf) if hf else hf_folder(checkpoint), checkpoint_folder(checkpoint)
    arch = read_architecture(folder)
    arch = replace(arch, dtype=dtype) if dtype else arch
    weights = CheckpointWeights(checkpoint, arch)
    layout = _published_layout(folder, arch) if hf else ShardLayout.read(checkpoint)
    mapped = weight_map(arch)
    parts = parts_of(mapped)
    kinds = _kinds(arch, weights, layout, keep=dtype is None and hf is None and layout is not None)
    tensors = [
        HFTensor(name, kinds[weight.name], weight.parts[index].tensor_shape)
        for name, ((weight, index), *_) in parts.items()
    ]
    files = arrange_as(layout, tensors) if layout else arrange(tensors)
    outputs = [_output(file, parts, weights) for file in files]
    if len(files) > 1 or (layout and layout.indexed):
        entries = {tensor.name: Entry(file.name, tensor.nbytes) for file in files for tensor in file.tensors}
        outputs.append(OutputFile(INDEX, (index_text(entries).encode(),)))
    outputs += other_files(folder, arch)
    left_out = len(weights.skipped)
    record = partial(certificate.text, direction="mcore-to-hf", source=checkpoint, weights=weights, left_out=left_out)
    plan = FilePlan(tuple(outputs), _sources(outputs, weights), (certificate.NAME, record))
    dtypes = {name: DTYPES[kind] for name, kind in kinds.items()}
    return Export(replace(arch, mtp_layers=0), weights, dtypes, files, plan)


def _published_layout(folder: Path, arch: Architecture) -> ShardLayout | None:
    """The files of a Hugging Face folder, None where it holds no weights; UserError if they are not of this model."""
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return None
    reader = HFReader(folder)
    check(reader, arch)
    return ShardLayout.of(reader, hf_shapes(weight_map(arch)).keys())


def _kinds(arch: Architecture, weights: CheckpointWeights, layout: ShardLayout | None, keep: bool) -> dict[str, str]:
    """The safetensors type that each weight is written as, by its name. keep: its own."""
    recorded = {name: kind for file in layout.files.values() for name, kind in file.tensors.items()} if layout else {}
    kinds = {}
    for weight in weight_map(arch):
        if weight.trained:
            kinds[weight.name] = _TYPES[weights.dtype(weight) if keep else arch.torch_dtype]
        else:
            kinds[weight.name] = recorded.get(weight.parts[0].tensor, "F32")
    return kinds


def _output(file: HFFile, parts: Mapping[str, Sequence[tuple[Weight, int]]], weights: CheckpointWeights) -> OutputFile:
    contents: list[Content] = [file.header()]
    for tensor in file.tensors:
        own = [SplitPart(weight, index, DTYPES[tensor.dtype], weights) for weight, index in parts[tensor.name]]
        assert sum(part.nbytes for part in own) == tensor.nbytes, tensor.name
        contents += own
    return OutputFile(file.name, tuple(contents))


def _sources(outputs: Sequence[OutputFile], weights: CheckpointWeights) -> tuple[Source, ...]:
    """Every file that is read; with the checksum of the checkpoint's manifest, unless its tensors have their own: a
    training checkpoint is mostly optimizer state, which need not be read."""
    folder, known = weights.folder.path, {}
    if (folder / manifest.NAME).is_file():
        known = {folder / name: f"crc32:{record.crc32}" for name, record in manifest.read(folder).files.items()}
    tensors = (weights.folder.tensors[key] for key in weights.keys)
    pieces = [
        (folder / piece.file, weights.folder.payload(stored, piece)) for stored in tensors for piece in stored.pieces
    ]
    for path in {path for path, _ in pieces} - {path for path, (_, crc32) in pieces if not crc32}:
        known.pop(path, None)
    paths = dict.fromkeys(path for output in outputs for path in output.paths)
    return tuple(Source.of(path, known.get(path), "copy the checkpoint again") for path in paths)
