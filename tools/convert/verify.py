"""Verify a conversion (`--verify`): read it back and compare it with its source, by every tensor and by the logits.

A conversion that passes gets a certificate: `conversion.json` in its folder, with `"verified": true`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from isoloss.models.conversion import certificate
from isoloss.models.conversion.hashed_file import write_whole
from isoloss.models.conversion.mcore_to_hf import Export
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.manifest import FileRecord
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.convert.verify_logits import LogitsEvidence, compare_logits
from isoloss.tools.convert.verify_models import Rounded, Unverified
from isoloss.tools.convert.verify_tensors import TensorEvidence, compare_tensors


def verify_export(export: Export, out: Path) -> LogitsEvidence:
    """Certify the Hugging Face folder `out`. Raises Unverified; then there is no certificate."""
    try:
        record = json.loads((out / certificate.NAME).read_text(encoding="utf-8"))
        check_files(out, manifest.files_from_json(record["files"]))
        arch = read_architecture(out)
        if arch != export.arch:
            raise Unverified(f"{out}/config.json describes another model than the checkpoint's")
        tensors = compare_tensors(arch, export.weights, out, "hf")
        _check_layout(export, out)
        logits = compare_logits(arch, Rounded(export.weights, export.dtypes), out)
    except UserError as error:
        raise Unverified(str(error)) from error
    _certify(out, record, tensors, logits)
    return logits


def verify_import(hf: Path, checkpoint: Path, dtype: torch.dtype | None) -> LogitsEvidence:
    """Certify the checkpoint that was made of a Hugging Face folder. Raise Unverified instead of a certificate.

    dtype: the type that the weights were rounded to, if they were.
    """
    try:
        written = manifest.read(checkpoint)
        manifest.check_checksums(checkpoint, written, shown=True)
        arch = read_architecture(checkpoint)
        weights = CheckpointWeights(checkpoint, arch)
        published = replace(arch, mtp_layers=read_architecture(hf).mtp_layers)  # `hf` may hold layers that are left out
        tensors = compare_tensors(published, weights, hf, "checkpoint")
        logits = compare_logits(arch, weights, hf, dtype)
    except UserError as error:
        raise Unverified(str(error)) from error
    files = {**written.files, manifest.NAME: _file_record(checkpoint / manifest.NAME)}
    left_out = len(HFReader(hf).names) - len(hf_shapes(weight_map(arch)))
    text = certificate.text(files, direction="hf-to-mcore", source=hf, weights=weights, left_out=left_out)
    _certify(checkpoint, json.loads(text), tensors, logits)
    return logits


def _certify(folder: Path, record: Mapping[str, Any], tensors: TensorEvidence, logits: LogitsEvidence) -> None:
    """Replace the record of a conversion by its certificate, at once."""
    fields = {**record, "verified": True, "tensors_compared": asdict(tensors), "logits_compared": asdict(logits)}
    partial = folder / f".{certificate.NAME}.partial"
    write_whole(partial, (json.dumps(fields, indent=2) + "\n").encode())
    partial.rename(folder / certificate.NAME)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise Unverified unless the folder holds these files, with the bytes that were written, and no others."""
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(present ^ files.keys() - {certificate.NAME}):
        if name != certificate.NAME:
            raise Unverified(f"{folder / name} {'was not written' if name in present else 'is missing'}")
    for name, record in files.items():
        found = _file_record(folder / name)
        if found != record:
            raise Unverified(f"{folder / name} holds other bytes than were written (CRC-32 {found.crc32})")


def _check_layout(export: Export, out: Path) -> None:
    """Raise Unverified unless the headers are the planned ones: each tensor in its file, at its place, of its type."""
    for file in export.files:
        header = file.header()
        with (out / file.name).open("rb") as written:
            if written.read(len(header)) != header:
                raise Unverified(f"{out / file.name} has another header than was planned")


def _file_record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, manifest.crc32(path))
