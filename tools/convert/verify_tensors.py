"""Check that every tensor of a converted model equals its source, bit for bit.

This is the slow way, which shares none of the conversion's reading and copying: torch.distributed.checkpoint reads the
checkpoint, the safetensors library the Hugging Face folder, and `ParamMapping.merge` makes the one of the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import checkpoint as dcp

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import Vocabulary
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.checkpoint_read import CheckpointWeights, StoredRows
from isoloss.models.weights.hf_checkpoint import HFReader, check
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.tools.convert.verify_models import Unverified

BATCH_BYTES = 2 << 30


@dataclass(frozen=True)
class TensorEvidence:
    """weights, bytes: number and size of the compared weights. hugging_face_tensors: number of their origins."""

    weights: int
    hugging_face_tensors: int
    bytes: int


def compare_tensors(
    arch: Architecture, weights: CheckpointWeights, hf: Path, made: Literal["checkpoint", "hf"]
) -> TensorEvidence:
    """Compare all tensors. made: the side that was made from the other, whose numbers are rounded to its types.

    Raises Unverified, or UserError, naming the tensor that is missing, left over, of another shape, or different.
    """
    reader = HFReader(hf)
    _check_names(reader, arch)
    compared = nbytes = 0
    for batch in _batches(weights, weight_map(arch)):
        stored = {run.stored.key: run.stored for weight in batch for run in weights.stored_rows(weight)}
        state = {key: torch.empty(entry.shape, dtype=entry.dtype) for key, entry in stored.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(weights.folder.path), no_dist=True)
        for weight in batch:
            whole = _whole(weight, weights.stored_rows(weight), state)
            if made == "checkpoint":
                _check_padding(weight, state[weights.stored_rows(weight)[0].stored.key])
            of_hf = reader.whole(weight)
            if made == "hf":
                _compare(weight, whole.to(of_hf.dtype), of_hf)
            else:
                _compare(weight, of_hf.to(whole.dtype), whole)
            compared, nbytes = compared + 1, nbytes + whole.nbytes
    return TensorEvidence(compared, len(hf_shapes(weight_map(arch))), nbytes)


def _check_names(reader: HFReader, arch: Architecture) -> None:
    check(reader, arch)
    for path in sorted(reader.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            strangers = sorted(set(file.keys()) - set(reader.names))
        if strangers:
            raise Unverified(f"{path} holds {strangers[0]}, which the index does not name")


def _batches(weights: CheckpointWeights, all_weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Yield weights whose tensors are loaded together: all parts of the same tensors, up to a size."""
    together: dict[tuple[str, ...], list[Weight]] = {}
    for weight in all_weights:
        together.setdefault(tuple(run.stored.key for run in weights.stored_rows(weight)), []).append(weight)
    batch: list[Weight] = []
    nbytes = 0
    for members in together.values():
        size = sum(torch.Size(run.stored.shape).numel() * 4 for run in weights.stored_rows(members[0]))
        if batch and nbytes + size > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch, nbytes = batch + members, nbytes + size
    yield batch


def _whole(weight: Weight, stored_rows: Sequence[StoredRows], state: dict[str, Tensor]) -> Tensor:
    pieces = [state[run.stored.key][run.index] for run in stored_rows]
    if isinstance(weight.mapping, Vocabulary):
        return pieces[0][: weight.shape[0]]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _check_padding(weight: Weight, stored: Tensor) -> None:
    if isinstance(weight.mapping, Vocabulary) and stored[weight.shape[0] :].any():
        raise Unverified(f"{weight.name}: a row that pads the vocabulary is not zero")


def _compare(weight: Weight, wanted: Tensor, found: Tensor) -> None:
    one, other = (tensor.contiguous().view(torch.uint8) for tensor in (wanted, found))  # NaN is equal to itself here
    if one.shape != other.shape:
        raise Unverified(f"{weight.name} has shape {list(found.shape)} instead of {list(wanted.shape)}")
    if not torch.equal(one, other):
        places = (one != other).nonzero()
        raise Unverified(
            f"{weight.name} ({', '.join(part.tensor for part in weight.parts)}) differs in {len(places):,} bytes, the "
            f"first of them in row {places[0][0]}"
        )
