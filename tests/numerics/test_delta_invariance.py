"""The promise, for Gated DeltaNet between layers of attention: loss and gradients are the same on every layout.

Parameter by parameter in fp64 against one rank and one micro-batch. Some decays are slow: a state that reaches into the
next document shows in the last digits of the loss only where it lasts.
"""

from collections.abc import Callable

import pytest
from support.models.families import GATED_DELTA, VOCAB, published, write_config
from support.ranks import invariance as world
from support.ranks import rl_grids
from support.ranks.grid import Grid
from support.ranks.invariance import QWEN3, cases

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from isoloss.models.weights.random_weights import RandomWeights
from isoloss.models.weights.weight_map import weight_map

# Linear layers and attention in turn. Key heads are fewer than the widest context has ranks: they are repeated.
SIZES = GATED_DELTA | QWEN3 | {
    "num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 20, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
BY_THREE = {
    "num_hidden_layers": 6, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3,
    "linear_num_key_heads": 3, "linear_num_value_heads": 12,
}  # fmt: skip
LENGTHS = (40, 3, 17, 1, 29, 96, 2, 66, 9, 13)  # longer than a chunk, and shorter than the convolution
CASES = cases([("token-mean", 96), ("seq-mean-token-mean", 0)])
LAYOUTS = (
    "dp2", "pp2", "pp2+vpp2", "tp2", "tp2+nosp", "tp4", "ulysses2", "ulysses8", "ring2", "ring4", "ulysses2+ring2",
    "ulysses4+ring2", "tp2+ulysses2", "tp2+ring4+nosp", "tp2+pp2", "tp2+pp2+ulysses2", "ring2+dp2", "pp2+ring2+dp2",
)  # fmt: skip


def batch() -> list[Sample]:
    return world.random_targets(LENGTHS, VOCAB, seed=13)


@pytest.fixture(scope="module")
def grid_of(pool, tmp_path_factory) -> Callable[..., Grid]:
    def make(**changes) -> Grid:
        folder = tmp_path_factory.mktemp("delta")
        model = write_config(folder / "model", published("qwen3.5", **SIZES | changes))
        config = Config(
            ModelConfig(str(model), from_scratch=True),
            batch=BatchConfig(max_tokens=sum(LENGTHS)),
            optim=OptimConfig(lr=1e-3, clip=1.0),
            train=TrainConfig(precision="fp64", seed=3),
        )
        return Grid(pool, config, batch(), folder)

    return make


@pytest.fixture(scope="module")
def grid(grid_of) -> Grid:
    return grid_of()


def test_the_grid_is_what_it_says(grid):
    """Both kinds of layer, a slow decay and a fast one, and every parameter of them is compared."""
    assert grid.arch.linear == (True, False, True, False)
    weights = {weight.name: weight for weight in weight_map(grid.arch)}
    decays = RandomWeights(grid.arch, 3).whole(weights["decoder.layers.2.self_attention.A_log"]).exp()
    assert decays.min() < 1 < 8 < decays.max()
    compared = grid.reference(CASES[0]).parameters.keys()
    for name in ("in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight", "out_proj.weight"):
        assert f"decoder.layers.2.self_attention.{name}" in compared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(grid, layout):
    grid.check(layout, CASES)


@pytest.mark.parametrize("layout", ("tp3", "ring3", "ulysses3", "ulysses3+ring2", "tp3+ulysses2"))
def test_degrees_of_three(grid_of, layout):
    grid_of(**BY_THREE).check(layout, CASES)


@pytest.mark.parametrize("memory", (MemoryConfig("full"), MemoryConfig("selective", ("core_attn", "layernorm"))))
@pytest.mark.parametrize("layout", ("1", "tp2+ulysses2", "pp2+vpp2", "ring2"))
def test_recomputed_activations(grid, layout, memory):
    grid.check(layout, CASES[:1], memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("tp2+pp2", "ulysses2+ring2", "tp2+nosp"))
def test_twenty_fp32_steps(grid, layout):
    one, many = (
        grid.on_ranks(where, world.losses, grid.on(where, "fp32"), grid.frozen, 20)[0] for where in ("1", layout)
    )
    assert many == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0] - 0.5


@pytest.fixture(scope="module")
def rl_grid(pool, tmp_path_factory) -> Grid:
    folder = tmp_path_factory.mktemp("delta-rl")
    return rl_grids.make(
        pool, ModelConfig(str(write_config(folder / "model", published("qwen3.5", **SIZES))), from_scratch=True), folder
    )


@pytest.mark.parametrize("layout", ("tp2+pp2", "ulysses2+ring2", "tp2+ring2+nosp"))
def test_losses_of_reinforcement_learning(rl_grid, layout):
    rl_grids.check(rl_grid, layout)
