"""A dry run counts the memory that a real run takes."""

import json

import pytest
from numerics import true_peak
from support.models import families
from support.plans import dry_runs
from support.plans.asked import asked_for

from isoloss.engine.config.schema import Config
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan.report import RankReport

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
SIZES |= {"max_position_embeddings": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
MODELS = {"qwen3": SIZES, "qwen3-moe": SIZES | EXPERTS}
ROWS = (
    ("qwen3", "1"),
    ("qwen3", "tp2", "memory.recompute=selective", "memory.recompute_modules=[mlp,layernorm]"),
    ("qwen3", "pp2+vpp2", "memory.recompute=full"),
    ("qwen3", "ulysses2+ring2", "memory.recompute=selective"),
    # Shorter: a CPU without instructions for bf16 takes ten times as long for its products.
    ("qwen3", "pp2+dp2", "train.precision=bf16", "batch.max_tokens=256", "data.max_length=256"),
    ("qwen3-moe", "ep2+dp2"),
    ("qwen3-moe", "tp2+ep2", "memory.recompute=full", "memory.recompute_layers=2"),
)
NAMES = {"-".join(row): row for row in ROWS}


@pytest.fixture(scope="module")
def planned(request, tmp_path_factory) -> dict[str, tuple[list[str], dict[int, RankReport]]]:
    """By name, the keys of the rows that tests ask for, and their dry runs of the first rank of every stage."""
    folder = tmp_path_factory.mktemp("models")
    for family, changes in MODELS.items():
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps(families.published(family, **changes)))
    given = {name: overrides(folder, *NAMES[name]) for name in NAMES if name in asked_for(request)}
    rows = {
        (name, rank): dry_runs.Row("sft", keys, layout.world_size, rank, kernels="cpu")
        for name, keys in given.items()
        for layout in [Layout.parse(NAMES[name][1])]
        for rank in range(0, layout.world_size, layout.world_size // layout.pp)
    }
    reports = dict(zip(rows, dry_runs.in_a_process([*rows.values()], folder / "rows.json"), strict=True))
    return {
        name: (keys, {rank: report for (of, rank), report in reports.items() if of == name})
        for name, keys in given.items()
    }


def overrides(folder, family, layout, *keys):
    degrees = Layout.parse(layout)
    axes = [f"parallel.{axis}={getattr(degrees, axis)}" for axis in ("tp", "pp", "vpp", "ulysses", "ring", "ep")]
    sizes = ["batch.max_tokens=2048", "data.max_length=2048"]
    return [f"model.path={folder / family}", "model.from_scratch=true", *sizes, *axes, *keys]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_that_of_a_real_run(planned, pool, name):
    given, reports = planned[name]
    world = Layout.parse(NAMES[name][1]).world_size
    true = pool.run(world, true_peak.peaks, compose_config("sft", Config, given)[0])
    rel = 0.05 if NAMES[name][0] == "qwen3-moe" else 0.01  # which experts tokens choose decides what is kept of them
    for rank, report in reports.items():
        assert report.peak.peak == pytest.approx(true[rank][0], rel=rel)
        if world == 1:
            assert report.peak.peak == pytest.approx(true[rank][1], rel=0.01)


@pytest.mark.parametrize("in_one", (False, True), ids=("one by one", "residual_norm"))
def test_norms_are_counted_as_torch_runs_them_on_a_gpu(tmp_path, in_one):
    """One kernel forth and two back."""
    layers, heads, groups, width, head = 4, 8, 2, SIZES["hidden_size"], SIZES["head_dim"]
    config = families.published("qwen3", **SIZES, num_attention_heads=heads, num_key_value_heads=groups)
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").write_text(json.dumps(config))
    tokens = 16384
    keys = ["train.precision=bf16", f"batch.max_tokens={tokens}", f"data.max_length={tokens}"]
    row = dry_runs.Row("sft", [*overrides(tmp_path, "qwen3", "1"), *keys, f"kernels.residual_norm={in_one}"], 1, 0)
    (report,) = dry_runs.in_a_process([row], tmp_path / "rows.json")
    phase, batches = report.phase("forward and backward"), report.micro_batches
    whole = layers * (1 if in_one else 2) + 1  # norms of the residual stream, and the final one
    counts = {"rms_norm": whole + 2 * layers, "rms_norm_input_gradient": whole + 2 * layers}
    counts |= {"rms_norm_weight_gradients": whole + 2 * layers}
    fused = ("add_and_norm", "add_and_norm_backward", "aten._fused_rms_norm_backward")
    assert {name: phase.launches[name] for name in counts} == {name: batches * counts[name] for name in counts}
    assert [phase.launches.get(name, 0) for name in fused] == [batches * layers * in_one] * 3
    elements = batches * tokens * (whole * width + layers * (heads + groups) * head)
    rows = batches * tokens * (whole + layers * (heads + groups))
    weights = batches * 2 * (whole * width + 2 * layers * head)
    assert phase.traffic["rms_norm"] == 2 * 2 * elements + 4 * rows + weights
    assert phase.traffic["rms_norm_input_gradient"] == 3 * 2 * elements + 4 * rows + weights
