"""Mixtral: Mistral with a mixture of experts in every layer (arXiv:2401.04088).

Source: transformers, models/mixtral/modeling_mixtral.py. The weights of the chosen experts always add up to 1.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import SLIDING, Family, grouped_query, read
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, experts
from isoloss.models.families.hf_fields import ConfigJson, with_absent
from isoloss.models.kinds.experts import ExpertNames

FIELDS = frozenset({"sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"})
ABSENT = {"num_key_value_heads": 8}
FAMILY = Family(
    "mixtral",
    pinned=MOE_PINNED,
    irrelevant=MOE_IRRELEVANT,
    fields=FIELDS,
    theta_default=1e6,
    layer_types_default=lambda layer: SLIDING,
)


def architecture(config: ConfigJson) -> Architecture:
    config = with_absent(config, ABSENT)
    moe = experts(
        config,
        count=("num_local_experts", "num_experts"),
        intermediate_size="intermediate_size",
        score="softmax",
        normalize=True,
        names=ExpertNames("block_sparse_moe", projections=("w1", "w3", "w2")),
    )
    return read(config, FAMILY, grouped_query(config, FAMILY), moe)
