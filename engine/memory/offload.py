"""Offload tensors from their device, so that its memory is free for other uses, and onload them again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 28  # bytes of a pinned buffer: PyTorch rounds the size of pinned memory up to a power of two
ALIGNMENT = 512  # bytes: a storage begins at a multiple of it in host memory


@dataclass(frozen=True)
class _Absent:
    """An offloaded storage. bytes_: tensor over the whole storage, empty until it is onloaded. start, stop: its place
    in host memory; equal for a storage that is onloaded as zeros."""

    bytes_: Tensor
    nbytes: int
    start: int
    stop: int


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate a tensor like each of the tensors in pinned host memory; small ones share a buffer."""
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
    """Offloads and onloads tensors of one device as whole storages: every view keeps its shape and place, has no memory
    in between, and has its values again afterwards.

    kept: function that returns tensors whose values are kept in pinned host memory, which later calls reuse.
    zeroed: function that returns tensors that are onloaded as zeros.
    device: the device; tensors on another one stay there.
    """

    def __init__(
        self,
        device: torch.device,
        kept: Callable[[], Iterable[Tensor]],
        zeroed: Callable[[], Iterable[Tensor]] = tuple,
    ):
        self._device, self._kept, self._zeroed = device, kept, zeroed
        self._absent: list[_Absent] = []  # in the order of offloading, which is that of their places
        self._host: list[Tensor] = []

    def leave(self) -> None:
        """Free the device memory of the tensors, and the memory that PyTorch keeps in reserve.

        A failure on the way loses nothing: an offloaded storage can be onloaded, and any other is unchanged. A storage
        that was onloaded in part is offloaded again; its first place in host memory, which is whole, is read last.
        """
        leaving = []
        end = self._absent[-1].stop if self._absent else 0
        for bytes_ in self._storages(self._kept()):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + bytes_.nbytes
            leaving.append(_Absent(bytes_, bytes_.nbytes, start, end))
        leaving += [_Absent(bytes_, bytes_.nbytes, end, end) for bytes_ in self._storages(self._zeroed())]
        self._reserve(end)
        torch.cuda.synchronize()  # other streams may still use these storages
        for each in leaving:
            for there, here in self._pieces(each):
                there.copy_(here, non_blocking=True)
            self._absent.append(each)
            each.bytes_.untyped_storage().resize_(0)
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # memory of this process that other processes mapped and have released
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Copy offloaded storages to the device. After a failure on the way, another call goes on from there."""
        while self._absent:
            each = self._absent[-1]
            each.bytes_.untyped_storage().resize_(each.nbytes)
            for there, here in self._pieces(each):
                here.copy_(there, non_blocking=True)
            if each.start == each.stop:
                each.bytes_.zero_()
            self._absent.pop()

    def _storages(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the bytes of each storage of the tensors, once, if it is on the device and not offloaded."""
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
        """Yield pieces of a storage, cut where a chunk of host memory ends: on the host and on the device."""
        start = each.start
        while start < each.stop:
            chunk, offset = divmod(start, CHUNK)
            size = min(CHUNK - offset, each.stop - start)
            here = each.bytes_[start - each.start :][:size]
            yield self._host[chunk][offset : offset + size], here
            start += size
