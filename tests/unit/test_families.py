"""config.json, in both spellings, to an Architecture; and every field that is not understood refused by name."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.published import (
    DEEPSEEK_V3,
    GEMMA_4_26B_A4B,
    GEMMA_4_31B,
    GLM_45_AIR,
    GLM_47_FLASH,
    GPT_OSS_20B,
    KIMI_K2,
    LLAMA_31_8B,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    MISTRAL_7B,
    MISTRAL_SMALL_31,
    MIXTRAL_8X7B,
    MOONLIGHT,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN25_7B,
)
from transformers import (
    DeepseekV3Config,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from isoloss.models.architecture import Architecture
from isoloss.models.families import (
    deepseek_v3,
    gemma4_text,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    mimo_v2_flash,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from isoloss.models.families.registry import family_of, read_architecture
from isoloss.models.flops import met_parameters, output_parameters
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.dense_and_experts import DenseAndExperts
from isoloss.models.kinds.experts import ExpertNames, Experts
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.grouped_query import GatedQuery, GroupedQuery
from isoloss.models.kinds.latent import Latent
from isoloss.models.kinds.layer import Layer
from isoloss.models.rope import LinearScaling, Llama3Scaling, Proportional, QueryScaling, Rope, YarnScaling
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel.runtime.errors import UserError

HUB = [
    (llama, LLAMA_31_8B, LlamaConfig), (mistral, MISTRAL_7B, MistralConfig), (qwen2, QWEN25_7B, Qwen2Config),
    (qwen3, QWEN3_8B, Qwen3Config), (qwen3_moe, QWEN3_30B_A3B, Qwen3MoeConfig), (mixtral, MIXTRAL_8X7B, MixtralConfig),
    (deepseek_v3, DEEPSEEK_V3, DeepseekV3Config), (glm4_moe, GLM_45_AIR, Glm4MoeConfig),
    (gpt_oss, GPT_OSS_20B, GptOssConfig), (glm4_moe_lite, GLM_47_FLASH, Glm4MoeLiteConfig),
    (deepseek_v3, MOONLIGHT, DeepseekV3Config), (minimax_m2, MINIMAX_M2, MiniMaxM2Config),
]  # fmt: skip
GLM_47_EXPERTS = Experts(64, 4, 1536, "sigmoid", True, 1.8, True, 1, 1, 1536)
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
          "original_max_position_embeddings": 512, "rope_theta": 500000.0}  # fmt: skip


def attention_of(arch: Architecture) -> Any:
    """Of layers without a window, where others have one."""
    return arch.attentions[0]


def windows(arch: Architecture) -> list[int | None]:
    return [layer.attention.window for layer in arch.layers]


def test_llama_31_8b_as_published():
    rope = Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    attention = GroupedQuery(heads=32, kv_heads=8, head_dim=128, rope=rope, rotary_dim=128)
    assert llama.architecture(LLAMA_31_8B) == Architecture(
        family="llama", layers=(Layer(attention, Dense(14336)),) * 32, hidden_size=4096, vocab_size=128256,
        norm_eps=1e-5, tie_embeddings=False, max_positions=131072, dtype="bfloat16",
    )  # fmt: skip


def test_qwen_as_published():
    heads = {"head_dim": 128, "rotary_dim": 128, "rope": Rope(1e6)}
    (attention,) = qwen2.architecture(QWEN25_7B).attentions
    assert attention == GroupedQuery(heads=28, kv_heads=4, qkv_bias=True, **heads)
    (attention,) = qwen3.architecture(QWEN3_8B).attentions
    assert attention == GroupedQuery(heads=32, kv_heads=8, qk_norm="head", **heads)


def test_other_families_as_published():
    assert windows(mistral.architecture(MISTRAL_7B)) == [4096] * 32
    arch = mixtral.architecture(MIXTRAL_8X7B)
    names = ExpertNames("block_sparse_moe", "gate", ("w1", "w3", "w2"))
    assert windows(arch) == [None] * 32 and arch.experts == Experts(8, 2, 14336, "softmax", True, names=names)
    assert qwen3_moe.architecture(QWEN3_30B_A3B).experts == Experts(128, 8, 768, "softmax", True)
    arch = deepseek_v3.architecture(DEEPSEEK_V3)
    assert arch.experts == Experts(256, 8, 2048, "sigmoid", True, 2.5, True, 8, 4, 2048)
    assert arch.sparse == (False,) * 3 + (True,) * 58
    mscale = 0.1 * math.log(40) + 1
    rope = Rope(10000.0, YarnScaling(40, 4096, 32, 1, True, 1.0, mscale**2), interleaved=True)
    (latent,) = arch.attentions
    assert latent == Latent(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=rope)
    assert arch.mtp_layers == 1
    arch = glm4_moe.architecture(GLM_45_AIR)
    (attention,) = arch.attentions
    wanted = {"heads": 96, "kv_heads": 8, "head_dim": 128, "rotary_dim": 64}
    assert attention == GroupedQuery(rope=Rope(1e6), qkv_bias=True, **wanted)
    assert arch.experts == Experts(128, 8, 1408, "sigmoid", True, 1.0, True, 1, 1, 1408)
    assert arch.sparse == (False,) + (True,) * 45
    arch = glm4_moe_lite.architecture(GLM_47_FLASH)
    assert arch.experts == GLM_47_EXPERTS and arch.sparse == (False,) + (True,) * 46
    rope, (latent,) = Rope(1e6, interleaved=True), arch.attentions
    assert latent == Latent(heads=20, q_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, rope=rope)
    assert arch.mtp_layers == 1
    arch = minimax_m2.architecture(MINIMAX_M2)
    assert (attention_of(arch).rotary_dim, attention_of(arch).qk_norm, arch.mtp_layers) == (64, "joint", 3)
    names = ExpertNames("block_sparse_moe", "gate", ("w1", "w3", "w2"), selection_bias="e_score_correction_bias")
    assert arch.experts == Experts(256, 8, 1536, "sigmoid", True, selection_bias=True, names=names)
    arch = gpt_oss.architecture(GPT_OSS_20B)
    assert windows(arch) == [128, None] * 12 and arch.experts.bias and arch.experts.activation == "clamped_swiglu"
    assert all(kind.sinks == "sinks" and kind.qkv_bias and kind.output_bias for kind in arch.attentions)
    assert attention_of(arch).rope.scaling == YarnScaling(32.0, 4096, 32.0, 1.0, False, 0.1 * math.log(32) + 1, 1.0)


def test_layers_of_two_kinds_as_published(tmp_path):
    """In the spelling of the hub, which transformers keeps beside its own."""
    arch = mimo_v2_flash.architecture(MIMO_V2_FLASH)
    kinds = [bool(kind) for kind in MIMO_V2_FLASH["hybrid_layer_pattern"]]
    widths = {"heads": 64, "head_dim": 192, "rotary_dim": 64, "value_dim": 128, "value_scale": 0.707}
    full = Asymmetric(kv_heads=4, rope=Rope(5e6), **widths)
    sliding = Asymmetric(kv_heads=8, rope=Rope(1e4), window=129, sinks="attention_sink_bias", **widths)
    assert [layer.attention for layer in arch.layers] == [sliding if kind else full for kind in kinds]
    assert arch.ropes == ((Rope(5e6), 64), (Rope(1e4), 64))
    assert arch.experts == Experts(256, 8, 2048, "sigmoid", True, selection_bias=True)
    assert arch.sparse == (False,) + (True,) * 47
    assert round(num_parameters(arch) / 1e9) == 309
    config = MiMoV2FlashConfig(**MIMO_V2_FLASH)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["sliding_window"] == 129 and "layer_types" in saved
    assert read_architecture(tmp_path) == mimo_v2_flash.architecture(config.to_dict()) == arch
    default = mimo_v2_flash.architecture(MiMoV2FlashConfig().to_dict())
    assert replace(default, dtype="bfloat16", max_positions=262144) == arch
    unscaled = mimo_v2_flash.architecture({**MIMO_V2_FLASH, "attention_value_scale": None})
    assert [kind.value_scale for kind in unscaled.attentions] == [1.0, 1.0]


def test_gemma_4_as_published(tmp_path):
    arch = gemma4_text.architecture(GEMMA_4_31B)
    same = {"heads": 32, "qk_norm": "head", "value_norm": True, "softmax_scale": 1.0}
    widths = {"head_dim": 512, "rotary_dim": 512, "value_dim": 512}
    full = Asymmetric(kv_heads=4, rope=Rope(1e6, Proportional(0.25)), keys_as_values=True, **widths, **same)
    widths = {"head_dim": 256, "rotary_dim": 256, "value_dim": 256}
    sliding = Asymmetric(kv_heads=16, rope=Rope(1e4), window=1024, **widths, **same)
    assert [layer.attention for layer in arch.layers] == ([sliding] * 5 + [full]) * 10
    assert all(layer.sandwich and layer.scalar and layer.mlp == Dense(21504, "geglu") for layer in arch.layers)
    assert (arch.scaled_embedding, arch.logit_softcap, arch.tie_embeddings) == (True, 30.0, True)
    assert round(num_parameters(arch) / 1e9, 1) == 30.7
    # transformers gives layers without a window an entry of their own in place of two fields.
    Gemma4TextConfig(**GEMMA_4_31B).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in saved and "global_head_dim" not in saved
    assert gemma4_text.architecture(saved) == arch
    without = {**GEMMA_4_31B, "attention_k_eq_v": False, "final_logit_softcapping": None}
    arch = gemma4_text.architecture(without)
    assert [(kind.kv_heads, kind.keys_as_values) for kind in arch.attentions] == [(16, False)] * 2
    assert arch.logit_softcap is None
    assert gemma4_text.architecture(json.loads(Gemma4TextConfig(**without).to_json_string())) == arch


def test_sparse_gemma_4_as_published(tmp_path):
    arch = gemma4_text.architecture(GEMMA_4_26B_A4B)
    (moe,) = arch.mlps
    assert moe == DenseAndExperts(128, 8, 704, shared_size=2112, activation="geglu") and all(arch.sparse)
    assert (moe.score, moe.normalize, moe.scaling) == ("softmax", True, 1.0)
    assert round(num_parameters(arch) / 1e9, 1) == 25.2
    met = sum(parameters for _, parameters in met_parameters(arch)) + output_parameters(arch)
    assert round(met / 1e9, 1) == 3.8
    Gemma4TextConfig(**GEMMA_4_26B_A4B).save_pretrained(tmp_path)
    assert gemma4_text.architecture(json.loads((tmp_path / "config.json").read_text())) == arch
    # Where the block is switched off, transformers reads none of its fields.
    dense = gemma4_text.architecture({**GEMMA_4_26B_A4B, "enable_moe_block": False})
    assert dense.mlps == (Dense(2112, "geglu"),)


def test_gemma_4_within_a_multimodal_model(tmp_path):
    whole = Gemma4Config(text_config=GEMMA_4_31B, vision_config={"num_hidden_layers": 1})
    whole.architectures = ["Gemma4ForConditionalGeneration"]
    whole.save_pretrained(tmp_path)
    arch = read_architecture(tmp_path)
    assert arch.text_only() == gemma4_text.architecture(GEMMA_4_31B)
    assert (arch.tensor_prefix, arch.text_class) == ("model.language_model.", "Gemma4ForCausalLM")


def test_the_defaults_of_gemma_4_are_those_of_transformers():
    default = Gemma4TextConfig(hidden_size_per_layer_input=0)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings")  # fmt: skip
    absent = {name: getattr(default, name) for name in sizes} | {"hidden_size_per_layer_input": 0}
    assert gemma4_text.architecture(absent) == gemma4_text.architecture(json.loads(default.to_json_string()))
    few = gemma4_text.architecture({**absent, "num_hidden_layers": 8})
    assert windows(few) == [512] * 5 + [None, 512, None]
    del absent["hidden_size_per_layer_input"]
    with pytest.raises(UserError, match="hidden_size_per_layer_input=256 is not supported"):
        gemma4_text.architecture(absent)


# What transformers' configurations of these say, which are of Qwen3.5-9B, Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B.
QWEN35_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
               "mrope_section": [11, 11, 10], "mrope_interleaved": True}  # fmt: skip


def test_layers_of_gated_delta_net_as_published(tmp_path):
    text = {**Qwen3_5TextConfig().to_dict(), "rope_parameters": QWEN35_ROPE, "mtp_num_hidden_layers": 1,
            "attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4}  # fmt: skip
    del text["layer_types"]
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
             "vision_config": {"depth": 27}, "image_token_id": 248056, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    arch = read_architecture(tmp_path)
    widths = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "conv_width": 4}
    gated, delta = arch.attentions
    assert arch.linear == (True, True, True, False) * 8
    assert delta == GatedDelta(**widths) and delta.channels == 8192
    assert arch.tensor_prefix == "model.language_model." and arch.mtp_layers == 1
    heads = {"heads": 16, "kv_heads": 4, "head_dim": 256, "rotary_dim": 64}
    assert gated == GatedQuery(rope=Rope(1e7), qk_norm="head", **heads) and arch.zero_centered_norm
    experts = family_of("Qwen3_5MoeForCausalLM").architecture(Qwen3_5MoeTextConfig().to_dict())
    names = ExpertNames(shared="shared_expert", stacked="rows")
    assert experts.experts == Experts(256, 8, 512, "softmax", True, shared_size=512, shared_gate=True, names=names)
    assert round(num_parameters(experts) / 1e9, 1) == 34.7
    woven = family_of("Qwen3NextForCausalLM").architecture(Qwen3NextConfig().to_dict())
    assert woven.attentions[1] == GatedDelta(**widths, woven=True) and woven.linear == arch.linear[:4] * 12
    assert woven.experts is not None and (woven.experts.count, woven.experts.top_k) == (512, 10)
    assert round(num_parameters(woven) / 1e9, 1) == 79.7


def test_mistral_within_a_multimodal_model():
    family = family_of("Mistral3ForConditionalGeneration")
    arch = family.architecture(MISTRAL_SMALL_31)
    text = mistral.architecture(MISTRAL_SMALL_31["text_config"])
    assert (arch.tensor_prefix, arch.head_prefix) == ("language_model.model.", "language_model.")
    assert arch.text_only() == text and arch.text_class == "MistralForCausalLM"
    assert not arch.tie_embeddings and windows(arch) == [None] * 40 and round(num_parameters(arch) / 1e9, 2) == 23.57
    inner = Ministral3Config(tie_word_embeddings=True).to_dict()
    tied = family.architecture({**MISTRAL_SMALL_31, "text_config": inner, "dtype": None})
    assert tied.attentions == ministral3.architecture(inner).attentions and tied.tie_embeddings
    assert tied.text_class == "Ministral3ForCausalLM"
    with pytest.raises(UserError, match=r"text_config\.model_type='llama'"):
        family.architecture({**MISTRAL_SMALL_31, "text_config": {**inner, "model_type": "llama"}})


@pytest.mark.parametrize(("change", "field"), [
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"dtype": "float16"}, "dtype"),
    ({"audio_config": {}}, "audio_config"),
    ({"text_config": 3}, "text_config"),
])  # fmt: skip
def test_a_multimodal_model_that_is_not_understood_is_refused(change, field):
    text = {**Qwen3_5TextConfig().to_dict(), "dtype": "bfloat16"}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    with pytest.raises(UserError, match=f"config.json: {field}="):
        family_of("Qwen3_5ForConditionalGeneration").architecture(whole | change)


@pytest.mark.parametrize(("change", "field"), [
    ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
    ({"layer_types": ["linear_attention"]}, "layer_types"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type"),
    ({"attn_output_gate": False}, "attn_output_gate"),
])  # fmt: skip
def test_gated_delta_net_that_is_not_understood_is_refused(change, field):
    with pytest.raises(UserError, match=f"config.json: {field}="):
        family_of("Qwen3_5ForCausalLM").architecture(Qwen3_5TextConfig().to_dict() | change)


@pytest.mark.parametrize(("published", "billions"), [
    (LLAMA_31_8B, 8.030261248), (MISTRAL_7B, 7.241732096), (QWEN25_7B, 7.615616512), (QWEN3_8B, 8.190735360),
    (QWEN3_30B_A3B, 30.532122624), (MIXTRAL_8X7B, 46.702792704), (DEEPSEEK_V3, 671.026404352),
    (GPT_OSS_20B, 20.914757184),
])  # fmt: skip
def test_number_of_parameters_is_the_published_one(published, billions):
    assert num_parameters(family_of(published["architectures"][0]).architecture(published)) == round(billions * 1e9)


@pytest.mark.parametrize(("family", "published", "config_class"), HUB)
def test_the_spellings_of_transformers_4_and_5_mean_the_same(family, published, config_class, tmp_path):
    config = config_class(**published)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved  # it is the other spelling that is tested here
    expected = family.architecture(published)
    assert family.architecture(saved) == expected
    assert family.architecture(config.to_dict()) == expected
    assert read_architecture(tmp_path) == expected


@pytest.mark.parametrize(("family", "config_class"), [(llama, LlamaConfig), (qwen2, Qwen2Config), (qwen3, Qwen3Config)])
def test_the_defaults_of_transformers_are_understood(family, config_class):
    config = config_class()
    arch = family.architecture(config.to_dict())
    assert (arch.hidden_size, arch.num_layers, arch.vocab_size) == (4096, 32, config.vocab_size)
    assert attention_of(arch).rope == Rope(10000.0)
    assert (arch.dtype, arch.tie_embeddings) == ("float32", False)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 1000000},
    {"rope_type": "default", "rope_theta": 12345.678}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    {"rope_type": "linear", "factor": 4, "rope_theta": 500000.0}, LLAMA3,
    {**LLAMA3, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
def test_inv_freq_is_bit_equal_to_transformers(rope, head_dim):
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=dict(rope))
    if rope["rope_type"] == "default":
        expected = LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)
        assert attention_factor == 1.0
    inv_freq = attention_of(llama.architecture(config.to_dict())).rope.inv_freq(head_dim)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
    assert torch.equal(inv_freq, expected)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("theta", "factor", "original"), [(1e6, 4.0, 32768), (1e4, 40.0, 4096), (150000.0, 32.0, 64)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_inv_freq_of_yarn_is_bit_equal_to_transformers(head_dim, theta, factor, original, truncate):
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "truncate": truncate,
            "original_max_position_embeddings": original}  # fmt: skip
    config = Qwen2Config(hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    found = attention_of(qwen2.architecture(config.to_dict())).rope
    assert torch.equal(found.inv_freq(head_dim), expected)
    assert found.cos_sin_factor == attention_factor


def test_old_spelling_of_linear_scaling():
    arch = llama.architecture({**LLAMA_31_8B, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert attention_of(arch).rope == Rope(500000.0, LinearScaling(2.0))


def test_absent_kv_heads_mean_multi_head_attention_for_llama_only():
    without = {k: v for k, v in LLAMA_31_8B.items() if k != "num_key_value_heads"}
    assert attention_of(llama.architecture(without)).kv_heads == 32
    with pytest.raises(UserError, match="num_key_value_heads is missing"):
        qwen2.architecture({k: v for k, v in QWEN25_7B.items() if k != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("family", "config_class"), [(llama, LlamaConfig), (mistral, MistralConfig), (qwen3, Qwen3Config)]
)
def test_an_absent_head_width_is_that_of_transformers(family, config_class):
    """Qwen3's is 128 whatever the hidden size."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    saved = {k: v for k, v in config_class(**config).to_dict().items() if k != "head_dim"}
    wanted = config_class(**config).head_dim
    assert attention_of(family.architecture(saved)).head_dim == (128 if family is qwen3 else 64) == wanted


