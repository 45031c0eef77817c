"""A trainer that leaves its device while others use it, and comes back, is the one that never left."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.families import VOCAB, write_folder
from support.ranks import leaving
from support.runs.training import same

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, OptimConfig, ParallelConfig
from isoloss.engine.config.schema import TrainConfig as Train
from isoloss.parallel import Layout
from isoloss.tools.prove.parity import freeze
from isoloss.tools.prove.proof import on_layout

LAYOUTS = {"1": "qwen3", "tp2": "qwen3", "dp2": "qwen3", "pp2+vpp2": "qwen3", "ep2+dp2": "qwen3-moe"}
KINDS = {"fp64-plain": ("fp64", False), "bf16-plain": ("bf16", False), "bf16-distributed": ("bf16", True)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {family: write_folder(family, made / family, num_hidden_layers=4) for family in set(LAYOUTS.values())}


def samples() -> bytes:
    tokens = torch.arange(1, 60) % VOCAB
    return freeze([Sample(tokens[:n], tokens[:n] > 3) for n in (9, 39, 20, 59)])


def config(folder: Path, layout: str, precision: str, distributed: bool, offload: float = 0.0) -> Config:
    plain = Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=64),
        parallel=ParallelConfig(),
        optim=OptimConfig(lr=1e-2, weight_decay=0.1, clip=0.1),
        train=Train(),
    )
    found = on_layout(plain, Layout.parse(layout), precision)
    parallel = replace(found.parallel, distributed_optimizer=distributed)
    return replace(found, parallel=parallel, memory=MemoryConfig(offload_optimizer=offload))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_cycles_are_bit_equal_and_leave_nothing_behind(pool, folders, layout, kind):
    """Numbers, weights that servers are sent, weights in the end; and the bytes of every tensor in the process."""
    given = config(folders[LAYOUTS[layout]], layout, *KINDS[kind])
    world = Layout.parse(layout).world_size
    stayed = pool.run(world, leaving.cycles, given, samples(), 5, False)
    left = pool.run(world, leaving.cycles, given, samples(), 5, True)
    for wanted, found in zip(stayed, left, strict=True):
        assert found.numbers == wanted.numbers and found.sent == wanted.sent
        assert same(found.weights, wanted.weights)
        assert found.there == pytest.approx(wanted.there, rel=0.001)
        assert found.away < 0.03 * found.there
        of_weights = 2 if "bf16" in kind else 8
        per_parameter = found.there / (found.without_training - found.away) * of_weights
        assert per_parameter > 2.9 * of_weights  # weights alone stayed, of them, gradients and optimizer
        assert len({tuple(each.values()) for each in found.sent}) == 5


@pytest.mark.parametrize("share", (0.3, 1.0))
def test_an_optimizer_in_cpu_memory_comes_back_too(pool, folders, share):
    given = config(folders["qwen3"], "dp2", "bf16", True, share)
    stayed = pool.run(2, leaving.cycles, given, samples(), 3, False)
    left = pool.run(2, leaving.cycles, given, samples(), 3, True)
    for wanted, found in zip(stayed, left, strict=True):
        assert found.numbers == wanted.numbers and same(found.weights, wanted.weights)


def test_every_verb_brings_back_what_it_needs(pool, folders, tmp_path):
    pool.run(2, leaving.every_verb, config(folders["qwen3"], "dp2", "bf16", True), samples(), str(tmp_path))


@pytest.mark.parametrize("fails_at", (1, 2, 12))
@pytest.mark.parametrize("comes_back", (False, True), ids=("leaving", "coming back"))
def test_an_exception_on_the_way_loses_nothing(pool, folders, fails_at, comes_back):
    given = config(folders["qwen3"], "1", "bf16", True)
    failed, losses, weights = pool.run(1, leaving.interrupted, given, samples(), fails_at, comes_back)[0]
    _, wanted_losses, wanted = pool.run(1, leaving.interrupted, given, samples(), 0, comes_back)[0]
    assert failed and losses == wanted_losses and same(weights, wanted)


def test_gradients_that_were_not_used_are_not_dropped(pool, folders):
    told, unharmed = pool.run(1, leaving.amid_a_step, config(folders["qwen3"], "1", "fp64", False), samples())[0]
    assert "call optim_step() or zero_grad() first" in told and unharmed
