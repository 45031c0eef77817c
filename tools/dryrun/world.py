"""One rank of a world that is not there: a device whose tensors have shapes and no values, and exchanges of nothing.

For a process of its own, which does nothing else: it changes torch. `kernels` says whose kernels are counted: those
that torch chooses on a GPU, or those of a CPU, which a real run on this machine can be compared with.
"""

# A stand-in puts another thing where the type says what stood there.
# pyright: reportAttributeAccessIssue=false

import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental import _config as meta_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from isoloss.engine import step
from isoloss.parallel import cuda_stubs, mesh
from isoloss.tools.dryrun.recorder import Recorder, made_up

META = torch.device("meta")
Kernels = Literal["cuda", "cpu"]
# What torch chooses where it keeps other tensors than the decompositions that meta tensors get.
_CHOICE = torch.library.Library("aten", "IMPL")
_kernels: Kernels | None = None
_recorder: Recorder  # of the rank that this process is
aten = torch.ops.aten


def join(rank: int, world_size: int, gpus_per_node: int, kernels: Kernels) -> Recorder:
    """Become this rank, in place of another one. Returns what records the ops of its device, once it is entered.

    ValueError where this process already had the other kernels.
    """
    global _recorder
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % gpus_per_node),
        "LOCAL_WORLD_SIZE": str(min(world_size, gpus_per_node)),
    }
    _install(kernels)
    if _kernels != kernels:
        raise ValueError(f"this process counts the kernels of {_kernels}, not those of {kernels}")
    if dist.is_initialized():
        mesh.destroy()
        dist.destroy_process_group()
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=world_size)
    _recorder = Recorder("meta", gpus_per_node)
    return _recorder


def wait(kind: str) -> None:
    """The host waits for the device."""
    _recorder.wait(kind)


def _install(kernels: Kernels) -> None:
    global _kernels
    if _kernels is not None:
        return
    _kernels = kernels
    cuda_stubs.stand_in(META)
    _exchange_objects()
    _answer_the_host()
    if kernels == "cuda":
        torch.cuda.synchronize = lambda *args, **kwargs: wait("synchronize")
        Tensor.is_cuda = property(lambda self: self.device == META)
        _CHOICE.impl("rms_norm", _FusedRMSNorm.of, "AutogradMeta")
    else:
        Tensor.is_cpu = property(lambda self: self.device.type in ("cpu", "meta"))
    _CHOICE.impl("scaled_dot_product_attention", ATTENTION[kernels], "AutogradMeta")


def _exchange_objects() -> None:
    """Objects of all ranks: those of this one."""

    def all_gather_object(objects: list, mine: Any, group: Any = None) -> None:
        del group
        objects[:] = [mine] * len(objects)

    dist.all_gather_object = dist.distributed_c10d.all_gather_object = all_gather_object


def _answer_the_host() -> None:
    """Numbers that the host asks of a tensor, and sizes that depend on them."""
    tolist, resize = Tensor.tolist, torch.UntypedStorage.resize_

    def made_up_list(self: Tensor) -> Any:
        if self.device != META:
            return tolist(self)
        wait("item")
        return tolist(torch.full(self.shape, made_up(self.dtype)))

    def recorded_resize(self: torch.UntypedStorage, size: int) -> Any:
        _recorder.resized(self, size)
        return resize(self, size)

    Tensor.tolist = made_up_list
    torch.UntypedStorage.resize_ = recorded_resize
    meta_config.meta_nonzero_assume_all_nonzero = True
    torch.cuda.is_available = lambda: True  # else Megatron makes weights on the host
    step.check_canary = lambda *args, **kwargs: None  # the weights that were consumed have no values


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's keeps the input, the weight and one number a row."""

    @staticmethod
    def of(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        del shape, eps
        return _FusedRMSNorm.apply(x, weight)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def attention_of_cuda(
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
    """On an H100: the flash kernel, which takes grouped heads, for 16-bit numbers without a mask; else the efficient
    one, which does not."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


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
    """One kernel for all."""
    del enable_gqa
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


ATTENTION = {"cuda": attention_of_cuda, "cpu": attention_of_cpu}
