"""What samples begin with alike is computed once, and nothing but time depends on it: the same numbers as of one rank
that computes every sample whole, on every layout, for every loss, with experts, windows, sinks, latent and linear
attention."""

import dataclasses

import numpy as np
import pytest
import torch
from support.models.families import GATED_DELTA, VOCAB, published, write_config
from support.ranks.grid import Grid
from support.ranks.invariance import FOUR_LAYERS, QWEN3, cases, logprobs, loss_of

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, MoeConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.tools.prove.parity import Case
from isoloss.tools.prove.proof import rollout_fields

SHARED = BatchConfig(share_prefixes=True)
LAYOUTS = (
    "1", "tp2", "tp2+nosp", "pp2", "pp2+vpp2", "dp2", "dp4", "ulysses2", "ring2", "ring4", "ulysses2+ring2",
    "tp2+pp2+ulysses2", "pp2+ring2", "ring3",
)  # fmt: skip
LOSSES = {
    "clip+kl": AlgorithmConfig(kl_coef=0.2, entropy_coef=0.05),
    "sequence-importance": AlgorithmConfig(importance="sequence", importance_cap=3.0),
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.03),
}  # fmt: skip


def groups() -> list[Sample]:
    """Five prompts of 3 to 40 tokens, each with completions that are drawn apart and one that goes on from the first
    half of another; a completion that is masked; two that are the same; turns of an agent, each of which holds the one
    before and has targets in it; one sample that shares nothing."""
    rng = np.random.default_rng(5)
    drawn = lambda count: torch.from_numpy(rng.integers(0, VOCAB, count))
    rows: list[tuple[torch.Tensor, int, int]] = []  # tokens, first target, group
    for group, size in enumerate((3, 40, 17, 25, 9)):
        prompt = drawn(size)
        bodies = [drawn(int(length)) for length in rng.integers(1, 30, 3)]
        bodies.append(torch.cat([bodies[0][: len(bodies[0]) // 2 + 1], drawn(6)]))
        rows += [(torch.cat([prompt, body]), size, group) for body in bodies]
    rows.append((rows[5][0].clone(), 40, 1))
    turns = drawn(30)
    rows += [(turns[:12], 4, 5), (turns[:21], 4, 5), (turns, 4, 5), (drawn(35), 2, 6)]
    samples = []
    for index, (tokens, first, group) in enumerate(rows):
        mask = (torch.arange(len(tokens)) >= first) & (index != 6)
        near = rng.normal(-np.log(VOCAB), 0.3, len(tokens))
        samples.append(Sample(tokens, mask, group, rollout_fields(near, mask, rng)))
    return samples


def grid(pool, folder, family: str, sizes: dict, **options) -> Grid:
    model = write_config(folder / "model", published(family, **sizes))
    train = TrainConfig(precision="fp64", seed=3)
    return Grid(pool, Config(ModelConfig(str(model), from_scratch=True), train=train, **options), groups(), folder)


def policy_grid(pool, folder, family: str, sizes: dict) -> Grid:
    config = RLConfig(
        ModelConfig(str(write_config(folder / "model", published(family, **sizes))), from_scratch=True),
        train=TrainConfig(precision="fp64", seed=3),
        rollout=RolloutConfig(max_new_tokens=64, temperature=0.8),
    )
    return Grid(pool, config, groups(), folder)


@pytest.fixture(scope="module")
def dense(pool, tmp_path_factory) -> Grid:
    return policy_grid(pool, tmp_path_factory.mktemp("shared"), "qwen3", FOUR_LAYERS)


@pytest.fixture(scope="module")
def linear(pool, tmp_path_factory) -> Grid:
    """Linear layers and attention in turn; some decays are slow."""
    sizes = GATED_DELTA | QWEN3 | {"num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 20}
    return policy_grid(pool, tmp_path_factory.mktemp("linear"), "qwen3.5", sizes)


def policy_cases(grid: Grid, budget: int) -> list[Case]:
    found = []
    for name, algorithm in LOSSES.items():
        for mode in ("seq-mean-token-mean",) if name == "gspo" else ("token-mean", "prompt-mean-token-mean"):
            policy = dataclasses.replace(grid.config, algorithm=algorithm, loss=loss_of(mode))
            found.append(Case(budget, loss_of(mode), policy))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(dense, layout):
    """With micro-batches that hold parts of groups, one sample, and everything."""
    for budget in (90, 0):
        dense.check(layout, policy_cases(dense, budget), batch=SHARED)


@pytest.mark.parametrize("layout", ("1", "tp2+pp2", "pp2+vpp2", "dp4", "ulysses2", "ring4", "ulysses2+ring2"))
def test_linear_attention(linear, layout):
    """A completion goes on from the state that its prompt leaves, and its convolution sees the prompt's last tokens."""
    for budget in (90, 0):
        linear.check(layout, policy_cases(linear, budget)[:2], batch=SHARED)


@pytest.mark.parametrize("layout", ("1", "ulysses2+ring2"))
@pytest.mark.parametrize("model", ("dense", "linear"))
def test_activations_that_are_computed_again(model, layout, request):
    grid, memory = request.getfixturevalue(model), MemoryConfig("full")
    grid.check(layout, policy_cases(grid, 90)[:1], batch=SHARED, memory=memory)


@pytest.mark.parametrize("layout", ("1", "dp4", "tp2+pp2+ulysses2", "ring3"))
def test_logprobs_of_a_forward_alone(dense, layout):
    config, batch = dense.on("1"), BatchConfig(max_tokens=90, share_prefixes=True)
    (whole,) = dense.on_ranks("1", logprobs, dataclasses.replace(config, batch=BatchConfig()), dense.frozen)
    for found in dense.on_ranks(layout, logprobs, dense.on(layout, batch=batch), dense.frozen):
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_ranks_without_a_sample(pool, dense, tmp_path):
    """Three samples that share a prompt, on four ranks."""
    few = Grid(pool, dense.config, groups()[4:7], tmp_path)
    few.check("dp4", policy_cases(few, 0), batch=SHARED)


FAMILIES = {
    "qwen3-moe": (FOUR_LAYERS | {"num_experts": 8}, MoeConfig("sequence", 0.5, 0.1)),
    "gpt-oss": ({}, MoeConfig("sequence", 0.5, 0.1)),
    "glm-4.7-flash": (FOUR_LAYERS | {"num_key_value_heads": 8}, MoeConfig("sequence", 0.3)),
    "mistral-4": (FOUR_LAYERS | {"num_key_value_heads": 8}, MoeConfig("sequence", 0.3)),
    "qwen3.5-moe": (FOUR_LAYERS | GATED_DELTA | {"num_experts": 8}, MoeConfig("sequence", 0.5, 0.1)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ("1", "ep2+dp2", "ring2+ep2", "ulysses2+ep2", "tp2+ep2"))
def test_experts_windows_sinks_and_latent_attention(pool, tmp_path, family, layout):
    """With the routers' losses, to which a token counts once for each of its samples."""
    sizes, moe = FAMILIES[family]
    asked = cases([("token-mean", 90), ("seq-mean-token-mean", 0)])
    for found in grid(pool, tmp_path, family, sizes, moe=moe).check(layout, asked, batch=SHARED):
        assert found.flips == 0
