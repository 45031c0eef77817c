"""Simulate one rank of a world that is not there: its tensors have shapes and no values, its collectives move nothing.

This changes torch, so it needs a process of its own. `kernels` selects which kernels are counted: those that torch
chooses on a GPU, or those of a CPU, with which a real run on this machine can be compared.
"""

# A stand-in need not have the type of the attribute that it replaces.
# pyright: reportAttributeAccessIssue=false

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from isoloss.engine.memory.live_bytes import LiveBytes, made_up
from isoloss.models.architecture import Architecture
from isoloss.models.lora.factors import Factors
from isoloss.models.mcore import patches
from isoloss.models.mcore.moe import dispatch
from isoloss.parallel import mesh
from isoloss.parallel.ops import flash_linear_attention, fused
from isoloss.parallel.runtime import cuda_stubs

# Tensors without values are meta tensors, or fake ones on a device of their own: with fake ones, an op that mixes host
# and device is an error, as on a GPU, and everything takes twice as long.
Device = Literal["meta", "gpu"]
Kernels = Literal["cuda", "cpu"]
# Kernels that torch chooses on a device, where they keep other tensors than the decompositions for meta tensors.
DEVICE = torch.device("meta")  # `join` may choose the other one
MULTIPROCESSORS = 132  # number on an H100
_CHOICE = torch.library.Library("aten", "IMPL")
_installed: tuple[Kernels, Device] | None = None
_counter: LiveBytes  # sees the ops of the rank that this process simulates
aten = torch.ops.aten


@dataclass(frozen=True)
class SimulatedRank:
    """A rank, its world, and the kernels and tensors of its device."""

    rank: int
    world_size: int
    gpus_per_node: int = 8
    kernels: Kernels = "cuda"
    device: Device = "meta"


def join(counter: LiveBytes, simulated: SimulatedRank) -> None:
    """Become this rank, in place of another one. counter: sees the ops of its device, in `without_values`.

    Raises ValueError if this process already has other kernels, or another device.
    """
    global _counter
    rank, world_size, kernels, device = simulated.rank, simulated.world_size, simulated.kernels, simulated.device
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % simulated.gpus_per_node),
        "LOCAL_WORLD_SIZE": str(min(world_size, simulated.gpus_per_node)),
    }
    _install(kernels, device)
    if _installed != (kernels, device):
        raise ValueError(f"this process is for {_installed}, not for {(kernels, device)}")
    if dist.is_initialized():
        mesh.destroy()
        dist.destroy_process_group()
    dist.init_process_group(f"cpu:fake,{device}:fake", store=FakeStore(), rank=rank, world_size=world_size)
    _counter = counter


def joined() -> bool:
    """Return whether this process simulates a rank."""
    return _installed is not None


@contextlib.contextmanager
def without_values(counter: LiveBytes) -> Iterator[None]:
    """Make tensors without values, and count their ops."""
    if DEVICE.type == "gpu":
        counter.fake = FakeTensorMode(allow_non_fake_inputs=True)
    with counter.fake, counter:
        yield


def wait(kind: str) -> None:
    """Count a wait of the host for the device."""
    _counter.wait(kind)


def share_evenly(arch: Architecture) -> None:
    """Give every expert the same number of tokens."""
    if arch.experts is not None:
        patches.answer_split_sizes(arch.experts.top_k, wait)
        dispatch.to_host = _even_counts
        _counter.share_selected = arch.experts.top_k / arch.experts.count


