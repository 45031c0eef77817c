"""A dense MLP and experts side by side (Gemma 4's sparse models): the router by its formula, and the promise in fp64.

Weights are those of a file, all random: made up they would be 1 in norms and scales, which would look the same as left
out. `test_transformers_parity.py` compares the same model with transformers.
"""

from types import SimpleNamespace

import pytest
import torch
from support.models.families import VOCAB, write_folder
from support.ranks import invariance as world
from support.ranks.grid import Grid
from support.ranks.invariance import cases

from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.models.kinds.dense_and_experts import NORMS, DenseAndExperts
from isoloss.models.mcore.moe.dense_and_experts import NormedRouter

# Key/value heads that every TP degree divides, and experts that every EP degree does.
SIZES = {"num_key_value_heads": 8, "num_global_key_value_heads": 4, "num_experts": 8}
LENGTHS = (40, 3, 17, 1, 29, 66, 2, 9)
CASES = cases([("seq-mean-token-mean", 0), ("token-mean", 96)])
LAYOUTS = ("dp2", "ring2", "ulysses2+ep2", "ep2+dp2", "tp2+ep2", "tp2+etp2", "tp2+pp2+ep2", "pp2")


@pytest.fixture(scope="module")
def grid(pool, tmp_path_factory) -> Grid:
    folder = tmp_path_factory.mktemp("dense-and-experts")
    config = Config(
        ModelConfig(str(write_folder("gemma-4-moe", folder / "model", **SIZES))),
        moe=MoeConfig("sequence", 0.5, 0.1),
        batch=BatchConfig(max_tokens=96),
        optim=OptimConfig(lr=1e-3, clip=1.0),
        train=TrainConfig(precision="fp64", seed=3),
    )
    return Grid(pool, config, world.random_targets(LENGTHS, VOCAB, seed=13), folder)


def test_the_grid_is_what_it_says(grid):
    """Every norm, scale and half of both layers is compared, and no token is close to choosing other experts."""
    reference = grid.reference(CASES[0])
    weights = (*(f"{norm}.weight" for norm in NORMS), "router.weight", "router.scale", "router.per_expert_scale",
               "shared_experts.linear_fc1.weight", "experts.local_experts.7.linear_fc2.weight")  # fmt: skip
    for layer in range(2):
        assert {f"decoder.layers.{layer}.mlp.{name}" for name in weights} <= reference.parameters.keys()
    assert reference.flips == 0 and reference.smallest_margin > 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(grid, layout):
    grid.check(layout, CASES)


@pytest.mark.parametrize(
    "memory",
    (
        MemoryConfig("full"),
        MemoryConfig("selective", ("moe", "layernorm")),
        MemoryConfig("selective", ("experts", "shared_experts", "core_attn")),
    ),
    ids=("full", "moe", "experts"),
)
@pytest.mark.parametrize("layout", ("1", "tp2+ep2"))
def test_recomputed_activations(grid, layout, memory):
    grid.check(layout, CASES[:1], memory=memory)


@pytest.fixture
def router() -> NormedRouter:
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=12, layernorm_epsilon=1e-3, params_dtype=torch.float64, add_bias_linear=False,
        sequence_parallel=True,
    )  # fmt: skip
    made = NormedRouter(config, experts=DenseAndExperts(count=5, top_k=2, intermediate_size=4, shared_size=6))
    for parameter in made.parameters():
        parameter.data.normal_(1.0, 0.5)
    return made


def test_the_router_is_its_formula(router):
    tokens = 3 * torch.randn(7, 1, 12, dtype=torch.float64)
    normed = tokens[:, 0] / (tokens[:, 0].square().mean(-1, keepdim=True) + 1e-3).sqrt()
    scores = torch.softmax(normed * router.scale / 12**0.5 @ router.weight.mT, -1)
    best, chosen = scores.topk(2)
    weights = best / best.sum(-1, keepdim=True) * router.per_expert_scale[chosen]
    weights_ZE, chosen_ZE, chosen_ZX = router(tokens)
    assert torch.equal(chosen_ZX, chosen) and torch.equal(chosen_ZE.sum(1), torch.full((7,), 2))
    torch.testing.assert_close(weights_ZE.gather(1, chosen), weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights_ZE.sum(1), weights.sum(1), rtol=1e-12, atol=1e-12)


def test_tensor_parallel_ranks_add_up_the_gradients_of_the_scales(router):
    assert all(parameter.sequence_parallel for parameter in router.parameters())
