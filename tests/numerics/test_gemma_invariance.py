"""The promise, for layers whose heads differ in width and number, and for capped logits (Gemma 4): loss and gradients
are the same on every layout.

Parameter by parameter in fp64 against one rank and one micro-batch. Weights are those of a file, all random: made up
they would be 1 in norms, and in the scalars of layers, which nobody could tell from left out.
"""

import pytest
from support.models.families import VOCAB, write_folder
from support.ranks import invariance as world
from support.ranks import rl_grids
from support.ranks.grid import Grid
from support.ranks.invariance import cases

from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, OptimConfig, TrainConfig

# Both kinds of layer in turn, with 8 and 4 key/value heads, which every TP degree divides.
SIZES = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_key_value_heads": 8,
    "num_global_key_value_heads": 4,
}  # fmt: skip
LENGTHS = (40, 3, 17, 1, 29, 96, 2, 66, 9, 13)  # longer than the window, and shorter
CASES = cases([("token-mean", 96), ("seq-mean-token-mean", 0)])
LAYOUTS = (
    "dp2", "pp2", "pp2+vpp2", "tp2", "tp2+nosp", "tp4", "ulysses2", "ulysses8", "ring2", "ring4", "ulysses2+ring2",
    "tp2+ulysses2", "tp2+ring4+nosp", "tp2+pp2", "tp2+pp2+ulysses2", "tp4+ring2", "pp2+vpp2+ring2+dp2",
)  # fmt: skip


@pytest.fixture(scope="module")
def grid(pool, tmp_path_factory) -> Grid:
    folder = tmp_path_factory.mktemp("gemma")
    config = Config(
        ModelConfig(str(write_folder("gemma-4", folder / "model", **SIZES))),
        batch=BatchConfig(max_tokens=sum(LENGTHS)),
        optim=OptimConfig(lr=1e-3, clip=1.0),
        train=TrainConfig(precision="fp64", seed=3),
    )
    return Grid(pool, config, world.random_targets(LENGTHS, VOCAB, seed=13), folder)


def test_the_grid_is_what_it_says(grid):
    """Both kinds of layer, and every parameter of them is compared."""
    attentions = [layer.attention for layer in grid.arch.layers]
    assert [(kind.kv_heads, kind.head_dim, kind.keys_as_values) for kind in attentions] == [
        (8, 12, False),
        (4, 20, True),
    ] * 2
    compared = grid.reference(CASES[0]).parameters.keys()
    for name in ("self_attention.q_layernorm", "self_attention.k_layernorm", "post_self_attn_layernorm",
                 "post_mlp_layernorm", "pre_mlp_layernorm", "self_attention.linear_qkv"):  # fmt: skip
        assert {f"decoder.layers.{layer}.{name}.weight" for layer in range(4)} <= compared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(grid, layout):
    grid.check(layout, CASES)


@pytest.mark.parametrize(
    "memory",
    (MemoryConfig("full"), MemoryConfig("selective", ("core_attn", "layernorm", "mlp_act"))),
    ids=("full", "selective"),
)
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
    folder = tmp_path_factory.mktemp("gemma-rl")
    return rl_grids.make(pool, ModelConfig(str(write_folder("gemma-4", folder / "model", **SIZES))), folder)


@pytest.mark.parametrize("layout", ("tp2+pp2", "ulysses2+ring2", "tp2+ring2+nosp"))
def test_losses_of_reinforcement_learning(rl_grid, layout):
    """With a temperature behind the cap of the logits, and the entropy of what both give."""
    rl_grids.check(rl_grid, layout)
