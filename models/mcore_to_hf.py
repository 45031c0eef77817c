"""A checkpoint into a Hugging Face folder: the plan, made from names, shapes and types alone.

Each weight of the model is in the checkpoint once, and each Hugging Face tensor is written once, by copying the bytes
of the one to the places of the other; no tensor is ever built.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isoloss.models import certificate, manifest
from isoloss.models.architecture import Architecture
from isoloss.models.checkpoint_hf import INDEX, config_text, sidecars
from isoloss.models.checkpoint_read import CheckpointWeights
from isoloss.models.hf_files import HFFile, HFTensor, arrange, index_text
from isoloss.models.manifest import FileRecord
from isoloss.models.registry import hf_folder, read_architecture
from isoloss.models.transfer import OutputFile, Plan, Source
from isoloss.models.transfer_worker import Literal, Run, Segment
from isoloss.models.weight_segments import WeightRows
from isoloss.models.weights import Weight, weight_map
from isoloss.parallel.errors import UserError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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

    hf: where config.json and the tokenizer are; default the checkpoint's own. dtype: "fp32", "bf16" or "fp16"; default
    the one of config.json. Raises UserError where checkpoint and config.json do not belong together.
    """
    checkpoint, folder = Path(checkpoint), Path(hf) if hf else hf_folder(checkpoint)
    arch = read_architecture(folder)
    arch = replace(arch, dtype=DTYPES[dtype]) if dtype else arch
    weights = CheckpointWeights(checkpoint, arch)
    parts = _parts(weight_map(arch))
    tensors = [_tensor(name, members, arch) for name, members in parts.items()]
    files = arrange(tensors, _recorded_files(folder, parts))
    rows = {weight.name: WeightRows(weights, weight) for weight in weight_map(arch)}
    outputs = [_output(file, parts, rows) for file in files]
    if len(files) > 1:
        outputs.append(OutputFile(INDEX, (Literal(index_text(files).encode()),)))
    outputs.append(OutputFile("config.json", (Literal(config_text(folder, arch).encode()),)))
    outputs += [OutputFile(name, (_whole_file(folder / name),)) for name in sidecars(folder)]
    plan = Plan(
        tuple(outputs),
        _sources(outputs, checkpoint, folder),
        (certificate.NAME, lambda records: _record(checkpoint, weights, files, records)),
    )
    dtype_of = {tensor.name: tensor.dtype for tensor in tensors}
    dtypes = {weight.name: dtype_of[weight.parts[0].tensor] for weight in weight_map(arch)}
    return Export(replace(arch, mtp_layers=0), weights, dtypes, files, plan)


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


def _tensor(name: str, members: Sequence[Member], arch: Architecture) -> HFTensor:
    weight = members[0].weight
    dtype = arch.torch_dtype if weight.trained else torch.float32
    return HFTensor(name, dtype, weight.parts[members[0].index].tensor_shape)


def _output(file: HFFile, parts: Mapping[str, Sequence[Member]], rows: Mapping[str, WeightRows]) -> OutputFile:
    segments: list[Segment] = [Literal(file.header())]
    for tensor in file.tensors:
        own = [
            part for member in parts[tensor.name] for part in rows[member.weight.name].part(member.index, tensor.dtype)
        ]
        assert sum(segment.nbytes for segment in own) == tensor.nbytes, tensor.name
        segments += own
    return OutputFile(file.name, tuple(segments))


def _whole_file(path: Path) -> Run:
    return Run(str(path), 0, path.stat().st_size)


def _recorded_files(folder: Path, tensors: Mapping[str, object]) -> dict[str, str] | None:
    """The file of each tensor as the model was published, or None where that is not known."""
    if not (folder / INDEX).is_file():
        return None
    try:
        file_of = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / INDEX} is not a safetensors index ({error!r}); copy it again") from None
    missing = [name for name in tensors if name not in file_of]
    if missing:
        raise UserError(
            f"{folder / INDEX} does not name {missing[0]} ({len(missing)} such), which the model of its config.json "
            "has; the two do not belong together"
        )
    return {name: str(file_of[name]) for name in tensors}


def _sources(outputs: Sequence[OutputFile], checkpoint: Path, folder: Path) -> tuple[Source, ...]:
    """Every file that is read, with the checksum that the checkpoint's manifest has for it."""
    known: Mapping[str, FileRecord] = {}
    if (checkpoint / manifest.NAME).is_file():
        known = manifest.read(checkpoint).files
    paths = dict.fromkeys(path for output in outputs for segment in output.segments for path in segment.paths)
    sums = {str(checkpoint / name): record.sha256 for name, record in known.items()}
    return tuple(Source(path, sums.get(path), "copy the checkpoint again") for path in paths)


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
