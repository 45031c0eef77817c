"""The promise where nothing is a power of two: degrees of 3, worlds of 3 and 6, heads and layers that 3 divides."""

import pytest
from support.models.families import VOCAB, published, write_config
from support.models.transformers_parity import make_samples
from support.ranks.grid import Grid
from support.ranks.invariance import QWEN3, cases, losses

from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig, OptimConfig, TrainConfig

# 12 query heads for 3 key/value heads; 6 layers; 3 divides the width of the MLP.
SIZES = QWEN3 | {"num_hidden_layers": 6, "hidden_size": 36, "num_attention_heads": 12, "num_key_value_heads": 3}
LENGTHS = (40, 17, 1, 29, 3, 61, 2, 9, 13, 5)  # 180 tokens; some are shorter than a context of 6
# About two sequences a micro-batch, and all in one, which dp cuts.
CASES = cases([("token-mean", 66), ("seq-mean-token-mean", 0)])
LAYOUTS = (
    "tp3",
    "tp3+nosp",
    "dp3",
    "ring3",
    "ulysses3",
    "pp3",
    "ulysses3+ring2",
    "tp3+pp2",
    "ring3+dp2",
    "pp3+vpp2+dp2",
)


@pytest.fixture(scope="module")
def grid(pool, tmp_path_factory) -> Grid:
    folder = tmp_path_factory.mktemp("odd")
    config = Config(
        ModelConfig(str(write_config(folder / "model", published("qwen3", **SIZES))), from_scratch=True),
        batch=BatchConfig(max_tokens=66),
        optim=OptimConfig(lr=1e-3, clip=0.1),
        train=TrainConfig(precision="fp64", seed=3),
    )
    return Grid(pool, config, make_samples(LENGTHS, VOCAB), folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_rank(grid, layout):
    grid.check(layout, CASES)


@pytest.mark.parametrize("layout", ("tp3", "dp3", "ring3"))
def test_steps_are_those_of_one_rank(grid, layout):
    """With the distributed optimizer, which deals its state to three ranks, and with every step clipped."""
    one, many = (
        grid.on_ranks(where, losses, grid.on(where, "fp32", {"distributed_optimizer": True}), grid.frozen, 5)[0]
        for where in ("1", layout)
    )
    assert many == pytest.approx(one, rel=2e-6)
    assert one[-1] < one[0]
