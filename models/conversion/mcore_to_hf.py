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
from isoloss.models.conversion.tensors import KeptTensor, SplitPart, parts_of
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.hf_checkpoint import INDEX, Entry, HFReader, check, has_weights, index_text
from isoloss.models.weights.mmap import DTYPES
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.parallel.runtime.errors import UserError

_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Export:
    """A planned export. arch: architecture of the folder written. dtypes: type written for each weight, by name."""

    arch: Architecture
    weights: CheckpointWeights
    dtypes: Mapping[str, torch.dtype]
    files: tuple[HFFile, ...]
    plan: FilePlan


def plan_export(
    checkpoint: str | Path, hf: str | Path | None = None, dtype: str | None = None, *, keep_unused: bool = False
) -> Export:
    """Plan the export of `checkpoint` to a Hugging Face folder; a multimodal model gives a folder of its text model.

    hf: where config.json and the tokenizer are, and perhaps the files whose names are wanted; default the checkpoint's
        own.
    dtype: name of a torch dtype for the weights; default each tensor's in the files of `hf`, without those the one of
        config.json, or for a checkpoint that was converted each weight's own. Weights that are not trained (the
        experts' selection bias) keep theirs.
    keep_unused: write all other tensors of `hf`, too, byte for byte: a vision tower, layers for multi-token prediction.
    Raises UserError where checkpoint and config.json do not belong together.
    """
    folder, checkpoint = Path(hf) if hf else hf_folder(checkpoint), checkpoint_folder(checkpoint)
    arch = read_architecture(folder)
    arch = replace(arch, dtype=dtype) if dtype else arch
    weights = CheckpointWeights(checkpoint, arch)
    unused = _unused(folder if hf else None, arch) if keep_unused else {}
    layout = _published_layout(folder, arch, unused) if hf else ShardLayout.read(checkpoint)
    recorded = {name: kind for file in layout.files.values() for name, kind in file.tensors.items()} if layout else {}
    kinds = _kinds(arch, weights, {} if dtype else recorded, recorded, converted=hf is None and layout is not None)
    if arch.text_only() != arch and not keep_unused:
        arch, layout = arch.text_only(), None  # its tensors have other names
    parts = parts_of(weight_map(arch))
    tensors = [
        HFTensor(name, kinds[weight.name], weight.parts[index].tensor_shape)
        for name, ((weight, index), *_) in parts.items()
    ]
    tensors += [HFTensor(name, recorded[name], tuple(kept.view.shape)) for name, kept in unused.items()]
    files = arrange_as(layout, tensors) if layout else arrange(tensors)
    outputs = [_output(file, parts, weights, unused) for file in files]
    if len(files) > 1 or (layout and layout.indexed):
        entries = {tensor.name: Entry(file.name, tensor.nbytes) for file in files for tensor in file.tensors}
        outputs.append(OutputFile(INDEX, (index_text(entries).encode(),)))
    outputs += other_files(folder, arch, whole=keep_unused)
    left_out = len(weights.skipped)
    record = partial(certificate.text, direction="mcore-to-hf", source=checkpoint, weights=weights, left_out=left_out)
    plan = FilePlan(tuple(outputs), _sources(outputs, weights), (certificate.NAME, record))
    dtypes = {name: DTYPES[kind] for name, kind in kinds.items()}
    mtp_layers = arch.mtp_layers if keep_unused else 0
    return Export(replace(arch, mtp_layers=mtp_layers), weights, dtypes, files, plan)


def _unused(folder: Path | None, arch: Architecture) -> dict[str, KeptTensor]:
    """The tensors of a Hugging Face folder that are no weights of the model. Raises UserError where it has no files."""
    if folder is None or not has_weights(folder):
        raise UserError(
            "--keep-unused copies tensors that no checkpoint holds; name the folder with the model's published "
            "safetensors files by --hf"
        )
    reader, kept = HFReader(folder), {}
    for name in sorted({*reader.names} - hf_shapes(weight_map(arch)).keys()):
        kind, path = reader.dtype(name), folder / reader.file_of[name]
        if kind not in DTYPES:
            raise UserError(f"{name} in {path} has the type {kind}; only {', '.join(DTYPES)} can be kept")
        kept[name] = KeptTensor(name, path, reader.view(Part(name, reader.shape(name))))
    return kept


def _published_layout(folder: Path, arch: Architecture, unused: Mapping[str, KeptTensor]) -> ShardLayout | None:
    """The files of a Hugging Face folder, with the weights of the model and what is unused and kept; None where it
    holds no weights, UserError if they are not of this model."""
    if not has_weights(folder):
        return None
    reader = HFReader(folder)
    check(reader, arch)
    return ShardLayout.of(reader, hf_shapes(weight_map(arch)).keys() | unused.keys())


def _kinds(
    arch: Architecture,
    weights: CheckpointWeights,
    kept: Mapping[str, str],
    untrained: Mapping[str, str],
    converted: bool,
) -> dict[str, str]:
    """The safetensors type that each weight is written as, by its name.

    kept, untrained: types by the names of tensors, where there are published files; of weights that are not trained.
    converted: the checkpoint was, and was not trained since; a weight's type is its own.
    """
    kinds = {}
    for weight in weight_map(arch):
        name = weight.parts[0].tensor
        if not weight.trained:
            kinds[weight.name] = untrained.get(name, "F32")
        elif converted and kept:
            kinds[weight.name] = _TYPES[weights.dtype(weight)]
        else:
            kinds[weight.name] = kept.get(name, _TYPES[arch.torch_dtype])
    return kinds


def _output(
    file: HFFile,
    parts: Mapping[str, Sequence[tuple[Weight, int]]],
    weights: CheckpointWeights,
    unused: Mapping[str, KeptTensor],
) -> OutputFile:
    contents: list[Content] = [file.header()]
    for tensor in file.tensors:
        if tensor.name in unused:
            contents.append(unused[tensor.name])
            continue
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
