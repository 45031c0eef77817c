"""Gated DeltaNet's convolution and rule on a GPU, each for all documents of a packed row in one call, by kernels of the
package flash-linear-attention (fla), version 0.6.

Arguments, results and shape suffixes are those of the twins in `isoloss.parallel.ops.gated_delta` and
`isoloss.parallel.ops.short_convolution`.
"""

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from isoloss.parallel.ops.gated_delta_chunks import DeltaInputs
from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.runtime.device import is_hopper

CONVOLUTION, RULE = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"


@cache
def why_not() -> str | None:
    """Return the reason why the kernels cannot run on this process's GPU; None if they can.

    Triton from 3.4 up to 3.7.1 exclusive computes a wrong gradient of the rule on Hopper GPUs
    (fla-org/flash-linear-attention, issue 640). With such a Triton, fla takes the kernel of tilelang if tilelang is
    installed, and else raises in the first backward.
    """
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    triton = Version(import_module("triton").__version__)
    wrong = is_hopper() and Version("3.4") <= triton < Version("3.7.1")
    if wrong and find_spec("tilelang") is None:
        return f"on Hopper GPUs flash-linear-attention trains with triton>=3.7.1 or tilelang; here is {triton}"
    return None


def missed(wanted: bool, precision: str) -> str | None:
    """Return a warning if a run on a GPU wants the kernels and cannot have them; else None.

    wanted, precision: kernels.delta_rule and train.precision.
    """
    why = why_not() if wanted and precision == "bf16" and torch.cuda.is_available() else None
    return f"Gated DeltaNet runs as products by chunks, which is slow: {why}" if why else None


def takes(x: Tensor) -> bool:
    """Return True if there is a kernel: for 16-bit numbers on a GPU, if the package is installed and runs there."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and why_not() is None


def short_convolution(x_TX: Tensor, weight_XK: Tensor, lengths: tuple[int, ...], uploads: VarlenCache) -> Tensor:
    out, _ = import_module(CONVOLUTION).causal_conv1d(
        x_TX[None], weight_XK, activation="silu", **_documents(lengths, uploads, x_TX.device)
    )
    return out[0]


def delta_rule(
    inputs: DeltaInputs, lengths: tuple[int, ...], uploads: VarlenCache, initial_SHDU: Tensor | None = None
) -> Tensor:
    return _rule(inputs, lengths, uploads, initial_SHDU, with_states=False)[0]


def delta_rule_and_states(
    inputs: DeltaInputs, lengths: tuple[int, ...], uploads: VarlenCache, initial_SHDU: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _rule(inputs, lengths, uploads, initial_SHDU, with_states=True)


def _rule(
    inputs: DeltaInputs, lengths, uploads: VarlenCache, initial: Tensor | None, *, with_states: bool
) -> tuple[Tensor, Tensor]:
    query, key, value, log_decay, rate = (x[None] for x in inputs)
    # The kernels read log decays and rates in fp32.
    out, states = import_module(RULE).chunk_gated_delta_rule(
        query, key, value, g=log_decay.float(), beta=rate.float(),
        initial_state=initial, output_final_state=with_states, use_qk_l2norm_in_kernel=True,
        **_documents(lengths, uploads, query.device),
    )  # fmt: skip
    return out[0], states


def _documents(lengths: tuple[int, ...], uploads: VarlenCache, device: torch.device) -> dict[str, Any]:
    """Return the starts of the documents and the end of the last, on the device and on the host.

    With starts on the host, the host need not wait for the device to count chunks. fla caches by the identity of both
    tensors, so both are the same objects in every layer.
    """
    on_host = _starts(lengths)
    return {"cu_seqlens": uploads.once(("starts", lengths), lambda: on_host, device), "cu_seqlens_cpu": on_host}


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(length for length in lengths if length)])
