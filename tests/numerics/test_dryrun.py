"""A dry run counts the memory that a real run takes."""

import json
import subprocess
import sys

import pytest
from support import families, true_peak

from isoloss.engine.config import Config
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.report import RankReport

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
SIZES |= {"max_position_embeddings": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    (
        ("qwen3", "1", ()),
        ("qwen3", "tp2", ("memory.recompute=selective", "memory.recompute_modules=[mlp,layernorm]")),
        ("qwen3", "pp2+vpp2", ("memory.recompute=full",)),
        ("qwen3", "ulysses2+ring2", ("memory.recompute=selective",)),
        ("qwen3", "pp2+dp2", ("train.precision=bf16",)),
        ("qwen3-moe", "ep2+dp2", ()),
        ("qwen3-moe", "tp2+ep2", ("memory.recompute=full", "memory.recompute_layers=2")),
    ),
)
def test_the_peak_is_that_of_a_real_run(pool, tmp_path, family, layout, overrides):
    model = tmp_path / "model"
    model.mkdir()
    changes = SIZES | (EXPERTS if family == "qwen3-moe" else {})
    (model / "config.json").write_text(json.dumps(families.published(family, **changes)))
    degrees = Layout.parse(layout)
    axes = ("tp", "pp", "vpp", "ulysses", "ring", "ep")
    given = [f"model.path={model}", "model.from_scratch=true", "batch.max_tokens=2048", "data.max_length=2048"]
    given += [f"parallel.{axis}={getattr(degrees, axis)}" for axis in axes] + [*overrides]
    config = compose_config("sft", Config, given)[0]
    true = pool.run(degrees.world_size, true_peak.peaks, config)
    for rank in range(0, degrees.world_size, max(1, degrees.world_size // degrees.pp)):
        command = [sys.executable, "-m", "isoloss.tools.dryrun.rank", "sft", str(degrees.world_size), str(rank)]
        subprocess.run([*command, str(tmp_path / "report.json"), "--kernels", "cpu", *given], check=True)
        planned = RankReport.loads((tmp_path / "report.json").read_text()).peak.peak
        assert planned == pytest.approx(true[rank][0], rel=0.05)
        if degrees.world_size == 1:
            assert planned == pytest.approx(true[rank][1], rel=0.01)
