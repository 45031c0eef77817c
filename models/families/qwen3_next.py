"""Qwen3-Next: Gated DeltaNet in three of four layers, attention with an output gate in the fourth, and many experts.

Source: transformers, models/qwen3_next/modeling_qwen3_next.py. Its files hold what Gated DeltaNet projects of a token
key head by key head, and the experts one by one.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import Family, read
from isoloss.models.families.hf_delta import DELTA, DELTA_PINNED, GATED, delta_attentions, with_layer_types
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, SHARED_EXPERT, experts
from isoloss.models.families.hf_fields import ConfigJson, flag, positive_int
from isoloss.models.kinds.experts import ExpertNames

PINNED = {**DELTA_PINNED, **MOE_PINNED, "decoder_sparse_step": 1, "mlp_only_layers": []}
FIELDS = DELTA | SHARED_EXPERT | {"norm_topk_prob"}
FAMILY = Family("qwen3_next", pinned=PINNED, irrelevant=MOE_IRRELEVANT, fields=FIELDS, **GATED)


def architecture(config: ConfigJson) -> Architecture:
    config = with_layer_types(config)
    moe = experts(
        config,
        count=("num_experts", "num_local_experts"),
        score="softmax",
        normalize=flag(config, "norm_topk_prob", True),
        shared_size=positive_int(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )
    attentions = delta_attentions(config, FAMILY, woven=True)
    return read(config, FAMILY, attentions, moe, zero_centered_norm=True, left_out=("mtp.",))
