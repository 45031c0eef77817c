"""gpt-oss (arXiv:2508.10925): sinks in the softmax, every other layer with a sliding window, YaRN, biases everywhere,
and experts with a clamped SwiGLU whose weights are stored together, transposed and interleaved.

Source: transformers, models/gpt_oss/modeling_gpt_oss.py. Softmax over the chosen experts' logits, as it is written
there, equals the softmax over all, divided by its sum over the chosen. The hub files are quantized (MXFP4), which
`quantization_config` records and which is refused: let transformers write a bfloat16 copy first.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import FULL, SLIDING, Family, grouped_query, read
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, experts
from isoloss.models.families.hf_fields import ConfigJson, refuse
from isoloss.models.kinds.experts import ExpertNames

PINNED = {**MOE_PINNED, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
FIELDS = frozenset({"sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token"})
# A second spelling of rope_scaling.original_max_position_embeddings, and of nothing.
IRRELEVANT = frozenset({"initial_context_length"}) | MOE_IRRELEVANT
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILY = Family(
    "gpt_oss",
    pinned=PINNED,
    irrelevant=IRRELEVANT,
    fields=FIELDS,
    head_dim_default=64,
    theta_default=150000.0,
    layer_types_default=lambda layer: FULL if layer % 2 else SLIDING,
)


def architecture(config: ConfigJson) -> Architecture:
    per_token = config.get("experts_per_token")
    if per_token is not None and per_token != config.get("num_experts_per_tok"):
        refuse("experts_per_token", per_token, "contradicts num_experts_per_tok; keep one of them")
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_scaling": YARN}
    moe = experts(
        config,
        count=("num_local_experts", "num_experts"),
        intermediate_size="intermediate_size",
        score="softmax",
        normalize=True,
        bias=True,
        activation="clamped_swiglu",
        names=ExpertNames(router="router", stacked="transposed"),
    )
    return read(config, FAMILY, grouped_query(config, FAMILY, qkv_bias=True, output_bias=True, sinks="sinks"), moe)
