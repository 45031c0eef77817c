"""Offload tensors from their device, so that its memory is free for other uses, and onload them again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 28  # bytes of pinned memory at a time: PyTorch rounds what it pins up to a power of two
ALIGNMENT = 512  # bytes, of where a storage begins in host memory


@dataclass(frozen=True)
class _Absent:
    """A storage that has left. bytes_: all of it, once it is back. start, stop: its place in host memory, the same
    where it is zeros that come back."""

    bytes_: Tensor
    nbytes: int
    start: int
    stop: int


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for each of the tensors in pinned memory of the host, small ones together."""
    rooms, chunk, end = [], torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if start + tensor.nbytes > chunk.nbytes:
            chunk, start = _pinned(max(CHUNK, tensor.nbytes)), 0
        end = start + tensor.nbytes
        rooms.append(chunk[start:end].view(tensor.dtype).view(tensor.shape))
    return rooms


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Offloader:
    """Tensors of one device. They leave and come back as whole storages: every view keeps its shape and place, has no
    memory in between, and has its values again afterwards.

    kept: names those whose values wait in host memory, which is pinned, and kept for the next time.
    zeroed: names those that come back as zeros.
    device: tensors elsewhere stay where they are.
    """

    def __init__(
        self,
        device: torch.device,
        kept: Callable[[], Iterable[Tensor]],
        zeroed: Callable[[], Iterable[Tensor]] = tuple,
    ):
        self._device, self._kept, self._zeroed = device, kept, zeroed
        self._absent: list[_Absent] = []  # in the order in which they left, which is that of their places
        self._host: list[Tensor] = []

    def leave(self) -> None:
        """Give the memory back to the device, and what PyTorch keeps of it in reserve.

        If it fails on the way nothing is lost: what has left can come back, and what has not is where it was. What came
        back in part leaves a second time, and its first place in host memory, which is whole, is read last.
        """
        leaving = []
        end = self._absent[-1].stop if self._absent else 0
        for bytes_ in self._storages(self._kept()):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + bytes_.nbytes
            leaving.append(_Absent(bytes_, bytes_.nbytes, start, end))
        leaving += [_Absent(bytes_, bytes_.nbytes, end, end) for bytes_ in self._storages(self._zeroed())]
        self._reserve(end)
        torch.cuda.synchronize()  # other streams may still use what leaves
        for each in leaving:
            for there, here in self._pieces(each):
                there.copy_(here, non_blocking=True)
            self._absent.append(each)
            each.bytes_.untyped_storage().resize_(0)
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # what other processes have read of this one's, and let go of
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """To the device, where they have left it. If it fails on the way, another call goes on from there."""
        while self._absent:
            each = self._absent[-1]
            each.bytes_.untyped_storage().resize_(each.nbytes)
            for there, here in self._pieces(each):
                here.copy_(there, non_blocking=True)
            if each.start == each.stop:
                each.bytes_.zero_()
            self._absent.pop()

    def _storages(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The bytes of each storage behind the tensors, once, of those that are there."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes() and storage._cdata not in found:
                elements = storage.nbytes() // tensor.element_size()
                found[storage._cdata] = tensor.data.as_strided((elements,), (1,), 0).view(torch.uint8)
        return list(found.values())

    def _reserve(self, nbytes: int) -> None:
        while len(self._host) * CHUNK < nbytes:
            self._host.append(_pinned(CHUNK))

    def _pieces(self, each: _Absent) -> Iterator[tuple[Tensor, Tensor]]:
        """A storage, cut where a chunk of host memory ends: there and here."""
        start = each.start
        while start < each.stop:
            chunk, offset = divmod(start, CHUNK)
            size = min(CHUNK - offset, each.stop - start)
            here = each.bytes_[start - each.start :][:size]
            yield self._host[chunk][offset : offset + size], here
            start += size
