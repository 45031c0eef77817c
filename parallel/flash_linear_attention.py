"""Gated DeltaNet's convolution and rule on a GPU, each for all documents of a packed row in one call: kernels of the
package flash-linear-attention (fla), version 0.6. Their twins say what they compute, in `isoloss.parallel.delta_rule`
and `isoloss.parallel.short_convolution`.

Shape suffixes are theirs.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isoloss.parallel.ragged import Uploads

CONVOLUTION, RULE = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"


def installed() -> bool:
    return find_spec("fla") is not None


def takes(x: Tensor) -> bool:
    """Whether there is a kernel: 16-bit numbers on a GPU, with the package."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and installed()


def short_convolution(x_TX: Tensor, weight_XK: Tensor, lengths: tuple[int, ...], uploads: Uploads) -> Tensor:
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
    uploads: Uploads,
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
    uploads: Uploads,
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


def _documents(lengths: tuple[int, ...], uploads: Uploads, device: torch.device) -> dict[str, Any]:
    """Where documents begin, and the end of the last: on the device, and on the host, so that it need not wait to count
    their chunks. fla knows both again by their identity."""
    on_host = _starts(lengths)
    return {"cu_seqlens": uploads.once(("starts", lengths), lambda: on_host, device), "cu_seqlens_cpu": on_host}


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(length for length in lengths if length)])
