"""The table of what cannot be run: no rule of it is dead, and what it lets pass Megatron-Core builds."""

import itertools
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a
from support.faults import impossible
from support.faults.refusals import Refusal, first_refusal, rule_places, silent

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, MemoryConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.activation_memory import RECOMPUTE_MODULES
from isoloss.models.mcore.build import transformer_config
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout, UserError
from isoloss.recipes.launch import compose_config


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    impossible.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def refusals(models) -> dict[impossible.Impossible, Refusal | None]:
    return {row: refusal(row, models) for row in impossible.ROWS}


def refusal(row: impossible.Impossible, models: Path) -> Refusal | None:
    """What the table says of a row; None where the configuration or the layout by itself is refused."""
    config_class = RLConfig if row.recipe == "grpo" else Config
    try:
        config, _, _ = compose_config(row.recipe, config_class, [f"model.path={models / row.model}", *row.overrides])
        layout = config.parallel.layout().with_world(row.world)
    except UserError:
        return None
    arch = read_architecture(config.model.path)
    return first_refusal(config, arch.as_critic() if row.recipe == "grpo" else arch, layout)


def test_every_rule_is_broken_by_some_row(refusals):
    # Most about Transformer Engine speak only where it is: tests/te/test_te_rules.py.
    # Commands refuse an adapter before any of its rules: tests/unit/test_lora.py.
    about = ("transformer_engine", "fused_kernel_refusals", "adapters")
    places = [place for name, places in rule_places().items() if not name.startswith(about) for place in places]
    assert len(places) > 20 and silent(places, filter(None, refusals.values())) == []


def test_every_key_and_module_of_a_rule_in_a_loop_is_refused(refusals):
    """One rule refuses several keys of a dense model, another one several modules that a model lacks."""
    of_rules = [refusal for refusal in refusals.values() if refusal]
    keys = {refusal.key for refusal in of_rules if "this one is dense" in refusal.why}
    assert keys == {
        "rollout.routing_replay",
        "parallel.ep",
        "parallel.etp",
        "moe.aux_loss",
        "moe.z_loss_coef",
        "moe.bias_update_rate",
        "moe.dispatcher",
        "moe.dispatch_bound",
    }
    modules = {refusal.why.split(",")[0] for refusal in of_rules if refusal.key == "memory.recompute_modules"}
    named = ("mlp", "mlp_act", "moe", "experts", "shared_experts", "mla_up_proj")
    assert modules == {f"names {module}" for module in named}


def test_the_first_override_is_what_is_refused(refusals):
    """Nothing else in a row is impossible: the rule that speaks is the one that the row is about."""
    for row, of_rule in refusals.items():
        assert of_rule is None or of_rule.key == row.overrides[0].partition("=")[0], row


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
    configs = [
        Config(
            ModelConfig("anywhere", transformer_engine=True),
            parallel=ParallelConfig(stage_layers=stages),
            memory=memory,
        )
        for stages, memory in itertools.product(STAGES, MEMORY)
    ]
    for layout, config in itertools.product(map(Layout.parse, LAYOUTS), configs):
        stages, memory = config.parallel.stage_layers, config.memory
        try:
            rules.check(config, arch, layout)
        except UserError:
            refused += 1
            continue
        options = BuildOptions(memory)
        built = transformer_config(arch, layout, torch.float32, stage_layers(arch, layout, stages), options)
        assert not built.distribute_saved_activations
        assert bool(built.recompute_granularity) == (memory.recompute != "none")
        assert built.cpu_offloading_num_layers == memory.offload_layers
    assert 0 < refused < len(LAYOUTS) * len(STAGES) * len(MEMORY)


@pytest.mark.parametrize("dispatcher", ("alltoall", "deepep", "hybridep"))
def test_a_dispatcher_whose_package_is_here_is_megatrons(models, monkeypatch, dispatcher):
    """Each is another part of the package."""
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", dispatcher == "deepep")
    monkeypatch.setattr(fused_a2a, "HAVE_HYBRIDEP", dispatcher == "hybridep")
    arch, layout = read_architecture(models / "moe"), Layout.parse("ep2")
    config = Config(ModelConfig("anywhere"), moe=MoeConfig(dispatcher=dispatcher), train=TrainConfig(precision="bf16"))
    rules.check(config, arch, layout)
    options = BuildOptions(MemoryConfig(), dispatcher=dispatcher)
    built = transformer_config(arch, layout, torch.bfloat16, stage_layers(arch, layout, ()), options)
    if dispatcher == "alltoall":
        assert built.moe_token_dispatcher_type == "alltoall"
    else:
        assert (built.moe_token_dispatcher_type, built.moe_flex_dispatcher_backend) == ("flex", dispatcher)
