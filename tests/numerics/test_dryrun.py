"""A dry run counts the memory that a real run takes."""

import json

import pytest
from support import dry_runs, families, true_peak
from support.asked import asked_for

from isoloss.engine.config import Config
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.report import RankReport

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
