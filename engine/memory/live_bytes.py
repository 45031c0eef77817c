"""Count the bytes of tensors that are live on a device, op by op, where tensors have shapes and no values."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ALLOCATION = 512  # bytes: PyTorch's caching allocator rounds up to it
LARGEST_HOST_COPY = 1 << 20  # bytes that a copy to the host really takes there


class LiveBytes(TorchDispatchMode):
    """Counts the storages of one type of device while their tensors live. The numbers that the host asks of the device
    are made up.

    device_type: type of the device whose tensors are counted; tensors of other devices, the host's, are not.
    live_bytes: bytes that are live now.
    levels: `live_bytes` after each change, in order, since the caller last cleared it.
    share_selected: share of a mask that `masked_select` finds.
    fake: the mode in which the device's tensors are made.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self.live_bytes, self.levels = 0, list[int]()
        self.share_selected = 1.0
        self.fake: contextlib.AbstractContextManager = contextlib.nullcontext()
        self._device_type = device_type
        self._live: dict[int, tuple[weakref.ref, int]] = {}  # storage -> itself, bytes
        self._within_kernel = False

    # ---- what a subclass may record ----------------------------------------------------------------------------------

    def wait(self, kind: str, tensor: Tensor | None = None) -> None:
        """Record a wait of the host for the device, if the tensor is on the device."""

    def pin(self, tensor: Tensor) -> None:
        """Record that a tensor of the host is in pinned memory, from which copies to the device need no wait."""

    def _ran(self, func: Any, args: Any, kwargs: Any, out: Any, given: Sequence[Tensor]) -> None:
        """Record an op. given: tensors of the device among its results."""

    def _ran_kernel(self, name: str, args: Any, out: Any) -> None:
        """Record a kernel that ran in place of the ops of a function."""

    def _changed(self, key: int, nbytes: int) -> None:
        """Record a change of a storage by `nbytes`."""

    def _exchanged(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Record a collective. Return the arguments with which it goes on."""
        return args

    def _item(self, tensor: Tensor) -> float | int | bool:
        return made_up(tensor.dtype)

    def _goes_alone(self, args: Sequence[Any], kwargs: Mapping, host: Tensor) -> bool:
        """Return whether a copy between host and device needs no wait."""
        del args, kwargs, host
        return False

    def _given(self, func: Any, out: Any) -> list[Tensor]:
        """Return the tensors of the device among the results of an op."""
        del func
        return [tensor for tensor in tensors_in(out) if self.counts(tensor)]

    # ---- storages ----------------------------------------------------------------------------------------------------

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live_from_now(storage)
            self.resized(storage, storage.nbytes())

    def _live_from_now(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._live[key] = (weakref.ref(storage, lambda reference: self._forget(key, reference)), 0)

    def _forget(self, key: int, reference: weakref.ref) -> None:
        if key in self._live and self._live[key][0] is reference:
            self._resize(key, 0)
            del self._live[key]

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a live storage another size: so Megatron frees what it computes again."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, nbytes)

    def _resize(self, key: int, nbytes: int) -> None:
        reference, before = self._live[key]
        nbytes = -(-nbytes // ALLOCATION) * ALLOCATION
        self._live[key] = (reference, nbytes)
        self.live_bytes += nbytes - before
        self.levels.append(self.live_bytes)
        self._changed(key, nbytes - before)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping | None = None):
        del types
        kwargs = kwargs or {}
        if func.namespace == "prim" or self._within_kernel:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            args = self._exchanged(func, args)
            # Those that are coalesced have no kernel for tensors without values.
            return FakeWork().boxed() if "coalesced" in str(func) else func(*args, **kwargs)
        answered, out = self._answer(func, args, kwargs)
        if answered:
            return out
        given = self._given(func, out)
        self._ran(func, args, kwargs, out, given)
        for tensor in given:
            self.track(tensor)
        return out

    def _answer(self, func: Any, args: Sequence[Any], kwargs: Mapping) -> tuple[bool, Any]:
        """Return whether an op's result is made up for the host, so that nothing is to be counted, and the result."""
        if func is aten._local_scalar_dense.default and self.has_no_value(args[0]):
            self.wait("item", args[0])
            return True, self._item(args[0])
        if func is aten.equal.default and self.has_no_value(args[0]):
            self.wait("equal", args[0])
            return True, True
        if func is aten._to_copy.default and self.counts(args[0]) and _asks_for_host(kwargs):
            self.wait("to the host")
            return True, self._host_copy(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and self.counts(args[1]) and not self.has_no_value(args[0]):
            if not self._goes_alone(args, kwargs, args[0]):
                self.wait("to the host")
            return True, args[0]  # with what was there before
        if func is aten.masked_select.default and self.counts(args[0]):
            return False, args[0].new_empty(round(args[1].numel() * self.share_selected))
        if func is aten._to_copy.default and self._asks_for_device(args[0], kwargs):
            with self.fake:
                return False, torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=kwargs["device"])
        if func is aten.addmm.dtype_out and self.counts(args[0]):
            return False, kwargs["out"]  # torch 2.11 takes its arguments for others where tensors have no values
        if func is aten.nonzero.default and self.counts(args[0]):
            return False, args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return False, self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping) -> Any:
        return func(*args, **kwargs)

    def one_kernel(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run what a compiler makes one kernel of: it reads its arguments, writes its results, and keeps no others."""
        self._within_kernel = True
        out = function(*args)
        self._within_kernel = False
        self._ran_kernel(function.__name__, args, out)
        for tensor in tensors_in(out):
            self.track(tensor)
        return out

    def _host_copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a copy up; a large one has no values either, and is not counted. It stays where it was, so nobody sees
        when it meets tensors of the device: the models of a lint are small."""
        if tensor.nbytes <= LARGEST_HOST_COPY:
            return torch.full(tensor.shape, made_up(dtype), dtype=dtype)
        copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        self._live_from_now(copy.untyped_storage())
        return copy

    def _asks_for_device(self, tensor: Tensor, kwargs: Mapping) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type and not self.has_no_value(tensor)

    def has_no_value(self, tensor: Tensor) -> bool:
        return self.counts(tensor) or isinstance(tensor, FakeTensor)

    def counts(self, tensor: Tensor) -> bool:
        """Return whether this is a tensor of the device."""
        return tensor.device.type == self._device_type


def tensors_in(results: Any) -> Iterator[Tensor]:
    """Yield the tensors among the results of an op: faster than torch's trees, for what every op gives."""
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, tuple | list):
        for result in results:
            yield from tensors_in(result)


def _asks_for_host(kwargs: Mapping) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def made_up(dtype: torch.dtype) -> float | int | bool:
    """Return a number for the host, which asks a tensor without values for one."""
    return 2.0 if dtype.is_floating_point else True if dtype == torch.bool else 2
