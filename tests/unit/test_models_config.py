"""config.json, in both spellings, to an Architecture; and every field that is not understood refused by name."""

import json

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from isoloss.models import llama, qwen2, qwen3
from isoloss.models.architecture import Architecture, LinearScaling, Llama3Scaling, Rope
from isoloss.models.registry import FAMILIES, read_architecture
from isoloss.models.weights import num_parameters
from isoloss.parallel.errors import UserError

# As published on the hub, by transformers 4.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
HUB = [(llama, LLAMA_31_8B, LlamaConfig), (qwen2, QWEN25_7B, Qwen2Config), (qwen3, QWEN3_8B, Qwen3Config)]
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
          "original_max_position_embeddings": 512, "rope_theta": 500000.0}  # fmt: skip


def test_llama_31_8b_as_published():
    assert llama.architecture(LLAMA_31_8B) == Architecture(
        family="llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, norm_eps=1e-5,
        rope=Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)), qkv_bias=False, qk_norm=False, tie_embeddings=False,
        max_positions=131072, dtype="bfloat16", rotary_dim=128,
    )  # fmt: skip


def test_qwen_as_published():
    arch = qwen2.architecture(QWEN25_7B)
    assert (arch.head_dim, arch.num_kv_heads, arch.rope) == (128, 4, Rope(1e6))
    assert arch.qkv_bias and not arch.qk_norm
    arch = qwen3.architecture(QWEN3_8B)
    assert (arch.head_dim, arch.num_kv_heads, arch.rope) == (128, 8, Rope(1e6))
    assert arch.qk_norm and not arch.qkv_bias


@pytest.mark.parametrize(("published", "billions"), [(LLAMA_31_8B, 8.030261248), (QWEN25_7B, 7.615616512),
                                                     (QWEN3_8B, 8.190735360)])  # fmt: skip
def test_number_of_parameters_is_the_published_one(published, billions):
    assert num_parameters(FAMILIES[published["architectures"][0]].architecture(published)) == round(billions * 1e9)


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
    assert arch.rope == Rope(10000.0)
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
    inv_freq = llama.architecture(config.to_dict()).rope.inv_freq(head_dim)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
    assert torch.equal(inv_freq, expected)


def test_old_spelling_of_linear_scaling():
    arch = llama.architecture({**LLAMA_31_8B, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert arch.rope == Rope(500000.0, LinearScaling(2.0))


def test_absent_kv_heads_mean_multi_head_attention_for_llama_only():
    assert llama.architecture({k: v for k, v in LLAMA_31_8B.items() if k != "num_key_value_heads"}).num_kv_heads == 32
    with pytest.raises(UserError, match="num_key_value_heads is missing"):
        qwen2.architecture({k: v for k, v in QWEN25_7B.items() if k != "num_key_value_heads"})


REFUSED = [
    (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act='gelu' .* only 'silu' is"),
    (LLAMA_31_8B, {"attention_bias": True}, "attention_bias=True"),
    (LLAMA_31_8B, {"mlp_bias": True}, "mlp_bias=True"),
    (LLAMA_31_8B, {"pretraining_tp": 2}, "pretraining_tp=2"),
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
    (QWEN3_8B, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention="),
]


@pytest.mark.parametrize(("published", "change", "message"), REFUSED, ids=[next(iter(c)) for _, c, _ in REFUSED])
def test_what_is_not_understood_is_refused_by_name(published, change, message):
    family = FAMILIES[published["architectures"][0]]
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
    refused("is not valid JSON", "{")
    refused("must hold a JSON object, not list", "[]")
    refused("architectures=None must be a list of one name; known are LlamaForCausalLM, Mistral", "{}")
    refused("did you mean Qwen3MoeForCausalLM", json.dumps({"architectures": ["Qwen2MoeForCausalLM"]}))
    refused(f"{tmp_path}/config.json: mlp_bias=True", json.dumps({**LLAMA_31_8B, "mlp_bias": True}))
