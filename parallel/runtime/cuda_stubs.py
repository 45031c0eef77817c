"""Stubs for CUDA: they let unmodified Megatron-Core run on a machine without a GPU, over gloo.

Megatron-Core names CUDA directly: it asks `torch.cuda` for the current device, streams, events and RNG states, creates
tensors with `device="cuda"`, and its distributed optimizer compares `Tensor.type()` with 'torch.cuda.FloatTensor'.
`install()` gives those calls a CPU meaning. It must run before the first `import megatron`, because Megatron binds some
of these names at import; importing `isoloss.parallel` does that. Where a GPU exists it changes nothing at all.

A dry run lets CUDA mean another device instead of the CPU, one whose tensors have shapes and no values (`stand_in`).
"""

# A stub puts another thing where the type says what stood there.
# pyright: reportAttributeAccessIssue=false

import contextlib
import functools

import torch
from torch.utils._device import _device_constructors

_device = torch.device("cpu")  # what CUDA means
# Every factory function to which Megatron-Core passes device="cuda" or a CUDA device object.
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like",
              "ones_like", "full_like", "empty_strided", "as_tensor", "eye", "linspace")  # fmt: skip


class _Stream:
    """A stream or an event on a device that runs in program order: every wait is already over."""

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
    """`torch.cuda.default_generators`, with one answer for every device."""

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
    """`Tensor.type()` as the distributed optimizer expects it; conversions keep their meaning."""

    def type_(self, *args, **kwargs):
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(torch.empty(0, dtype=self.dtype)).replace("torch.", "torch.cuda.", 1)

    return type_


def _with_listed_splits(all_to_all_single):
    """Megatron's token dispatcher turns split sizes into something that can be iterated over only where they come from
    a GPU."""

    @functools.wraps(all_to_all_single)
    def wrapped(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        splits = (s.tolist() if torch.is_tensor(s) else s for s in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *splits, **kwargs)

    return wrapped


def _with_uneven_shares(all_gather):
    """Expert TP ranks got different numbers of tokens from the others. NCCL gathers those; gloo wants equal shapes, but
    exchanges unequal ones."""

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
    """The backward of `_with_uneven_shares`."""

    @functools.wraps(reduce_scatter)
    def wrapped(output, input_list, *args, group=None, **kwargs):
        rows = [share.shape[0] for share in input_list]
        if len(set(rows)) <= 1:
            return reduce_scatter(output, input_list, *args, group=group, **kwargs)
        parts = output.new_empty((len(rows) * output.shape[0], *output.shape[1:]))
        mine = [output.shape[0]] * len(rows)
        torch.distributed.all_to_all_single(parts, torch.cat(input_list), mine, rows, group=group)
        return output.copy_(parts.unflatten(0, (len(rows), output.shape[0])).sum(0))

    return wrapped


def stand_in(device: torch.device) -> None:
    """From now on CUDA means this device. ValueError where CUDA means itself: hide the GPUs from such a process."""
    global _device
    if not install():
        raise ValueError("a process that sees a GPU cannot run on another device: set CUDA_VISIBLE_DEVICES=")
    _device = device


@functools.cache
def install() -> bool:
    """Install the stand-ins, once, if this process has no GPU. Returns whether they are active."""
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
    # `with torch.device(...)` knows the factories by identity and lists them when it is first used: it must list the
    # originals, which still do the work. Else transformers, which builds models on the meta device, leaves some buffers
    # (rotary frequencies) uninitialised.
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
