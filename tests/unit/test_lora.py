"""Adapters before a model exists: targets, names, shapes and scale of factors, and what is refused by name."""

import dataclasses
import math

import pytest
import torch
from support.models.families import published, write_config

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from isoloss.engine.rl.config import RLConfig, RLDataConfig, RolloutConfig
from isoloss.models.families import deepseek_v3, qwen3, qwen3_moe
from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map
from isoloss.models.lora.initial import InitialFactors
from isoloss.parallel import Layout, UserError

DENSE = qwen3.architecture(published("qwen3", num_hidden_layers=1))
SPARSE = qwen3_moe.architecture(published("qwen3-moe", num_hidden_layers=1))


def targets(arch, *names: str) -> set[str]:
    factors = adapter_map(arch, LoraConfig(rank=2, targets=names))
    return {part.tensor.removeprefix("model.layers.0.") for each in factors for part in each.a.parts}


ATTENTION = {f"self_attn.{name}_proj.lora_A.weight" for name in "qkvo"}
EXPERTS = {f"mlp.experts.{e}.{name}_proj.lora_A.weight" for e in range(6) for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("arch", "names", "wanted"),
    [
        (DENSE, ("attention",), ATTENTION),
        (DENSE, ("mlp",), {f"mlp.{name}_proj.lora_A.weight" for name in ("gate", "up", "down")}),
        (DENSE, ("o_proj", "down_proj"), {"self_attn.o_proj.lora_A.weight", "mlp.down_proj.lora_A.weight"}),
        (SPARSE, ("experts",), EXPERTS),
        (SPARSE, ("all",), ATTENTION | EXPERTS),
    ],
)
def test_targets(arch, names, wanted):
    assert targets(arch, *names) == wanted


@pytest.mark.parametrize(
    ("arch", "names", "says"),
    [
        (DENSE, ("q_proj",), r"names a part of q_proj, k_proj, v_proj.*: add k_proj, v_proj"),
        (DENSE, ("q_porj",), r"names 'q_porj', which this model has no matrix for: use some of q_proj, .*, down_proj"),
        (DENSE, ("experts",), r"names nothing that this model has; use all"),
        (SPARSE, ("gate_proj", "o_proj"), r"names a part of gate_proj, up_proj.*: add up_proj"),
    ],
)
def test_targets_that_cannot_be(arch, names, says):
    with pytest.raises(UserError, match=says):
        targets(arch, *names)


def test_factors_of_a_merged_weight():
    """One A for each tensor, one below the other; B has the rows of q, k and v as Megatron's matrix has them."""
    qkv = adapter_map(DENSE, LoraConfig(rank=2, targets=("attention",)))[0]
    attention = DENSE.layers[0].attention
    d, per_group, groups = attention.head_dim, attention.heads // attention.kv_heads, attention.kv_heads
    assert qkv.a.shape == (6, DENSE.hidden_size) and qkv.b.shape == (qkv.base.shape[0], 2)
    by_hand = groups * (per_group * d * [0] + d * [1] + d * [2])
    assert qkv.part_of_rows(1, 0).tolist() == by_hand
    assert qkv.part_of_rows(2, 1).tolist() == by_hand[len(by_hand) // 2 :]
    parts = [torch.rand(part.shape) for part in qkv.b.parts]
    assert all(map(torch.equal, qkv.b.mapping.split(qkv.b.mapping.merge(parts)), parts))


def test_scale_and_ranks():
    """alpha / r, or alpha / sqrt(r) of rsLoRA, with the rank of the experts where they have their own."""
    factors = adapter_map(SPARSE, LoraConfig(rank=4, expert_rank=2, alpha=8.0, scaling="sqrt-rank"))
    assert {(each.base.expert is not None, each.rank, each.scale) for each in factors} == {
        (False, 4, 4.0), (True, 2, 8 / math.sqrt(2)),
    }  # fmt: skip
    assert LoraConfig(rank=4, alpha=8.0).scale(4) == 2.0


def test_initial_factors():
    """A is uniform within 1 / sqrt(in) and its own for each tensor and seed; B is 0."""
    qkv = adapter_map(DENSE, LoraConfig(rank=64, targets=("attention",)))[0]
    a, other = (InitialFactors(seed).whole(qkv.a) for seed in (0, 1))
    bound = DENSE.hidden_size**-0.5
    assert a.abs().max() <= bound and a.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(a[:64], a[64:128]) and not torch.equal(a, other)
    assert not InitialFactors(0).whole(qkv.b).any()


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        (DENSE, {"model": ModelConfig("x", transformer_engine=True)}, "computes? no adapters|needs the package"),
        (DENSE, {"lora": LoraConfig(rank=2, expert_rank=1)}, "lora.expert_rank=1 is for experts"),
        (DENSE, {"parallel": ParallelConfig(gradient_accumulation_fusion=True)}, "fusion=true is for weights of the"),
        (
            DENSE,
            {"parallel": ParallelConfig(overlap_param_gather=True)},
            "lora.rank. are gathered at once",
        ),
        (
            SPARSE,
            {"train": TrainConfig(precision="bf16")},
            "needs rows of 16 bytes, and adapters of experts have rank 2",
        ),
    ],
)
def test_what_an_adapter_cannot_do(arch, changes, says):
    config = dataclasses.replace(Config(ModelConfig("x"), lora=LoraConfig(rank=2)), **changes)
    with pytest.raises(UserError, match=says):
        rules.check(config, arch, Layout())