def test_mistrals_whose_queries_grow():
    """What transformers' configurations write, and files that leave it to their defaults."""
    written = Ministral3Config().to_dict()
    arch = ministral3.architecture(written)
    yarn = YarnScaling(16.0, 16384, 32.0, 1.0, True, 1.0, 1.0)
    rope = Rope(1e6, yarn, query_scaling=QueryScaling(0.1, 16384))
    assert arch.attentions == (GroupedQuery(heads=32, kv_heads=8, head_dim=128, rope=rope, rotary_dim=128),)
    assert ministral3.architecture({k: v for k, v in written.items() if k != "rope_parameters"}) == arch
    assert windows(ministral3.architecture({**written, "sliding_window": 4096})) == [4096] * 34

    written = Mistral4Config().to_dict()
    arch = mistral4.architecture(written)
    yarn = YarnScaling(128.0, 8192, 32.0, 1.0, True, 1.0, (0.1 * math.log(128) + 1) ** 2)
    rope = Rope(1e4, yarn, interleaved=True, query_scaling=QueryScaling(0.1, 8192))
    (latent,) = arch.attentions
    assert latent == Latent(heads=32, q_rank=1024, kv_rank=256, nope_dim=64, rope_dim=64, value_dim=128, rope=rope)
    names = ExpertNames(stacked="rows")
    assert arch.experts == Experts(128, 4, 2048, "softmax", True, shared_size=2048, names=names)
    assert mistral4.architecture({k: v for k, v in written.items() if k != "rope_parameters"}) == arch


