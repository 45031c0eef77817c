"""FlashAttention on a GPU (arXiv:2205.14135), for all documents of a packed row in one call: PyTorch's own kernels,
version 2, or those of the package flash_attn_interface, version 3, which PyTorch calls in their place.

Shape suffixes: Q query tokens, Y key tokens, H query heads, K key/value heads (the kernels take fewer of them), D width
of a query or a key, U of a value.
"""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import pad

from isoloss.parallel.ops.varlen import VarlenCall
from isoloss.parallel.runtime.device import is_hopper

WIDEST_HEAD = 256
Version = Literal["fa2", "fa3"]


def takes(query_QHD: Tensor) -> bool:
    """Whether there is a kernel: 16-bit numbers on a GPU. Heads up to WIDEST_HEAD, of any width."""
    return (
        query_QHD.is_cuda and query_QHD.dtype in (torch.bfloat16, torch.float16) and query_QHD.shape[2] <= WIDEST_HEAD
    )


def forward(
    query_QHD: Tensor, key_YKD: Tensor, value_YKU: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [Q, H, U], and the log-sum-exp of the scores [Q, H], fp32."""
    width = _width(query_QHD, value_YKU)
    query, key, value = (_padded(t, width) for t in (query_QHD, key_YKD, value_YKU))
    out, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, call.queries.starts, call.keys.starts, call.queries.longest, call.keys.longest,
        0.0, call.causal, False, scale=scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return out[..., : value_YKU.shape[2]], lse_HQ.T


def backward(
    grad_QHU: Tensor,
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    out_QHU: Tensor,
    lse_QH: Tensor,
    call: VarlenCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. out_QHU, lse_QH: of all keys that the queries see, also in other calls."""
    width = _width(query_QHD, value_YKU)
    tensors = (_padded(t, width) for t in (grad_QHU, query_QHD, key_YKD, value_YKU, out_QHU))
    no_dropout = torch.empty(2, dtype=torch.uint64, device=query_QHD.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        *tensors, lse_QH.T.contiguous(), call.queries.starts, call.keys.starts, call.queries.longest,
        call.keys.longest, 0.0, call.causal, no_dropout, no_dropout, scale=scale, window_size_left=call.left,
        window_size_right=call.right,
    )  # fmt: skip
    return (
        grad_query[..., : query_QHD.shape[2]],
        grad_key[..., : query_QHD.shape[2]],
        grad_value[..., : value_YKU.shape[2]],
    )


def _width(query_QHD: Tensor, value_YKU: Tensor) -> int:
    """The kernels want queries, keys and values of one width, a multiple of 8."""
    return -(-max(query_QHD.shape[2], value_YKU.shape[2]) // 8) * 8


def _padded(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[2] == width else pad(heads, (0, width - heads.shape[2]))


# ---- which version ---------------------------------------------------------------------------------------------------


def has_fa3() -> bool:
    """Whether the package of FlashAttention 3 is installed, and PyTorch knows to call it."""
    listed = getattr(attention, "list_flash_attention_impls", list)  # older than 2.11
    return find_spec("flash_attn_interface") is not None and "FA3" in listed()


def version(wanted: str) -> Version:
    """Of the kernels for kernels.attention=`wanted`: `auto` takes FlashAttention 3 on Hopper GPUs, which it is for."""
    if wanted != "auto":
        return "fa3" if wanted == "fa3" else "fa2"
    return "fa3" if is_hopper() and has_fa3() else "fa2"


def activate(wanted: str) -> None:
    """Let PyTorch call the kernels of that version from now on."""
    if version(wanted) == "fa3":
        attention.activate_flash_attention_impl("FA3")


def description(wanted: str, precision: str) -> str:
    """What run.json calls it."""
    if not torch.cuda.is_available():
        return "PyTorch's kernel of the CPU"
    if wanted == "blocks" or precision != "bf16":
        return "products by blocks of queries"
    return f"FlashAttention {version(wanted)[-1]}"
