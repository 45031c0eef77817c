"""Which kernels a GPU runs a model with (docs/kernels.md). On a CPU none of them is there, and no key does
anything."""

from dataclasses import dataclass
from typing import Literal

from isoloss.parallel.runtime.config_key import Keys, key


@dataclass(frozen=True)
class Kernels(Keys, group="kernels"):
    """Kernels of a GPU. Each computes what the ops do that it stands for; none of these keys changes the loss, up to
    rounding."""

    attention: Literal["auto", "fa2", "fa3", "blocks"] = key(
        "auto",
        "What runs attention in bf16: PyTorch's FlashAttention 2, FlashAttention 3 (the package flash_attn_interface, "
        "on Hopper GPUs), or matrix products by blocks of queries, which fp32 and fp64 take in any case. auto: fa3 "
        "where it is, else fa2.",
    )
    delta_rule: bool = key(
        True,
        "Run the convolution and the rule of Gated DeltaNet in bf16 in the kernels of the package "
        "flash-linear-attention, where it is installed; else they are products by chunks of 64 tokens.",
    )
    rope: bool = key(True, "Rotate queries and keys in one kernel each.")
    activation: bool = key(True, "Run the activation of an MLP in one kernel.")
    residual_norm: bool = key(
        True,
        "Add attention's output to the residual stream and norm the sum in one kernel. Layers of Transformer Engine, "
        "and a norm that the backward computes again, do it in two.",
    )
    loss_head: bool = key(True, "Pass over the logits in one kernel where several would do the same.")
    grouped_experts: bool = key(True, "Multiply by the matrices of all experts of a rank in one kernel.")


ALL = Kernels()
