"""Gated DeltaNet's convolution and rule on a GPU, each for all documents of a packed row in one call: kernels of the
package flash-linear-attention (fla), version 0.6. Their twins say what they compute, in
`isoloss.parallel.ops.gated_delta` and `isoloss.parallel.ops.short_convolution`.

Shape suffixes are theirs.
"""

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.runtime.device import is_hopper

CONVOLUTION, RULE = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"


@cache
def why_not() -> str | None:
    """What keeps the kernels from this process's GPU; None where they run.

    Triton from 3.4 on, before 3.7.1, computes a gradient of the rule wrongly on Hopper GPUs
    (fla-org/flash-linear-attention, issue 640). fla then ends the first backward by an exception, unless tilelang is
    there, whose kernel it takes.
    """
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    triton = Version(import_module("triton").__version__)
    wrong = is_hopper() and Version("3.4") <= triton < Version("3.7.1")
    if wrong and find_spec("tilelang") is None:
        return f"on Hopper GPUs flash-linear-attention trains with triton>=3.7.1 or tilelang; here is {triton}"
    return None


def missed(wanted: bool, precision: str) -> str | None:
    """What is slow on a GPU, and why, where a run would have the kernels; else None.

    wanted, precision: kernels.delta_rule and train.precision.
    """
    why = why_not() if wanted and precision == "bf16" and torch.cuda.is_available() else None
    return f"Gated DeltaNet runs as products by chunks, which is slow: {why}" if why else None


def takes(x: Tensor) -> bool:
    """Whether there is a kernel: 16-bit numbers on a GPU, with the package."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and why_not() is None


def short_convolution(x_TX: Tensor, weight_XK: Tensor, lengths: tuple[int, ...], uploads: VarlenCache) -> Tensor:
    out, _ = import_module(CONVOLUTION).causal_conv1d(
        x_TX[None], weight_XK, activation="silu", **_documents(lengths, uploads, x_TX.device)
    )
    return out[0]


def delta_rule(
    query_TKD: Tensor,
    key_TKD: Tensor,
    value_THU: Tensor,
    log_decay_TH: Tensor,
    rate_TH: Tensor,
    lengths: tuple[int, ...],
    uploads: VarlenCache,
    begun_SHDU: Tensor | None = None,
) -> Tensor:
    """The kernels read log_decay and rate in fp32."""
    given = query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH
    return _rule(*given, lengths, uploads, begun_SHDU, leaves=False)[0]


def delta_rule_and_states(
    query_TKD: Tensor,
    key_TKD: Tensor,
    value_THU: Tensor,
    log_decay_TH: Tensor,
    rate_TH: Tensor,
    lengths: tuple[int, ...],
    uploads: VarlenCache,
    begun_SHDU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _rule(query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH, lengths, uploads, begun_SHDU, leaves=True)


def _rule(query, key, value, log_decay, rate, lengths, uploads, begun, leaves: bool) -> tuple[Tensor, Tensor]:
    out, left = import_module(RULE).chunk_gated_delta_rule(
        query[None], key[None], value[None], g=log_decay[None].float(), beta=rate[None].float(),
        initial_state=begun, output_final_state=leaves, use_qk_l2norm_in_kernel=True,
        **_documents(lengths, uploads, query.device),
    )  # fmt: skip
    return out[0], left


def _documents(lengths: tuple[int, ...], uploads: VarlenCache, device: torch.device) -> dict[str, Any]:
    """Where documents begin, and the end of the last: on the device, and on the host, so that it need not wait to count
    their chunks. fla knows both again by their identity."""
    on_host = _starts(lengths)
    return {"cu_seqlens": uploads.once(("starts", lengths), lambda: on_host, device), "cu_seqlens_cpu": on_host}


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(length for length in lengths if length)])