@pytest.mark.parametrize("name", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"))
def test_kimi_k2_is_deepseek_v3_whatever_its_file_calls_it(name):
    config = {**KIMI_K2, "architectures": [name]}
    arch = family_of(name).architecture(config)
    assert arch == deepseek_v3.architecture({**config, "model_type": "deepseek_v3"})
    assert arch.experts == Experts(384, 8, 2048, "sigmoid", True, 2.827, True, 1, 1, 2048)
    assert arch.sparse == (False,) + (True,) * 60
    assert attention_of(arch).rope.scaling == YarnScaling(
        32.0, 4096, 1.0, 1.0, True, 1.0, (0.1 * math.log(32) + 1) ** 2
    )


MINISTRAL_3 = {**Ministral3Config().to_dict(), "architectures": ["Ministral3ForCausalLM"]}
MISTRAL_4 = {**Mistral4Config().to_dict(), "architectures": ["Mistral4ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
REFUSED = [
    (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act='gelu' .* only 'silu' is"),
    (LLAMA_31_8B, {"attention_bias": True}, "attention_bias=True"),
    (LLAMA_31_8B, {"mlp_bias": True}, "mlp_bias=True"),
    (LLAMA_31_8B, {"pretraining_tp": 2}, "pretraining_tp=2"),
    (LLAMA_31_8B, {"rope_interleaved": True}, "rope_interleaved=True"),
    (LLAMA_31_8B, {"num_hidden_layers": True}, "num_hidden_layers=True must be a positive integer"),
    (LLAMA_31_8B, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA_31_8B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
    (LLAMA_31_8B, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    (LLAMA_31_8B, {"sliding_window": 4096}, "sliding_window=4096"),
    (LLAMA_31_8B, {"model_type": "mistral"}, "model_type='mistral'"),
    (LLAMA_31_8B, {"residual_multiplier": 0.5}, "residual_multiplier=0.5 is a field that the llama family"),
    (LLAMA_31_8B, {"num_key_value_heads": 5}, "num_key_value_heads=5 must divide num_attention_heads=32"),
    (LLAMA_31_8B, {"num_attention_heads": 24}, "hidden_size=4096 is not a multiple of num_attention_heads=24"),
    (LLAMA_31_8B, {"head_dim": 31}, "head_dim=31 must be even"),
    (LLAMA_31_8B, {"hidden_size": "4096"}, "hidden_size='4096' must be a positive integer"),
    (LLAMA_31_8B, {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    (LLAMA_31_8B, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
    (LLAMA_31_8B, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn' is not supported"),
    (LLAMA_31_8B, {"dtype": "float32"}, "dtype='float32' contradicts torch_dtype='bfloat16'"),
    (LLAMA_31_8B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type='dynamic'"),
    (LLAMA_31_8B, {"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type="),
    (
        LLAMA_31_8B,
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8.5, "rope_theta": None}},
        "rope_scaling.original_max_position_embeddings=8.5 must be a positive integer",
    ),
    (LLAMA_31_8B, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "rope_type": "default"}}, "type='linear' contradicts"),
    (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "rope_scaling.beta_fast=1"),
    (LLAMA_31_8B, {"rope_scaling": {**LLAMA3, "rope_theta": 1.0}}, "rope_theta=500000.0 contradicts"),
    (LLAMA_31_8B, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be greater than low_freq_factor=2.0"),
    (LLAMA_31_8B, {"rope_parameters": LLAMA3}, "stands beside rope_parameters"),
    (LLAMA_31_8B, {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
    (QWEN25_7B, {"use_sliding_window": True}, "use_sliding_window=True"),
    (QWEN25_7B, {"use_mrope": True}, "use_mrope=True"),
    (QWEN25_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0}}, "rope_scaling.beta_fast=0 must be"),
    (QWEN25_7B, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types='sliding_attention'"),
    (QWEN25_7B, {"layer_types": ["full_attention"] * 27}, "layer_types='27 entries' must have num_hidden_layers=28"),
    (QWEN3_8B, {"attention_bias": True}, "attention_bias=True"),
    (QWEN3_8B, {"use_sliding_window": True}, "use_sliding_window=True"),
    (QWEN25_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "x"}}, "rope_scaling.mscale='x' must be"),
    (MISTRAL_7B, {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
    (
        MISTRAL_7B,
        {"layer_types": ["chunked_attention"] * 32},
        "layer_types='chunked_attention' is not supported; one of",
    ),
    (MIXTRAL_8X7B, {"num_experts": 4}, "num_experts=4 contradicts num_local_experts=8"),
    (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the experts that can be chosen, of 8"),
    (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
    (MIXTRAL_8X7B, {"output_router_logits": True}, "output_router_logits=True"),
    (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    (QWEN3_30B_A3B, {"num_experts": None}, "num_experts is missing"),
    (QWEN3_30B_A3B, {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
    (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    (DEEPSEEK_V3, {"n_group": 7}, "n_group=7 must divide the number of experts, 256"),
    (DEEPSEEK_V3, {"topk_group": 9}, "topk_group=9 must not exceed n_group=8"),
    (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads=8 must be num_attention_heads=128"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False"),
    (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be a whole number"),
    (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
    (DEEPSEEK_V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this family"),
    (KIMI_K2, {"quantization_config": {"format": "pack-quantized"}}, "weights are quantized, so let transformers"),
    (KIMI_K2, {"model_type": "kimi_k3"}, "model_type='kimi_k3'"),
    (GLM_47_FLASH, {"mlp_layer_types": ["dense", "sparse"] * 23 + ["dense"]}, "mlp_layer_types=.* must be a list of"),
    (GLM_47_FLASH, {"mlp_layer_types": ["dense"] * 47}, "mlp_layer_types=.* some of them sparse"),
    (GLM_47_FLASH, {"mlp_layer_types": ["dense"] + ["sparse"] * 45}, "mlp_layer_types=.* num_hidden_layers=47"),
    (GLM_47_FLASH, {"first_k_dense_replace": 2}, "first_k_dense_replace=2 contradicts 1 dense layers"),
    (GLM_45_AIR, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be a number greater than 0"),
    (GLM_45_AIR, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "together with YaRN's attention factor"),
    (GLM_45_AIR, {"sliding_window": 128}, "sliding_window=128 is a field that the glm4_moe family does not know"),
    (
        MINISTRAL_3,
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": None}},
        "rope_parameters.llama_4_scaling_beta is missing",
    ),
    (
        MINISTRAL_3,
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        "rope_parameters.llama_4_scaling_beta=0.1 is supported together with rope_type 'yarn' only",
    ),
    (LLAMA_31_8B, {"rope_scaling": YARN}, "rope_scaling.llama_4_scaling_beta=0.1 is not a parameter"),
    (MISTRAL_4, {"rope_parameters": {**YARN, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25 is not qk"),
    (MISTRAL_4, {"rope_parameters": "yarn"}, "rope_parameters='yarn' must be an object"),
    (MISTRAL_4, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported for mistral4; only 'softmax' is"),
    (MINIMAX_M2, {"attn_type_list": [1] * 61 + [0]}, "attn_type_list=.* only .1, 1, "),
    (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
    (MINIMAX_M2, {"rotary_dim": 63}, "partial_rotary_factor=0.4921875 rotates an odd number of the 128 channels"),
    (MINIMAX_M2, {"partial_rotary_factor": 0.25}, "rotary_dim=64 contradicts partial_rotary_factor"),
    (
        MINIMAX_M2,
        {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_type": "default"}},
        "partial_rotary_factor=0.5",
    ),
    (MINIMAX_M2, {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    (MIMO_V2_FLASH, {"hybrid_layer_pattern": [0, 1] * 24}, "hybrid_layer_pattern=.* is not what transformers computes"),
    (MIMO_V2_FLASH, {"moe_layer_freq": [0, 0] + [1] * 46}, "moe_layer_freq=.* is not what transformers computes"),
    (
        MIMO_V2_FLASH,
        {"rope_theta": 640000},
        "rope_theta=640000 is not what transformers computes of this file",
    ),
    (MIMO_V2_FLASH, {"swa_num_key_value_heads": 16}, "swa_num_key_value_heads=16 is not what transformers computes"),
    (MIMO_V2_FLASH, {"swa_v_head_dim": 192}, "swa_v_head_dim=192 is not what transformers computes of this file, 128"),
    (
        MIMO_V2_FLASH,
        {"num_key_value_heads": 64},
        "num_key_value_heads=64 must divide num_attention_heads=64 twice",
    ),
    (MIMO_V2_FLASH, {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias=True is not supported"),
    (MIMO_V2_FLASH, {"sliding_window": 64}, "sliding_window=64 contradicts sliding_window_size=128"),
    (MIMO_V2_FLASH, {"n_shared_experts": 1}, "n_shared_experts=1 is not supported"),
    (MIMO_V2_FLASH, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.* must be an object of full_att"),
    (
        MIMO_V2_FLASH,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}},
        "rope_parameters.full_attention.rope_type='yarn' is not supported",
    ),
    (
        MIMO_V2_FLASH,
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"partial_rotary_factor": 0.5}}},
        "rope_parameters=.* rotates other channels where there is a window",
    ),
    (GEMMA_4_26B_A4B, {"top_k_experts": 129}, "top_k_experts=129 exceeds num_experts=128"),
    (GEMMA_4_31B, {"enable_moe_block": True}, "num_experts is missing"),
    (GEMMA_4_26B_A4B, {"expert_intermediate_size": 512}, "expert_intermediate_size=512 contradicts moe_intermediate_s"),
    (GEMMA_4_31B, {"num_kv_shared_layers": 20}, "num_kv_shared_layers=20 is not supported; layers that read the keys"),
    (GEMMA_4_31B, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported; embeddings"),
    (GEMMA_4_31B, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported; a tok"),
    (GEMMA_4_31B, {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
    (GEMMA_4_31B, {"attention_bias": True}, "attention_bias=True is not supported"),
    (GEMMA_4_31B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is a field that the gemma4_text"),
    (GEMMA_4_31B, {"layer_types": ["sliding_attention"] * 60}, "layer_types='sliding_attention' is the last layer's"),
    (GEMMA_4_31B, {"num_global_key_value_heads": 5}, "num_global_key_value_heads=5 must divide num_attention_heads=32"),
    (GEMMA_4_31B, {"num_key_value_heads": 5}, "num_key_value_heads=5 must divide num_attention_heads=32"),
    (GEMMA_4_31B, {"rope_theta": 1e4}, "rope_theta=10000.0 is not supported"),
    (GEMMA_4_31B, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.* must be an object of full_att"),
    (
        GEMMA_4_31B,
        {"rope_parameters": {**GEMMA_4_31B["rope_parameters"], "full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention.rope_type='default' is not supported; only 'proportional' is",
    ),
    (
        GEMMA_4_31B,
        {
            "rope_parameters": {
                **GEMMA_4_31B["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }
        },
        "rope_parameters.sliding_attention.partial_rotary_factor=0.5 is not supported",
    ),
    (
        GEMMA_4_31B,
        {
            "rope_parameters": {
                **GEMMA_4_31B["rope_parameters"],
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0},
            }
        },
        "factor=2.0 is not a parameter",
    ),
    (GEMMA_4_31B, {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config=.* must hold the same for each"),
    (
        GEMMA_4_31B,
        {"per_layer_config": {str(layer): {"sliding_window": 5} for layer in range(5, 60, 6)}},
        "per_layer_config=.* must hold head_dim and num_key_value_heads of layers, and nothing",
    ),
    (
        GEMMA_4_31B,
        {"per_layer_config": {str(layer): {"head_dim": 128} for layer in range(5, 60, 6)}},
        "global_head_dim=512 contradicts per_layer_config, by which head_dim is 128",
    ),
    (GPT_OSS_20B, {"experts_per_token": 2}, "experts_per_token=2 contradicts num_experts_per_tok"),
    (GPT_OSS_20B, {"swiglu_limit": 6.0}, "swiglu_limit=6.0"),
    (GPT_OSS_20B, {"sliding_window": None}, "sliding_window is missing"),
    (QWEN3_8B, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention="),
]


@pytest.mark.parametrize(("published", "change", "message"), REFUSED, ids=[next(iter(c)) for _, c, _ in REFUSED])
def test_what_is_not_understood_is_refused_by_name(published, change, message):
    family = family_of(published["architectures"][0])
    with pytest.raises(UserError, match=message) as refusal:
        family.architecture({**published, **change})
    assert str(refusal.value).startswith("config.json: ") and "\n" not in str(refusal.value)


def test_registry_names_what_is_wrong_with_a_folder(tmp_path):
    def refused(match, text=None):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=match):
            read_architecture(tmp_path)

    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        read_architecture(tmp_path / "nowhere")
    refused("has no config.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(f"holds an adapter .* lora.init={re.escape(str(tmp_path))} .* merge it into its model")
    refused("holds an adapter .* lora.init=.* merge it into its model", '{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "adapter_config.json").unlink()
    refused("is not valid JSON", "{")
    refused("must hold a JSON object, not list", "[]")
    refused("architectures=None must be a list of one name; known are LlamaForCausalLM, Mistral", "{}")
    for name, why in (
        ("DeepseekV32ForCausalLM", "DSA"), ("GlmMoeDsaForCausalLM", "DSA"), ("Glm5NextForCausalLM", "Delta Attention"),
        ("DeepseekV4ForCausalLM", "hyper-connections"), ("KimiLinearForCausalLM", "Delta Attention"),
        ("KimiK3ForConditionalGeneration", "Delta Attention"), ("KimiK25ForConditionalGeneration", "int4"),
        ("Kimi_K25ForConditionalGeneration", "int4"), ("MiMoV2ForCausalLM", "MiMo-V2-Flash alone"),
        ("MiniMaxM3SparseForConditionalGeneration", "indexer"),
    ):  # fmt: skip
        refused(rf"architectures={name} is not supported: .*{why}", json.dumps({"architectures": [name]}))
    refused("did you mean Qwen3MoeForCausalLM", json.dumps({"architectures": ["Qwen2MoeForCausalLM"]}))
    refused(f"{tmp_path}/config.json: mlp_bias=True", json.dumps({**LLAMA_31_8B, "mlp_bias": True}))


@pytest.mark.parametrize(
    ("family", "published", "absent", "of", "value"),
    [
        (glm4_moe, GLM_45_AIR, "partial_rotary_factor", "rotary_dim", 64),
        (glm4_moe_lite, GLM_47_FLASH, "first_k_dense_replace", "sparse", (False,) + (True,) * 46),
        (gpt_oss, GPT_OSS_20B, "layer_types", "windows", [128, None] * 12),
        (mimo_v2_flash, MIMO_V2_FLASH, "attention_value_scale", "value_scale", 0.707),
        (minimax_m2, MINIMAX_M2, "rotary_dim", "rotary_dim", 128),
        (minimax_m2, MINIMAX_M2, "rope_theta", "rope", Rope(5e6)),
        (mistral, MISTRAL_7B, "layer_types", "windows", [4096] * 32),
        (mixtral, MIXTRAL_8X7B, "rope_theta", "rope", Rope(1e6)),
        (qwen3, QWEN3_8B, "head_dim", "head_dim", 128),
        (qwen3_moe, QWEN3_30B_A3B, "rope_theta", "rope", Rope(1e4)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_absent_field_means_what_transformers_takes(family, published, absent, of, value):
    """The numbers are the defaults of its configuration classes; some differ from those of Llama."""
    config = {name: v for name, v in published.items() if name != absent}
    arch = family.architecture(config)
    found = {"windows": windows(arch), "sparse": arch.sparse}
    assert found.get(of, getattr(attention_of(arch), of, None)) == value


def test_experts_are_not_normalized_unless_the_file_says_so():
    assert qwen3_moe.architecture(QWEN3_30B_A3B).experts.normalize
    config = {name: value for name, value in QWEN3_30B_A3B.items() if name != "norm_topk_prob"}
    assert not qwen3_moe.architecture(config).experts.normalize


def test_mscale_changes_the_softmax_of_latent_attention_only():
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    latent = attention_of(deepseek_v3.architecture(DEEPSEEK_V3))
    assert latent.rope.softmax_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert attention_of(llama.architecture({**LLAMA_31_8B, "rope_scaling": yarn})).rope.softmax_factor == 1.0
