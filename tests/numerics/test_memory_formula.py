"""The formula of a step's memory gives what a dry run counts."""

import json

import pytest
from support import dry_runs, published
from support.asked import asked_for

from isoloss.engine.config import Config
from isoloss.engine.memory_formula import step_memory
from isoloss.models.families.registry import read_architecture
from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.report import RankReport

# Fewer layers than are published, which the formula multiplies by.
FEWER = {"num_hidden_layers": 8, "max_position_embeddings": 262144}
MODELS = {
    "8b": published.QWEN3_8B | FEWER,
    "32b": published.QWEN3_32B | FEWER,
    "30b-a3b": published.QWEN3_30B_A3B | FEWER,
    "70b": published.LLAMA_70B | {"num_hidden_layers": 16},
}
KEEP, FULL = "memory.recompute=none", "memory.recompute=full"
ROWS = (
    ("8b", 8, 0, "parallel.tp=2", KEEP),
    ("8b", 8, 0, "parallel.tp=1", FULL),
    ("8b", 64, 0, "parallel.tp=4", "memory.recompute=selective", "memory.recompute_modules=[layernorm,mlp]"),
    ("8b", 8, 0, "parallel.tp=2", FULL, "memory.recompute_layers=3"),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ulysses=4", "parallel.ring=2", "batch.max_tokens=131072", FULL),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ulysses=4", "batch.max_tokens=65536", KEEP),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ring=4", "batch.max_tokens=65536", KEEP),
    ("32b", 16, 0, "parallel.tp=8", "parallel.pp=2", KEEP),
    ("32b", 16, 8, "parallel.tp=8", "parallel.pp=2", KEEP),
    ("32b", 16, 0, "parallel.tp=8", "parallel.pp=2", "parallel.vpp=2", KEEP),
    ("70b", 32, 8, "parallel.tp=8", "parallel.pp=4", "parallel.vpp=2", KEEP),
    ("70b", 32, 24, "parallel.tp=8", "parallel.pp=4", "parallel.vpp=2", KEEP),
    ("30b-a3b", 16, 0, "parallel.ep=8", KEEP),
    ("30b-a3b", 16, 0, "parallel.ep=8", "memory.recompute=selective", "memory.recompute_modules=[layernorm,moe]"),
    ("30b-a3b", 16, 0, "parallel.ep=8", "parallel.tp=2", FULL),
    ("30b-a3b", 16, 0, "parallel.ep=4", "parallel.tp=2", "parallel.etp=2", KEEP),
)


NAMES = {"-".join(map(str, row)): row for row in ROWS}


@pytest.fixture(scope="module")
def planned(request, tmp_path_factory) -> dict[str, tuple[dry_runs.Row, RankReport]]:
    """By name, the rows that tests ask for and their dry runs."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    asked = asked_for(request)
    rows = {
        name: dry_runs.Row("sft", overrides(folder, model, keys), world, rank)
        for name, (model, world, rank, *keys) in NAMES.items()
        if name in asked
    }
    return dict(zip(rows, zip(rows.values(), dry_runs.in_a_process([*rows.values()], folder / "rows.json"))))


def overrides(folder, name, keys):
    return [f"model.path={folder / name}", "train.precision=bf16", "batch.max_tokens=8192", *keys]


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_a_dry_run_counts(planned, name):
    row, report = planned[name]
    config = compose_config("sft", Config, row.overrides)[0]
    layout = config.parallel.layout().with_world(row.world)
    stage = step_memory(config, read_architecture(config.model.path), layout)[report.stage]
    kinds = report.peak.peak_kinds
    resident = kinds["weights"] + kinds["gradients"] + kinds["optimizer"]
    assert stage.weights + stage.gradients + stage.optimizer == pytest.approx(resident, rel=0.001)
    assert stage.peak == pytest.approx(report.peak.peak, rel=0.03)
