"""Stubs for CUDA, with which unmodified Megatron-Core runs on a machine without a GPU, over gloo.

Megatron-Core names CUDA directly: it asks `torch.cuda` for the current device, streams, events and RNG states, creates
tensors with `device="cuda"`, and its distributed optimizer compares `Tensor.type()` with 'torch.cuda.FloatTensor'.
`install()` redirects these calls to the CPU. It must run before the first `import megatron`, because Megatron binds
some of these names at import; importing `isoloss.parallel` ensures this. On a machine with a GPU it changes nothing.

A dry run redirects CUDA to a device whose tensors have shapes and no values instead of the CPU (`stand_in`).
"""

# A stub replaces an attribute by one of another type.
# pyright: reportAttributeAccessIssue=false

import contextlib
import functools

import torch
from torch.utils._device import _device_constructors

_device = torch.device("cpu")  # the device to which CUDA is redirected
# All factory functions to which Megatron-Core passes device="cuda" or a CUDA device object.
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like",
              "ones_like", "full_like", "empty_strided", "as_tensor", "eye", "linspace")  # fmt: skip


class _Stream:
    """A stream or an event on a device that runs in program order, so that every wait returns at once."""

    def __init__(self, *args, **kwargs):
        del args, kwargs

    def _done(self, *args, **kwargs):
        del args, kwargs

    synchronize = wait_stream = wait_event = record = wait = _done

    def record_event(self, *args):
        del args
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        del other
        return 0.0


class _Generators:
    """A stub for `torch.cuda.default_generators` with the CPU's generator for every device."""

    def __getitem__(self, index):
        del index
        return torch.default_generator


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _tensor_type(original):
    """Return a `Tensor.type()` with the CUDA names that the distributed optimizer expects; conversions still work."""

    def type_(self, *args, **kwargs):
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(torch.empty(0, dtype=self.dtype)).replace("torch.", "torch.cuda.", 1)

    return type_


def _with_listed_splits(all_to_all_single):
    """Convert split sizes to lists, which Megatron's token dispatcher does only for tensors on a GPU."""

    @functools.wraps(all_to_all_single)
    def wrapped(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        splits = (s.tolist() if torch.is_tensor(s) else s for s in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *splits, **kwargs)

    return wrapped


def _with_uneven_shares(all_gather):
    """Gather shares of different lengths by an all-to-all, for expert TP ranks with different numbers of tokens.

    NCCL's all-gather accepts such shares. That of gloo requires equal shapes, but its all-to-all does not.
    """

    @functools.wraps(all_gather)
    def wrapped(tensor_list, tensor, group=None, **kwargs):
        rows = [share.shape[0] for share in tensor_list if share.ndim]
        if len(set(rows)) <= 1:
            return all_gather(tensor_list, tensor, group=group, **kwargs)
        gathered = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        everyone = torch.cat([tensor] * len(rows))
        torch.distributed.all_to_all_single(gathered, everyone, rows, [tensor.shape[0]] * len(rows), group=group)
        for share, part in zip(tensor_list, gathered.split(rows)):
            share.copy_(part)
        return None

    return wrapped


def _with_uneven_sums(reduce_scatter):
    """Sum and scatter shares of different lengths: the backward of `_with_uneven_shares`."""

    @functools.wraps(reduce_scatter)
    def wrapped(output, input_list, *args, group=None, **kwargs):
        rows = [share.shape[0] for share in input_list]
        if len(set(rows)) <= 1:
            return reduce_scatter(output, input_list, *args, group=group, **kwargs)
        parts = output.new_empty((len(rows) * output.shape[0], *output.shape[1:]))
        own_rows = [output.shape[0]] * len(rows)
        torch.distributed.all_to_all_single(parts, torch.cat(input_list), own_rows, rows, group=group)
        return output.copy_(parts.unflatten(0, (len(rows), output.shape[0])).sum(0))

    return wrapped


def stand_in(device: torch.device) -> None:
    """Redirect CUDA to `device` from now on. Raises ValueError in a process that sees a GPU."""
    global _device
    if not install():
        raise ValueError("a process that sees a GPU cannot run on another device: set CUDA_VISIBLE_DEVICES=")
    _device = device


@functools.cache
def install() -> bool:
    """Install the stubs, once, if this process has no GPU. Returns True if they are active."""
    if torch.cuda.is_available():
        return False
    cuda = torch.cuda
    cuda.current_device = lambda: _device
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = cuda.ipc_collect = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *args, **kwargs: 0
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda callback, **kwargs: callback()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # `with torch.device(...)` identifies factories by a list that it makes at its first use. The list must contain the
    # original functions, which the stubs call. Else transformers, which builds models on the meta device, leaves some
    # buffers (rotary frequencies) uninitialized.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(_device)
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self.to(_device)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.type = _tensor_type(torch.Tensor.type)
    torch.distributed.all_to_all_single = _with_listed_splits(torch.distributed.all_to_all_single)
    torch.distributed.all_gather = _with_uneven_shares(torch.distributed.all_gather)
    torch.distributed.reduce_scatter = _with_uneven_sums(torch.distributed.reduce_scatter)
    return True