def _even_counts(counts: Tensor, rows: int) -> np.ndarray:
    """Return counts as if every rank sent as many rows as this one, and each expert got the same number of them."""
    wait("split sizes")
    even = np.full(counts.shape, rows // counts[0, 0].numel())
    even[..., -1, -1] += rows - even[0, 0].sum()
    return even


def _install(kernels: Kernels, device: Device) -> None:
    global _installed, DEVICE
    if _installed is not None:
        return
    _installed = kernels, device
    autograd = "AutogradMeta"
    if device == "gpu":
        _setup_privateuseone_for_python_backend("gpu")
        DEVICE, autograd = torch.device("gpu", 0), "AutogradPrivateUse1"
        FakeTensorMode.avoid_device_init = property(lambda self: True)
    cuda_stubs.stand_in(DEVICE)
    _answer_the_host()
    torch.cuda.get_device_capability = lambda *args: (9, 0)  # capability of an H100
    flash_linear_attention.why_not = lambda: "its kernels want values"
    if kernels == "cuda":
        torch.cuda.synchronize = lambda *args, **kwargs: wait("synchronize")
        Tensor.is_cuda = property(lambda self: self.device.type == device)
        _CHOICE.impl("rms_norm", _FusedRMSNorm.of, autograd)
        fused.compiled = _counted_as_one
    else:
        Tensor.is_cpu = property(lambda self: self.device.type in ("cpu", device))
        _CHOICE.impl("scaled_dot_product_attention", attention_of_cpu, autograd)


def _counted_as_one(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    del options
    return lambda *args: _counter.one_kernel(function, args)


def _answer_the_host() -> None:
    """Make up the numbers that the host reads from tensors; record sizes of storages, and pinned memory."""
    tolist, resize, empty = Tensor.tolist, torch.UntypedStorage.resize_, torch.empty
    part_of_rows = Factors.part_of_rows

    def made_up_list(self: Tensor) -> Any:
        if self.device != DEVICE and not isinstance(self, FakeTensor):
            return tolist(self)
        _counter.wait("item", self)
        with unset_fake_temporarily():
            return tolist(torch.full(self.shape, made_up(self.dtype)))

    def rows_of_the_host(self: Factors, tp_size: int, tp_rank: int) -> Tensor:
        with unset_fake_temporarily():  # the host decides by them which products there are
            return part_of_rows(self, tp_size, tp_rank)

    def counted_resize(self: torch.UntypedStorage, size: int) -> Any:
        _counter.resized(self, size)
        return resize(self, size)

    def pinned(self: Tensor) -> Tensor:
        _counter.pin(self)
        return self

    def counted_empty(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        if kwargs.get("pin_memory"):
            _counter.pin(out)
        return out

    torch.empty = counted_empty
    Factors.part_of_rows = rows_of_the_host
    Tensor.tolist = made_up_list
    Tensor.pin_memory = pinned
    torch.UntypedStorage.resize_ = counted_resize
    torch.cuda.is_available = lambda: True  # else Megatron makes weights on the host
    # With a torch that is built for CUDA its optimizers would ask the driver, which need not be here, for a stream.
    torch.accelerator.current_accelerator = lambda check_available=False: None


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's RMSNorm (aten/src/ATen/native/cuda/layer_norm_kernel.cu): one kernel in the forward, two in the backward.
    It keeps the input, the weight and one number a row; a tensor with gaps is copied first."""

    @staticmethod
    def of(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        del shape, eps
        return _FusedRMSNorm.apply(x, weight)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, scale = _counter.one_kernel(rms_norm, (x.contiguous(), weight))
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        grad, x = grad.contiguous(), x.contiguous()
        grad_x = _counter.one_kernel(rms_norm_input_gradient, (grad, x, weight, scale))
        return grad_x, _weight_gradient(grad, x, scale)


def _weight_gradient(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Count one kernel; for many short rows it makes parts, which a second one adds up."""
    rows, blocks = scale.numel(), -(-x.shape[-1] // 32)
    many = rows > 64 * 1024 and x.shape[-1] // 32 < MULTIPROCESSORS // 2
    parts = min(32 * 1024 // blocks, -(-rows // 32)) if many else 1
    gradients = _counter.one_kernel(rms_norm_weight_gradients, (grad, x, scale, parts))
    return gradients.sum(0) if many else gradients[0]


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    del weight
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def rms_norm_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    del grad, weight, scale
    return torch.empty_like(x)


def rms_norm_weight_gradients(grad: Tensor, x: Tensor, scale: Tensor, parts: int) -> Tensor:
    del grad, scale
    return x.new_empty(parts, x.shape[-1])


def attention_of_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by one kernel of the CPU, whatever the arguments are."""
    del enable_gqa
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
