"""The table of what cannot be run: no rule of it is dead, and what it lets pass Megatron-Core builds."""

import itertools
from pathlib import Path

import pytest
import torch
from support import impossible

from isoloss.engine import compatibility
from isoloss.engine.compatibility.rule import Rule, Setup
from isoloss.engine.config import RECOMPUTE_MODULES, Config, MemoryConfig, ModelConfig, ParallelConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.build import transformer_config
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout, UserError
from isoloss.recipes.launch import compose_config


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    impossible.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def broken(models) -> dict[impossible.Impossible, Rule | None]:
    return {row: broken_rule(row, models) for row in impossible.ROWS}


def broken_rule(row: impossible.Impossible, models: Path) -> Rule | None:
    """The rule that refuses a row; None where the configuration or the layout by itself is refused."""
    config_class = RLConfig if row.recipe == "grpo" else Config
    try:
        config, _, _ = compose_config(row.recipe, config_class, [f"model.path={models / row.model}", *row.overrides])
        layout = config.parallel.layout().with_world(row.world)
    except UserError:
        return None
    arch = read_architecture(config.model.path)
    setup = Setup(config, arch.as_critic() if row.recipe == "grpo" else arch, layout)
    return next(rule for rule in compatibility.RULES if rule.broken(setup))


def test_every_rule_is_broken_by_some_row(broken):
    told = {id(rule) for rule in broken.values()}
    # Most about Transformer Engine speak only where it is: tests/te/test_te_rules.py.
    rules = [rule for rule in compatibility.RULES if rule not in compatibility.TRANSFORMER_ENGINE]
    assert not [rule for rule in rules if id(rule) not in told]


def test_the_first_override_is_what_is_refused(broken):
    """Nothing else in a row is impossible: the rule that speaks is the one that the row is about."""
    for row, rule in broken.items():
        assert rule is None or rule.key == row.overrides[0].partition("=")[0], row


MEMORY = (
    *(MemoryConfig("selective", (module,)) for module in RECOMPUTE_MODULES),
    MemoryConfig("selective"),
    MemoryConfig("selective", RECOMPUTE_MODULES),
    *(MemoryConfig("full", recompute_layers=layers) for layers in (None, 1, 3, 9)),
    *(MemoryConfig(recompute, offload_layers=layers) for recompute in ("none", "full") for layers in (1, 4, 9)),
)
LAYOUTS = ("1", "tp2", "tp2+nosp", "tp4", "tp8", "tp3", "pp2", "pp3", "pp2+vpp2", "pp4+vpp2", "ulysses2", "tp2+pp2+ep2",
           "ep4", "tp2+etp2+ep2", "tp4+ulysses8", "pp6")  # fmt: skip
STAGES = ((), (1, 3), (2, 2), (2, 4), (1, 1, 2), (2, 1, 1, 2), (1, 1, 1, 1))


@pytest.mark.parametrize("model", impossible.MODELS)
def test_what_is_not_refused_megatron_builds(model, models, monkeypatch):
    """Over layouts x splits x memory: the table refuses it, or Megatron's own checks pass."""
    monkeypatch.setattr(
        transformer_engine, "installed", lambda: transformer_engine.OLDEST
    )  # refused for nothing missing
    arch = read_architecture(models / model)
    refused = 0
    for text, stages, memory in itertools.product(LAYOUTS, STAGES, MEMORY):
        layout = Layout.parse(text)
        model = ModelConfig("anywhere", transformer_engine=True)
        config = Config(model, parallel=ParallelConfig(stage_layers=stages), memory=memory)
        try:
            compatibility.check(config, arch, layout)
        except UserError:
            refused += 1
            continue
        built = transformer_config(arch, layout, torch.float32, stage_layers(arch, layout, stages), memory)
        assert not built.distribute_saved_activations
        assert bool(built.recompute_granularity) == (memory.recompute != "none")
        assert built.cpu_offloading_num_layers == memory.offload_layers
    assert 0 < refused < len(LAYOUTS) * len(STAGES) * len(MEMORY)