@pytest.mark.parametrize(
    ("layout", "layers", "stage"),
    [
        (Layout(pp=2), (1, 3), 0),
        (Layout(pp=2), (2, 2), None),
        (Layout(pp=2, vpp=2), (1, 1, 1, 1), None),  # of the two stages of the first rank one has experts
        (Layout(pp=4), (), 0),
    ],
)
def test_a_pipeline_stage_without_adapters_is_refused(layout, layers, stage):
    """One dense layer, and three with experts, which alone have adapters."""
    arch = deepseek_v3.architecture(published("deepseek-v3", num_hidden_layers=4, first_k_dense_replace=1))
    lora, parallel = LoraConfig(rank=2, targets=("experts",)), ParallelConfig(stage_layers=layers)
    config = Config(ModelConfig("x"), lora=lora, parallel=parallel)
    if stage is None:
        rules.check(config, arch, layout)
        return
    with pytest.raises(UserError, match=rf"lora.targets=\[experts\] gives no .* stage {stage}.*name more, such as all"):
        rules.check(config, arch, layout)


def test_a_frozen_model_moves_no_selection_bias():
    arch = SPARSE.with_layers(
        lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, selection_bias=True))
    )
    config = Config(ModelConfig("x"), lora=LoraConfig(rank=2), moe=MoeConfig(bias_update_rate=1e-3))
    with pytest.raises(UserError, match=r"bias_update_rate=0.001 moves selection biases of the model, which is frozen"):
        rules.check(config, arch, Layout())


@pytest.mark.parametrize(
    "key", ({"seed": 1}, {"expert_rank": 4}, {"alpha": 16.0}, {"scaling": "sqrt-rank"}, {"targets": ("mlp",)})
)
def test_keys_without_a_rank(key):
    with pytest.raises(UserError, match=r"is for adapters: set lora.rank"):
        LoraConfig(**key)


SERVED_BY_SGLANG = {
    "all of a dense model": ("qwen3", {}, None),
    "attention of a sparse one": ("qwen3-moe", {"targets": ("attention",)}, None),
    "experts": ("qwen3-moe", {}, r"lora\.targets=.* adapts experts.*set lora\.targets=\[attention\]"),
    "a rank of experts": ("qwen3-moe", {"expert_rank": 4}, r"lora\.targets=.*set lora\.targets=\[attention\]"),
    "shared experts": ("glm-4.5", {"targets": ("mlp",)}, r"lora\.targets=.*set lora\.targets=\[attention\]"),
    "experts in one tensor": ("gpt-oss", {}, r"lora\.rank=2 trains an adapter of gpt_oss.*rollout\.backend=megatron"),
    "Gated DeltaNet": ("qwen3.5", {}, r"lora\.rank=2 trains an adapter of qwen3_5_text"),
    "latents": ("deepseek-v3", {"targets": ("attention",)}, r"lora\.rank=2 trains an adapter of deepseek_v3"),
}


@pytest.mark.parametrize("row", SERVED_BY_SGLANG)
def test_what_sglang_would_not_serve_is_refused(row, tmp_path):
    """It would skip what it does not read, and answer by the rest. The same adapter is trained without its servers."""
    family, lora, says = SERVED_BY_SGLANG[row]
    arch = read_architecture(write_config(tmp_path / "model", published(family)))
    rollout = RolloutConfig(backend="sglang", servers=("http://127.0.0.1:9",))
    config = RLConfig(
        ModelConfig("x"), lora=LoraConfig(rank=2, **lora), data=RLDataConfig(max_length=8), rollout=rollout
    )
    rules.check(dataclasses.replace(config, rollout=RolloutConfig()), arch, Layout())
    if says is None:
        return rules.check(config, arch, Layout())
    with pytest.raises(UserError, match=says):
        rules.check(config, arch, Layout())


@pytest.mark.parametrize(
    "change",
    ({"alpha": 8.0}, {"scaling": "sqrt-rank"}, {"rank": 3}, {"targets": ("mlp",)}, {"expert_rank": 1}, {"seed": 7}),
)
def test_a_resumed_run_has_the_adapter_that_it_had(change):
    config = Config(ModelConfig("x"), lora=LoraConfig(rank=2))
    changed = dataclasses.replace(config, lora=dataclasses.replace(config.lora, **change))
    (key,) = change
    before, now = config.resume_fingerprint(), changed.resume_fingerprint()
    assert {name for name in now if now[name] != before[name]} == {f"lora.{key}"}
    plain = dataclasses.replace(config, lora=LoraConfig())
    assert not any(name.startswith("lora.") for name in plain.resume_fingerprint())
