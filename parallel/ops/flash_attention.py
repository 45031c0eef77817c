"""FlashAttention on a GPU (arXiv:2205.14135), for all documents of a packed row in one call.

Version 2 are PyTorch's own kernels. Version 3 are the kernels of the package flash_attn_interface, which PyTorch calls
instead of its own.

Shape suffixes: Q query tokens, Y key tokens, H query heads, K key/value heads (the kernels group H / K query heads), D
width of a query or a key, U width of a value.
"""

from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import pad

from isoloss.parallel.ops.varlen import VarlenCall
from isoloss.parallel.runtime.device import is_hopper

WIDEST_HEAD = 256
Version = Literal["fa2", "fa3"]


class Attended(NamedTuple):
    """The tensors of a forward that its backward reads.

    query, key, value: [Q, H, D], [Y, K, D] and [Y, K, U].
    out, lse: output [Q, H, U], and log-sum-exp of the scores [Q, H], over all keys that the queries see, not only those
        of one call or block.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def takes(query_QHD: Tensor) -> bool:
    """Return True if there is a kernel: for 16-bit numbers on a GPU and heads of any width up to WIDEST_HEAD."""
    return (
        query_QHD.is_cuda and query_QHD.dtype in (torch.bfloat16, torch.float16) and query_QHD.shape[2] <= WIDEST_HEAD
    )


def forward(
    query_QHD: Tensor, key_YKD: Tensor, value_YKU: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [Q, H, U] in the type of the queries, and the log-sum-exp of the scores [Q, H] in fp32."""
    width = _width(query_QHD, value_YKU)
    query, key, value = (_padded(t, width) for t in (query_QHD, key_YKD, value_YKU))
    out, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, call.queries.starts, call.keys.starts, call.queries.longest, call.keys.longest,
        0.0, call.causal, False, scale=scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return out[..., : value_YKU.shape[2]], lse_HQ.T


def backward(grad_QHU: Tensor, attended: Attended, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, in the type of the queries."""
    query_width, value_width = attended.query.shape[2], attended.value.shape[2]
    width = _width(attended.query, attended.value)
    tensors = (_padded(t, width) for t in (grad_QHU, *attended[:4]))
    no_dropout = torch.empty(2, dtype=torch.uint64, device=grad_QHU.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        *tensors, attended.lse.T.contiguous(), call.queries.starts, call.keys.starts, call.queries.longest,
        call.keys.longest, 0.0, call.causal, no_dropout, no_dropout, scale=scale, window_size_left=call.left,
        window_size_right=call.right,
    )  # fmt: skip
    return grad_query[..., :query_width], grad_key[..., :query_width], grad_value[..., :value_width]


def _width(query_QHD: Tensor, value_YKU: Tensor) -> int:
    """Return the one width of queries, keys and values that the kernels require, a multiple of 8."""
    return -(-max(query_QHD.shape[2], value_YKU.shape[2]) // 8) * 8


def _padded(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[2] == width else pad(heads, (0, width - heads.shape[2]))


# ---- which version ---------------------------------------------------------------------------------------------------


def has_fa3() -> bool:
    """Return True if the package of FlashAttention 3 is installed and PyTorch can call it."""
    listed = getattr(attention, "list_flash_attention_impls", list)  # PyTorch before 2.11 has no such list
    return find_spec("flash_attn_interface") is not None and "FA3" in listed()


def version(wanted: str) -> Version:
    """Return the version for kernels.attention=`wanted`: `auto` takes 3 on Hopper GPUs, for which it was written."""
    if wanted != "auto":
        return "fa3" if wanted == "fa3" else "fa2"
    return "fa3" if is_hopper() and has_fa3() else "fa2"


def activate(wanted: str) -> None:
    """Make PyTorch call the kernels of the version for kernels.attention=`wanted` from now on."""
    if version(wanted) == "fa3":
        attention.activate_flash_attention_impl("FA3")


def description(wanted: str, precision: str) -> str:
    """Return the name of the attention kernel in run.json. precision: train.precision."""
    if not torch.cuda.is_available():
        return "PyTorch's kernel of the CPU"
    if wanted == "blocks" or precision != "bf16":
        return "products by blocks of queries"
    return f"FlashAttention {version(wanted)[-1]}"
