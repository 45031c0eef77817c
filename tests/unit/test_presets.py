"""The presets for clusters are legal for the models they are made for, on the nodes that they name."""

import json
from dataclasses import replace

import pytest

from isoloss.engine import compatibility
from isoloss.engine.config import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.weight_map import num_parameters
from isoloss.recipes.launch import CONF, compose_config, presets

COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072, "head_dim": 128}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
QWEN3 = COMMON | {"vocab_size": 151936, "tie_word_embeddings": False}
LLAMA_8B = LLAMA | {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64
}  # fmt: skip
QWEN3_32B = QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
    "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_30B_A3B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
MADE_FOR = {
    "8b_h100": (LLAMA_8B, 8),
    "8b_128k_h100": (LLAMA_8B, 16),
    "32b_h100": (QWEN3_32B, 16),
    "70b_h100": (LLAMA_70B, 32),
    "30b_a3b_h100": (QWEN3_30B_A3B, 16),
}


@pytest.mark.parametrize("preset", MADE_FOR)
def test_a_preset_is_legal(preset, tmp_path):
    model, gpus = MADE_FOR[preset]
    (tmp_path / "config.json").write_text(json.dumps(model))
    config, _, _ = compose_config(
        "sft", Config, [f"preset={preset}", f"model.path={tmp_path}", "data.train=[rows.jsonl]"]
    )
    layout = config.parallel.layout().with_world(gpus)
    compatibility.check(config, read_architecture(tmp_path), layout)
    assert layout.world_size == gpus


# Of reinforcement learning: the model, GPUs that train, tp x pp x dp on them, SGLang servers and GPUs of each.
RL_MADE_FOR = {
    "8b_h100": (LLAMA_8B, 8, (2, 1, 4)),
    "32b_h100": (QWEN3_32B, 64, (8, 2, 4)),
}
SERVERS = ["reward.function=[exact_match]", "rollout.servers=[http://node1:30000]"]


def rl_preset(recipe: str, preset: str, model: dict, folder, *more: str) -> RLConfig:
    (folder / "config.json").write_text(json.dumps(model))
    given = [f"preset={preset}", f"model.path={folder}", "data.train=[rows.jsonl]", *SERVERS, *more]
    return compose_config(recipe, RLConfig, given)[0]


@pytest.mark.parametrize("recipe", ("grpo", "dapo"))
@pytest.mark.parametrize("preset", RL_MADE_FOR)
def test_a_preset_of_reinforcement_learning_is_legal(recipe, preset, tmp_path):
    """The layout has the sizes that the file's first lines name, and a prompt and its completion fit everywhere."""
    model, gpus, (tp, pp, dp) = RL_MADE_FOR[preset]
    config = rl_preset(recipe, preset, model, tmp_path)
    arch = read_architecture(tmp_path)
    layout = config.parallel.layout().with_world(gpus)
    compatibility.check(config, arch, layout)
    assert (layout.tp, layout.pp, layout.dp, layout.world_size) == (tp, pp, dp, gpus)
    assert config.train.precision == "bf16" and config.rollout.backend == "sglang"
    room = config.data.max_length - config.rollout.max_new_tokens
    assert room >= 1024 and config.data.max_length <= min(config.batch.max_tokens, arch.max_positions)
    of_a_step = config.batch.global_size * config.rollout.num_generations // config.algorithm.minibatches
    assert of_a_step % dp == 0 and of_a_step >= 16 * dp
    text = (CONF / recipe / "preset" / f"{preset}.yaml").read_text()
    assert f"tp {tp}" in text and f"dp {dp}" in text and (pp == 1 or f"pp {pp}" in text)


@pytest.mark.parametrize("recipe", ("grpo", "dapo"))
def test_the_32b_preset_does_with_two_nodes_that_train(recipe, tmp_path):
    config = rl_preset(recipe, "32b_h100", QWEN3_32B, tmp_path)
    layout = config.parallel.layout().with_world(16)
    compatibility.check(config, read_architecture(tmp_path), layout)
    assert layout.dp == 1


@pytest.mark.parametrize("preset", RL_MADE_FOR)
def test_dapo_is_grpo_with_the_papers_changes(preset, tmp_path):
    """Clip-higher, dynamic sampling, a buffer for overlong completions, and their mask; arXiv 2503.14476, section 3."""
    model = RL_MADE_FOR[preset][0]
    grpo, dapo = (rl_preset(recipe, preset, model, tmp_path) for recipe in ("grpo", "dapo"))
    buffer = dapo.algorithm.overlong_buffer
    assert buffer * 4 == dapo.rollout.max_new_tokens  # the paper: 4096 of 16384
    papers = replace(grpo.algorithm, clip_high=0.28, dynamic_sampling=True, overlong_buffer=buffer, mask_truncated=True)
    assert replace(grpo, algorithm=papers) == dapo
    assert (grpo.algorithm.clip_high, grpo.algorithm.dynamic_sampling, grpo.algorithm.overlong_buffer) == (
        0.2,
        False,
        0,
    )


def test_every_preset_of_a_cluster_is_checked():
    for recipe, checked in (("sft", MADE_FOR), ("grpo", RL_MADE_FOR), ("dapo", RL_MADE_FOR)):
        assert {name for name in presets(recipe) if name.endswith("h100")} == checked.keys()


@pytest.mark.parametrize(
    ("model", "parameters"),
    (
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (QWEN3_32B, 32_762_123_264),
        (QWEN3_30B_A3B, 30_532_122_624),
    ),
)
def test_the_models_have_the_published_sizes(model, parameters, tmp_path):
    """As their model cards count: what the presets are judged by are these models and no others."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert num_parameters(read_architecture(tmp_path)) == parameters
