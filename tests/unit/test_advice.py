"""What a plan advises where a run does not fit: what is named helps, and what cannot help is not named."""

import json
import re
from dataclasses import replace

import pytest
from support.models import published
from support.plans.planned_presets import MODELS

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.memory.limits import GIB, MARGIN, room
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan.advice import to_fit
from isoloss.tools.plan.hardware import GPUS

pytestmark = pytest.mark.xdist_group("counting")  # one process counts for all of it, and keeps the counts
H100 = GPUS["h100"]
TOKENS = ["data.max_length=4096", "batch.max_tokens=4096"]


@pytest.fixture
def of(tmp_path):
    """(configuration, architecture) of a size and keys."""

    def made(size, *keys, recipe="sft"):
        (tmp_path / "config.json").write_text(json.dumps(MODELS[size]))
        kind = Config if recipe == "sft" else RLConfig
        given = {key.partition("=")[0]: key for key in (*TOKENS, "train.precision=bf16", *keys)}
        return compose_config(recipe, kind, [f"model.path={tmp_path}", *given.values()])[0], read_architecture(tmp_path)

    return made


def advised(config, arch, gpus: int) -> str:
    return to_fit(config, arch, config.parallel.layout().with_world(gpus), H100)


def test_states_that_exceed_the_card_are_told_with_what_helps(of):
    """By hand: bf16 weights, fp32 gradients, fp32 weights and two moments are 18 bytes a parameter; 16 offloaded."""
    config, arch = of("8b")
    parameters = 8_190_735_360
    assert published.QWEN3_8B["num_hidden_layers"] == arch.num_layers == 36
    line = advised(config, arch, 1)
    assert f"optimizer alone take {18 * parameters / GIB:.1f} GiB of 74.0" in line
    assert "what helps: lora.rank=32 (docs/lora.md); " in line
    assert f"; memory.offload_optimizer=1 ({16 * parameters / 1e9:.0f} GB in CPU memory" in line
    assert "; --gpus 2 parallel.tp=2" in line and line.endswith("; a smaller model")
    assert "lower batch.max_tokens" not in line


# Of two layers, on a small card.
THIN = {"8b": (8, ()), "32b": (6, ("parallel.tp=2",)), "30b_a3b": (9, ())}


@pytest.mark.parametrize("size", THIN)
def test_what_is_named_helps(of, size, monkeypatch):
    """Each change by itself, given as it stands."""
    left, keys = THIN[size]
    monkeypatch.setitem(MODELS, size, MODELS[size] | {"num_hidden_layers": 2})
    card = replace(H100, memory=left * GIB + MARGIN)
    config, arch = of(size, *keys)
    line = to_fit(config, arch, config.parallel.layout().with_world(2), card)
    changes = line.partition("what helps: ")[2].split("; ")
    assert changes.pop() == "a smaller model"
    assert any("--gpus" in change for change in changes) and ("parallel.ep" in line) == (size == "30b_a3b")
    for change in changes:
        words = re.sub(r" \(.*\)", "", change).split()
        world = int(words[words.index("--gpus") + 1]) if "--gpus" in words else 2
        changed, _ = of(size, *keys, *(word for word in words if "=" in word))
        stages = step_memory(changed, arch, changed.parallel.layout().with_world(world))
        assert max(stage.peak for stage in stages) <= room(changed, card.memory), change


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        ("8b", ("memory.offload_optimizer=1", "batch.max_tokens=65536")),
        ("8b", ("memory.offload_optimizer=1", "data.max_length=16384", "batch.max_tokens=16384")),
    ],
)
def test_where_the_states_fit_fewer_tokens_are_advised(of, size, keys):
    config, arch = of(size, *keys)
    line = advised(config, arch, 1)
    assert (
        line
        == f"to fit: lower batch.max_tokens={config.batch.max_tokens}, or recompute (docs/memory.md), or ask --search"
    )


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        ("32b", ()),  # weights and gradients alone are 183 GiB
        ("8b", ("train.precision=fp32",)),  # has nothing to offload
        ("32b", ("memory.offload_optimizer=1",)),  # is set already
    ],
)
def test_offloading_is_not_named_where_it_does_not_help(of, size, keys):
    config, arch = of(size, *keys)
    line = advised(config, arch, 1)
    assert "alone take" in line and "memory.offload_optimizer" not in line


def test_adapters_are_advised_of_what_can_have_them(of):
    """Where adapters of experts do not fit, those of attention may; where none fits, or they are trained already, they
    are not named."""
    config, arch = of("30b_a3b", "parallel.ep=4")
    assert "what helps: lora.rank=32 " in advised(config, arch, 4)
    config, arch = of("70b")
    assert "lora.rank" not in advised(config, arch, 1)
    config, arch = of("70b", "lora.rank=4", "parallel.tp=1")
    assert "alone take" in advised(config, arch, 1) and "lora.rank" not in advised(config, arch, 1)


def test_a_critic_counts_twice(of):
    keys = ["algorithm.advantage=gae", "rollout.max_new_tokens=1024"]
    config, arch = of("8b", *keys, recipe="grpo")
    line = advised(config, arch, 1)
    assert re.search(r"alone take 27\d\.\d GiB", line) and "memory.offload_optimizer" not in line


def test_a_server_on_the_same_gpus_leaves_less_room(of):
    keys = ["rollout.max_new_tokens=1024", "rollout.backend=sglang", "rollout.servers=[http://a:1]"]
    keys += ["rollout.weight_sync=tensor", "rollout.colocated=true"]
    config, arch = of("8b", *keys, recipe="grpo")
    assert "GiB of 69.0" in advised(config, arch, 1)
