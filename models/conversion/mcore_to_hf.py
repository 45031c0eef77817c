"""A checkpoint into a Hugging Face folder: the plan, made from names, shapes and types alone.

Each weight of the model is in the checkpoint once, and each Hugging Face tensor is written once, by copying the bytes
of the one to the places of the other; no tensor is ever built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from isoloss.models.architecture import Architecture
from isoloss.models.conversion import certificate
from isoloss.models.conversion.hf_files import HFFile, HFTensor, arrange, arrange_as, index_text
from isoloss.models.conversion.safetensors_header import DTYPES, read_header
from isoloss.models.conversion.segments import Literal, Run, Segment
from isoloss.models.conversion.shard_layout import ShardLayout, read_shard_layout, shard_layout
from isoloss.models.conversion.transfer import OutputFile, Plan, Source
from isoloss.models.conversion.weight_segments import WeightRows
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, HFReader, check, config_text, sidecars
from isoloss.models.weights.manifest import FileRecord
from isoloss.models.weights.weight_map import Weight, hf_shapes, weight_map

_TYPES = {getattr(torch, name): kind for kind, name in DTYPES.items()}


@dataclass(frozen=True)
class Export:
    """arch: of the folder that is written. dtypes: what each weight is written as, by its name."""

    arch: Architecture
    weights: CheckpointWeights
    dtypes: Mapping[str, torch.dtype]
    files: tuple[HFFile, ...]
    plan: Plan


def plan_export(checkpoint: str | Path, hf: str | Path | None = None, dtype: str | None = None) -> Export:
    """What turns `checkpoint` into a Hugging Face folder.

    hf: where config.json and the tokenizer are, and perhaps the files whose names are wanted; default the checkpoint's
    own. dtype: name of a torch dtype for the weights; default the one of config.json, or for a checkpoint that was
    converted each weight's own. Weights that are not trained (the experts' selection bias) keep theirs.
    Raises UserError where checkpoint and config.json do not belong together.
    """
    checkpoint, folder = Path(checkpoint), Path(hf) if hf else hf_folder(checkpoint)
    arch = read_architecture(folder)
    arch = replace(arch, dtype=dtype) if dtype else arch
    weights = CheckpointWeights(checkpoint, arch)
    layout = _published_layout(folder, arch) if hf else read_shard_layout(checkpoint)
    parts = _parts(weight_map(arch))
    kinds = _kinds(arch, weights, layout, keep=dtype is None and hf is None and layout is not None)
    tensors = [_tensor(name, members[0], kinds) for name, members in parts.items()]
    files = arrange_as(layout, tensors) if layout else arrange(tensors)
    rows = {weight.name: WeightRows(weights, weight) for weight in weight_map(arch)}
    outputs = [_output(file, parts, rows) for file in files]
    if len(files) > 1 or (layout and layout.indexed):
        outputs.append(OutputFile(INDEX, (Literal(index_text(files).encode()),)))
    outputs.append(OutputFile("config.json", (Literal(config_text(folder, arch).encode()),)))
    outputs += [
        OutputFile(name, (Run(str(folder / name), 0, (folder / name).stat().st_size),)) for name in sidecars(folder)
    ]
    record = partial(_record, checkpoint, weights, files)
    plan = Plan(tuple(outputs), _sources(outputs, checkpoint, list(rows.values())), (certificate.NAME, record))
    dtypes = {name: getattr(torch, DTYPES[kind]) for name, kind in kinds.items()}
    return Export(replace(arch, mtp_layers=0), weights, dtypes, files, plan)


def _published_layout(folder: Path, arch: Architecture) -> ShardLayout | None:
    """The files of a Hugging Face folder, None where it holds no weights; UserError if they are not of this model."""
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return None
    reader = HFReader(folder)
    check(reader, arch)
    headers = {file: read_header(folder / file) for file in dict.fromkeys(reader.file_of.values())}
    return shard_layout(headers, hf_shapes(weight_map(arch)).keys(), (folder / INDEX).is_file())


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


@dataclass(frozen=True)
class Member:
    """A weight and which of its parts is (a row of) a Hugging Face tensor."""

    weight: Weight
    index: int


def _parts(weights: Sequence[Weight]) -> dict[str, list[Member]]:
    """Hugging Face tensors in the order of the map, and what each consists of, row by row."""
    found: dict[str, dict[int, Member]] = {}
    for weight in weights:
        for index, part in enumerate(weight.parts):
            rows = found.setdefault(part.tensor, {})
            if (part.row or 0) in rows:
                raise ValueError(f"{part.tensor} would be written twice, from {weight.name} too")
            rows[part.row or 0] = Member(weight, index)
    for name, rows in found.items():
        part = rows[min(rows)].weight.parts[rows[min(rows)].index]
        if sorted(rows) != list(range(part.rows or 1)):
            raise ValueError(f"{name} would be written in part only: rows {sorted(rows)} of {part.rows}")
    return {name: [rows[row] for row in sorted(rows)] for name, rows in found.items()}


def _tensor(name: str, member: Member, kinds: Mapping[str, str]) -> HFTensor:
    return HFTensor(name, kinds[member.weight.name], member.weight.parts[member.index].tensor_shape)


def _output(file: HFFile, parts: Mapping[str, Sequence[Member]], rows: Mapping[str, WeightRows]) -> OutputFile:
    segments: list[Segment] = [Literal(file.header())]
    for tensor in file.tensors:
        dtype = getattr(torch, DTYPES[tensor.dtype])
        own = [part for member in parts[tensor.name] for part in rows[member.weight.name].part(member.index, dtype)]
        assert sum(segment.nbytes for segment in own) == tensor.nbytes, tensor.name
        segments += own
    return OutputFile(file.name, tuple(segments))


def _sources(outputs: Sequence[OutputFile], checkpoint: Path, rows: Sequence[WeightRows]) -> tuple[Source, ...]:
    """Every file that is read; with the checksum of the checkpoint's manifest, unless its tensors have their own: a
    training checkpoint is mostly optimizer state, which need not be read."""
    known: Mapping[str, FileRecord] = {}
    if (checkpoint / manifest.NAME).is_file():
        known = manifest.read(checkpoint).files
    paths = dict.fromkeys(path for output in outputs for segment in output.segments for path in segment.paths)
    own = {path for of_weight in rows for path in of_weight.checked}
    own -= {path for of_weight in rows for path in of_weight.unchecked}
    sums = {str(checkpoint / name): f"crc32:{record.crc32}" for name, record in known.items()}
    return tuple(Source(path, None if path in own else sums.get(path), "copy the checkpoint again") for path in paths)


def _record(
    checkpoint: Path, weights: CheckpointWeights, files: Sequence[HFFile], records: Mapping[str, FileRecord]
) -> str:
    return certificate.text(
        direction="mcore-to-hf",
        source=checkpoint,
        family=weights.arch.family,
        key_style=weights.style,
        vocab_size=weights.arch.vocab_size,
        padded_vocab=weights.padded_vocab,
        num_tensors={
            "checkpoint": len(weights.keys),
            "weights": len(weight_map(weights.arch)),
            "hugging_face": sum(len(file.tensors) for file in files),
            "left_out": len(weights.skipped),
        },
        files=records,
    )
