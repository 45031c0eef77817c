"""The package deep_ep, with whose kernels Megatron-Core's flex dispatcher sends tokens. Read, not run."""

from megatron.core.transformer.moe import fused_a2a


def has(dispatcher: str) -> bool:
    """Whether it imports here, with the kernels that `moe.dispatcher` names: HybridEP is a branch of DeepEP's."""
    return fused_a2a.HAVE_HYBRIDEP if dispatcher == "hybridep" else fused_a2a.HAVE_DEEP_EP
