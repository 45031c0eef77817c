"""Add an adapter to the model that it is for: a plan of the files of the merged model, tensor by tensor.

Files, tensors and types are those of the model: each adapted matrix becomes W + scale * B A, summed in fp64 and rounded
once, and everything else is copied byte for byte.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from isoloss.models.architecture import Architecture
from isoloss.models.conversion.certificate import NAME, PACKAGES, VERSION
from isoloss.models.conversion.plan import Content, FilePlan, OutputFile, Source, published_checksum
from isoloss.models.conversion.tensors import KeptTensor, Update, UpdatedTensor
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.weight import Part
from isoloss.models.lora.factors import is_turned
from isoloss.models.lora.peft_reader import AdapterFolder, Place
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, HFReader, check
from isoloss.models.weights.manifest import FileRecord, files_to_json
from isoloss.models.weights.mmap import map_file, view
from isoloss.models.weights.side_files import CONFIG, sidecars
from isoloss.models.weights.weight_map import output_name, weight_map
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Merge:
    """A planned merge.

    adapted: names of the model's tensors that an adapter is added to.
    transposed: whether the model's files hold the matrices of experts as [in, out].
    """

    hf: Path
    arch: Architecture
    adapter: AdapterFolder
    adapted: frozenset[str]
    plan: FilePlan

    @property
    def transposed(self) -> bool:
        return self.arch.experts is not None and self.arch.experts.names.stacked == "transposed"


def plan_merge(hf: Path, folder: Path) -> Merge:
    """Plan the merge of the adapter in `folder` into the Hugging Face folder `hf`.

    Raises UserError where the adapter is not one of this model, and as `AdapterFolder`.
    """
    arch, reader = read_architecture(hf), HFReader(hf)
    check(reader, arch)
    adapter = AdapterFolder(folder, arch)
    updates = _updates(adapter, arch)
    files = [_weights_file(reader, file, adapter, updates) for file in dict.fromkeys(reader.file_of.values())]
    index = () if (hf / SINGLE).is_file() else (INDEX,)  # with both, the single file is read
    files += [OutputFile(name, (hf / name,)) for name in (*index, CONFIG, *sidecars(hf))]
    paths = dict.fromkeys(path for file in files for path in file.paths)
    sources = [Source.of(path, *(published_checksum(path) or ())) for path in paths]
    sources.append(Source.of(adapter.config.path))
    record = partial(_record, hf=hf, folder=folder, arch=arch, adapted=len(updates))
    return Merge(hf, arch, adapter, frozenset(updates), FilePlan(tuple(files), tuple(sources), (NAME, record)))


def _updates(adapter: AdapterFolder, arch: Architecture) -> Mapping[str, tuple[Update, ...]]:
    """Return what is added to each tensor of the model's files: one product, or one for each of its rows."""
    found = dict[str, dict[int, Update]]()
    if arch.tie_embeddings and (output_name(arch), None) in adapter.pairs:
        raise UserError(
            f"{adapter.path} adapts {output_name(arch)}, which is the embedding of this model as well, to which the "
            "adapter must not be added: use the adapter as it is, or a model without tie_word_embeddings"
        )
    for weight in weight_map(arch):
        for part in weight.parts:
            place: Place = part.tensor, part.row
            if place in adapter.pairs:
                a, b = (adapter.factor(place, letter) for letter in "AB")
                left, right = (a.T, b.T) if is_turned(weight.mapping) else (b, a)
                update = Update(left, right, adapter.pairs[place].scale)
                found.setdefault(part.tensor, {})[part.row or 0] = update
    return {name: tuple(rows[row] for row in sorted(rows)) for name, rows in found.items()}


def _weights_file(
    reader: HFReader, file: str, adapter: AdapterFolder, updates: Mapping[str, tuple[Update, ...]]
) -> OutputFile:
    """Return a file of the model with the same header, in which some tensors hold other numbers."""
    path = reader.folder / file
    reader.opened(file)  # checks that the header is one
    mapped = map_file(path)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header: dict[str, Any] = json.loads(mapped[8:start])
    entries = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    contents: list[Content] = [bytes(mapped[:start])]
    for name, (low, high) in sorted(entries.items(), key=lambda entry: entry[1]):
        if name in updates:
            whole = reader.view(Part(name, reader.shape(name)))
            contents.append(UpdatedTensor(name, path, adapter.path, whole, updates[name]))
        elif high > low:
            contents.append(KeptTensor(name, path, view(mapped, start + low, torch.uint8, (high - low,))))
    return OutputFile(file, tuple(contents))


def _record(files: Mapping[str, FileRecord], *, hf: Path, folder: Path, arch: Architecture, adapted: int) -> str:
    """Return the record of a merge that nobody has verified yet, as JSON."""
    fields = {
        "format": VERSION, "direction": "merge", "verified": False,
        "versions": {name: version(name) for name in PACKAGES}, "source": str(hf.resolve()),
        "adapter": str(folder.resolve()), "family": arch.family, "num_tensors": {"adapted": adapted},
        "bytes": sum(record.bytes for record in files.values()), "files": files_to_json(files),
    }  # fmt: skip
    return json.dumps(fields, indent=2) + "\n"
