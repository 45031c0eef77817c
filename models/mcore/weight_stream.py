"""All weights of a model that is spread over ranks, whole and by Hugging Face name, as a stream of buckets."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import gather_objects

Named = tuple[str, Tensor]
Receives = Literal["every rank", "rank 0", "owner"]
ALIGNMENT = 16  # bytes; a tensor of any type can then be a view of the bytes that travelled
# SGLang makes one matrix of q_a_proj and kv_a_proj_with_mqa. If they do not come in one call, it keeps the old one.
_LATENT = re.compile(r"\.(q|kv)_[ab]_(proj|layernorm)")


@dataclass(frozen=True)
class Label:
    """The description of a tensor that a receiver needs before the bytes arrive."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stream_weights(
    tensors: Iterator[tuple[str, Tensor, bool]], device: torch.device, bucket_bytes: int, receives: Receives
) -> Iterator[list[Named]]:
    """Yield every Hugging Face tensor of the model once, whole, in buckets of at most `bucket_bytes`, or one tensor.
    A layer's latent attention is never parted: its bucket may be larger by that much.

    tensors: names and tensors of this rank, each with a flag: this rank sends it (`hf_tensors`).
    Every rank gets as many buckets: the same ones; or those that one rank receives, rank 0 or the one that has the
    tensors, and empty ones elsewhere. Tensors are on `device`, and to be read before the next bucket is asked for: they
    may be the parameters themselves. A rank holds three buckets at most: what it has to send, the one under way, and
    the one that the caller has not let go of.
    Collective over the world and over the groups of `tensors`: all ranks must iterate to the end. In each round the
    ranks exchange labels of their tensors (one all-gather), and each rank that has some sends them (one broadcast, or
    one message to rank 0, or with receives="owner" nothing).
    """
    rank = dist.get_rank()
    for mine in _rounds(tensors, bucket_bytes):
        labels = [Label(name, tuple(tensor.shape), tensor.dtype) for name, tensor in mine or ()]
        everyone = gather_objects(None if mine is None else labels)
        if all(rank_labels is None for rank_labels in everyone):
            return
        for source, rank_labels in enumerate(everyone):
            if rank_labels:
                yield _travel(mine if source == rank else None, rank_labels, source, receives, device)


def _rounds(tensors: Iterator[tuple[str, Tensor, bool]], bucket_bytes: int) -> Iterator[list[Named] | None]:
    """Yield the bucket that this rank sends in each round, then None for ever.

    Cut by the sizes of all tensors that pass, this rank's or not: the ranks of a stage see tensors of the same sizes in
    the same order, so they all stop at the same one and none waits for another inside of `hf_tensors`.
    """
    bucket: list[Named] = []
    nbytes, before = 0, ""
    for name, tensor, mine in tensors:
        go_together = _LATENT.search(before) and _LATENT.search(name)  # of one layer: others stand between two layers'
        if nbytes and nbytes + tensor.nbytes > bucket_bytes and not go_together:
            yield bucket
            bucket, nbytes = [], 0
        nbytes, before = nbytes + tensor.nbytes, name
        if mine:
            bucket.append((name, tensor))
    yield bucket
    while True:
        yield None


def _travel(
    mine: list[Named] | None, labels: Sequence[Label], source: int, receives: Receives, device: torch.device
) -> list[Named]:
    """The bucket of rank `source` (there: `mine`) on every rank, or on the one that receives it and empty elsewhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1 or receives == "owner" or (receives == "rank 0" and source == 0):
        return mine or []
    if receives == "rank 0" and rank not in (0, source):
        return []
    flat = torch.empty(sum(_padded(label.nbytes) for label in labels), dtype=torch.uint8, device=device)
    views = list(_views(flat, labels))
    for (_, there), (_, tensor) in zip(views, mine or ()):
        there.copy_(tensor)
    if receives == "every rank":
        dist.broadcast(flat, src=source)
        return views
    # As a batch, though it is one message: of single ones NCCL makes a communicator for each pair of ranks.
    message = dist.P2POp(dist.isend, flat, 0) if rank == source else dist.P2POp(dist.irecv, flat, source)
    for work in dist.batch_isend_irecv([message]):
        work.wait()
    return [] if rank == source else views


def _views(flat: Tensor, labels: Sequence[Label]) -> Iterator[Named]:
    """The tensors in a buffer of bytes."""
    start = 0
    for label in labels:
        yield label.name, flat[start : start + label.nbytes].view(label.dtype).view(label.shape)
        start += _padded(label.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
