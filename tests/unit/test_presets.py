"""The presets for clusters are legal for the models they are made for, on the GPUs that they name."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from support.models import published
from support.plans.planned_presets import Preset, architecture, cluster_presets

from isoloss.engine.config import rules
from isoloss.engine.memory.limits import GIB
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.factors import num_factors
from isoloss.models.weights.weight_map import num_parameters
from isoloss.recipes.launch import compose_config

EVERY = cluster_presets()
OF_RL = cluster_presets("grpo", "dapo")


@pytest.mark.parametrize("preset", EVERY, ids=str)
def test_a_preset_is_legal(preset, tmp_path):
    """On every number of GPUs that it claims, with a whole number of sequences for every rank."""
    config, arch = preset.config(tmp_path / "model"), architecture(tmp_path / "model")
    assert preset.claims
    for claim in preset.claims:
        layout = config.parallel.layout().with_world(claim.gpus)
        rules.check(config, arch, layout)
        assert str(layout) == claim.layout
        sequences = config.batch.global_size
        if isinstance(config, RLConfig):
            sequences = sequences * config.rollout.num_generations // config.algorithm.minibatches
        assert sequences % layout.dp == 0 and sequences // layout.dp >= layout.pp


@pytest.mark.parametrize("preset", [preset for preset in EVERY if preset.size == "8b"], ids=str)
def test_an_8b_preset_is_legal_for_llama_too(preset, tmp_path):
    config = preset.config(tmp_path, model=published.LLAMA_8B)
    for claim in preset.claims:
        rules.check(config, read_architecture(tmp_path), config.parallel.layout().with_world(claim.gpus))


@pytest.mark.parametrize("preset", OF_RL, ids=str)
def test_a_prompt_and_its_completion_fit_everywhere(preset, tmp_path):
    config = preset.config(tmp_path)
    assert isinstance(config, RLConfig)
    assert config.rollout.backend == ("megatron" if preset.name.endswith("_1gpu") else "sglang")
    assert config.data.max_length - config.rollout.max_new_tokens >= 1024
    assert config.data.max_length <= min(config.batch.max_tokens, architecture(tmp_path).max_positions)


@pytest.mark.parametrize("preset", OF_RL, ids=str)
def test_servers_on_the_same_gpus_get_the_weights_by_handles(preset, tmp_path):
    """And they have one node: handles to memory reach no other."""
    rollout = preset.config(tmp_path).rollout
    assert rollout.colocated == ("_colocated_" in preset.name)
    assert rollout.weight_sync == ("tensor" if rollout.colocated else "broadcast")
    assert not rollout.colocated or [claim.gpus for claim in preset.claims] == [8]


@pytest.mark.parametrize("preset", [preset for preset in OF_RL if preset.name.endswith("_1gpu")], ids=str)
def test_the_cache_fits_beside_the_model_that_generates(preset, tmp_path):
    """By hand: keys and values of 8 heads of 128 in 36 layers, in bf16, of as many full completions as may run; those
    of a layer once more in fp32; bf16 weights and fp32 gradients, which stay meanwhile."""
    config = preset.config(tmp_path)
    assert isinstance(config, RLConfig)
    cached = config.rollout.concurrency * config.data.max_length * 2 * 8 * 128
    # Under adapters the model has no gradients, and they take 18 bytes a number.
    adapters = num_factors(architecture(tmp_path), config.lora) if config.lora.rank > 0 else 0
    states = (2 if adapters else 6) * num_parameters(architecture(tmp_path)) + 18 * adapters
    assert (states + 36 * 2 * cached + 4 * cached) / GIB <= 74
    assert (states + 36 * 2 * cached) / GIB >= 60  # and more would run than need to wait


# ---- every size on every number of GPUs ------------------------------------------------------------------------------

SIZES = ("8b", "32b", "70b", "30b_a3b")  # 27b and 26b_a4b are for fine-tuning alone
NODES = (8, 16, 32, 64)


@pytest.mark.parametrize("recipe", ("sft", "grpo", "dapo"))
def test_one_gpu_has_a_preset(recipe):
    whole, adapters = [preset for preset in cluster_presets(recipe) if preset.claims[0].gpus == 1]
    assert (whole.name, adapters.name) == ("8b_1gpu", "8b_lora_1gpu")
    assert len(whole.claims) == len(adapters.claims) == 1


@pytest.mark.parametrize("recipe", ("sft", "grpo", "dapo"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gpus", NODES)
def test_there_is_one_preset(recipe, size, gpus):
    """Not counting those for 128k, nor those for adapters."""
    found = [
        str(preset)
        for preset in cluster_presets(recipe)
        if preset.size == size
        and not re.search("_128k_|_lora_", preset.name)
        and gpus in [claim.gpus for claim in preset.claims]
    ]
    assert len(found) == 1, found


@pytest.mark.parametrize("size", ("8b", "32b"))
@pytest.mark.parametrize("gpus", NODES)
def test_there_is_one_preset_for_128k(size, gpus, tmp_path):
    found = [
        preset
        for preset in cluster_presets("sft")
        if preset.name.startswith(f"{size}_128k_") and gpus in [claim.gpus for claim in preset.claims]
    ]
    assert len(found) == 1 and found[0].config(tmp_path).data.max_length == 131072


ADAPTERS = [preset for preset in EVERY if "_lora_" in preset.name]


@pytest.mark.parametrize("preset", ADAPTERS, ids=str)
def test_adapters_take_ten_times_the_learning_rate_and_no_cpu_memory(preset, tmp_path):
    """Of that of the presets for whole models, and fewer GPUs than those without offloading."""
    config = preset.config(tmp_path)
    whole = [each for each in cluster_presets(preset.recipe) if each.size == preset.size and each not in ADAPTERS]
    assert all(each.config(tmp_path).optim.lr == pytest.approx(config.optim.lr / 10) for each in whole) and whole
    assert config.lora.rank == 32 and config.lora.scale(32) == 1 and config.memory.offload_optimizer == 0
    assert config.memory.recompute == "none"
    of_whole = [each for each in whole if each.config(tmp_path).memory.offload_optimizer == 0]
    assert all(claim.gpus > preset.claims[0].gpus for each in of_whole for claim in each.claims)
    assert max(claim.peak for claim in preset.claims) <= 74


def test_adapters_have_a_preset_for_every_size():
    assert [str(preset) for preset in ADAPTERS if preset.recipe == "sft"] == [
        f"sft/{size}_lora_{gpus}"
        for size, gpus in (("30b_a3b", "h100"), ("32b", "h100"), ("70b", "h100"), ("8b", "1gpu"))
    ]


# ---- GRPO and DAPO ---------------------------------------------------------------------------------------------------

# What the paper changes (arXiv 2503.14476, section 3): clip-higher, dynamic sampling, overlong filtering and shaping.
PAPER = {
    "algorithm.clip_high": (0.2, 0.28),
    "algorithm.dynamic_sampling": (False, True),
    "algorithm.mask_truncated": (False, True),
    "algorithm.overlong_buffer": (0, None),  # a quarter of the longest completion, as the paper's 4096 of 16384
}


def flat(config) -> dict[str, Any]:
    groups = {group: values for group, values in asdict(config).items() if isinstance(values, dict)}
    plain = {name: value for name, value in asdict(config).items() if name not in groups}
    return plain | {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}


@pytest.mark.parametrize("name", [preset.name for preset in cluster_presets("grpo")])
def test_dapo_is_grpo_with_the_papers_changes(name, tmp_path):
    grpo, dapo = (flat(Preset(recipe, name).config(tmp_path / "model")) for recipe in ("grpo", "dapo"))
    buffer = dapo["rollout.max_new_tokens"] // 4
    expected = PAPER | {"algorithm.overlong_buffer": (0, buffer)}
    assert {key: (grpo[key], dapo[key]) for key in grpo if grpo[key] != dapo[key]} == expected


@pytest.mark.parametrize("name", [preset.name for preset in cluster_presets("dapo")])
def test_dapo_loses_nothing_of_the_paper(name, tmp_path):
    """Of what the plain preset says; its numbers of tokens and mini-batches are the cluster's business."""
    of_its_size = {"algorithm.minibatches", "algorithm.overlong_buffer", "algorithm.importance"}
    cluster = flat(Preset("dapo", name).config(tmp_path / "model"))
    plain = flat(compose_config("dapo", RLConfig, [f"model.path={tmp_path / 'model'}"])[0])
    groups = ("algorithm.", "loss.")
    different = {key for key in plain if key.startswith(groups) and plain[key] != cluster[key]}
    assert different <= of_its_size


def test_every_grpo_preset_has_a_twin():
    assert [preset.name for preset in cluster_presets("grpo")] == [preset.name for preset in cluster_presets("dapo")]


@pytest.mark.parametrize(
    ("model", "parameters"),
    (
        (published.LLAMA_8B, 8_030_261_248),
        (published.LLAMA_70B, 70_553_706_496),
        (published.QWEN3_8B, 8_190_735_360),
        (published.QWEN3_32B, 32_762_123_264),
        (published.QWEN3_30B_A3B, 30_532_122_624),
    ),
)
def test_the_models_have_the_published_sizes(model, parameters, tmp_path):
    """As their model cards count: what the presets are judged by are these models and no others."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert num_parameters(read_architecture(tmp_path)) == parameters
