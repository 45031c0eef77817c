"""A trajectory weighs the same however it is cut into samples: loss and every gradient are those of the uncut one, for
every aggregation and losses that sum over a sequence, wherever its samples are computed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.families import VOCAB, published, write_config
from support.ranks.grid import Grid
from support.ranks.invariance import FOUR_LAYERS, cases, loss_of

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig, MoeConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RewardConfig, RLConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, negative_log_likelihood
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout, UserError
from isoloss.parallel.aggregation import MODES
from isoloss.tools.prove.bugs import NO_BUG
from isoloss.tools.prove.parity import Case, Tolerance, compare, freeze, measure, merge
from isoloss.tools.prove.proof import rollout_fields

EXACT = Tolerance(1e-13, 1e-13)
# Where each trajectory is cut.
CUTS = [(9, 26), (), (4, 20), (7,), (5,), ()]


def whole() -> list[Sample]:
    """Six trajectories of four prompts; the fourth has no target, and some have tokens between turns that are none."""
    rng = np.random.default_rng(4)
    samples = []
    for index, (length, group) in enumerate(zip((41, 13, 33, 12, 17, 28), (0, 0, 1, 1, 2, 3))):
        tokens = torch.from_numpy(rng.integers(0, VOCAB, length))
        mask = torch.from_numpy(rng.random(length) < 0.7) & (torch.arange(length) > 2) & (index != 3)
        fields = rollout_fields(rng.normal(-np.log(VOCAB), 0.3, length), mask, rng)
        samples.append(Sample(tokens, mask, group, fields, f"row:{index}"))
    return samples


def cut() -> list[Sample]:
    """Each target in one sample, behind all tokens before it; the parts of a trajectory are apart in the batch."""
    parts = []
    for number, (sample, at) in enumerate(zip(whole(), CUTS)):
        for start, stop in itertools.pairwise((0, *at, len(sample))):
            mask = sample.mask_T[:stop] & (torch.arange(stop) >= start)
            fields = {name: values_T[:stop] for name, values_T in sample.fields.items()}
            part = replace(sample, tokens_T=sample.tokens_T[:stop], mask_T=mask, fields=fields)
            parts.append(replace(part, sequence=100 - number if at else None))
    return [*parts[::2], *parts[1::2]]


@pytest.fixture(scope="module")
def grid(pool, tmp_path_factory) -> Grid:
    folder = tmp_path_factory.mktemp("cut")
    config = Config(
        ModelConfig(str(write_config(folder / "model", published("qwen3", **FOUR_LAYERS))), from_scratch=True),
        train=TrainConfig(precision="fp64", seed=3),
    )
    return Grid(pool, config, whole(), folder)


BUDGETS = (45, 100)
POLICY = RLConfig(
    ModelConfig("anywhere"), reward=RewardConfig(function=("exact_match",)), algorithm=AlgorithmConfig(kl_coef=0.2)
)
SUMS = [
    replace(POLICY, loss=loss_of("seq-mean-token-mean"), algorithm=AlgorithmConfig(kl_coef=0.2, loss="gspo")),
    replace(POLICY, algorithm=AlgorithmConfig(importance="sequence", importance_cap=3.0)),
]
CASES = [
    *cases(zip(MODES, itertools.cycle(BUDGETS))),
    *(replace(case, loss=replace(case.loss, count_fully_masked=True)) for case in cases(zip(MODES[1:5], [0] * 4))),
    Case(45, loss_of("seq-mean-token-mean"), POLICY),
    *(Case(45, policy.loss, policy) for policy in SUMS),
    Case(0, SUMS[0].loss, SUMS[0]),  # the samples are in one micro-batch
]


@pytest.mark.parametrize("layout", ["1", "dp2", "ulysses2", "ring2-shared", "pp2", "tp2"])
def test_a_trajectory_weighs_the_same_however_it_is_cut(grid, layout):
    layout, _, shared = layout.partition("-")
    config = grid.on(layout, batch=BatchConfig(share_prefixes=bool(shared)))
    grid.refer(CASES)
    found = merge(grid.on_ranks(layout, measure, config, freeze(cut()), CASES, grid.files_of(CASES), NO_BUG, False))
    for case, measured in zip(CASES, found, strict=True):
        against = compare(measured, grid.reference(case), EXACT)
        assert against.passed, f"{layout} {case}: {against.reason}"
        assert measured.canary is None


def test_parts_of_a_trajectory_lie_on_both_ranks(grid):
    """Else the row of dp2 would not count over ranks what it claims to."""
    plan = CASES[0].plan(Layout.parse("dp2"), cut(), read_architecture(str(grid.config.model.path)))
    first, second = ({cut()[i].sequence for m in rank for i in m} - {None} for rank in plan.micro_batches)
    assert first & second


def test_metrics_count_trajectories(inputs, one_rank):
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    loss = Loss.of(negative_log_likelihood, "seq-mean-token-sum")
    metrics = engine.evaluate(cut(), loss)
    assert metrics.sequences == len(whole()) < len(cut())
    assert metrics.weight_sum == pytest.approx(metrics.valid_tokens / 5, rel=1e-6)  # the fourth has no target


def test_losses_of_routers_over_cut_trajectories_are_refused_by_name(tiny_hf, one_rank):
    moe = MoeConfig(aux_loss="sequence", aux_loss_coef=0.01)
    engine = Engine(Config(ModelConfig(str(tiny_hf("qwen3-moe"))), moe=moe))
    loss = Loss.of(negative_log_likelihood)
    with pytest.raises(
        UserError, match=r"moe\.aux_loss_coef, .* Sample\.sequence cuts a trajectory .*: give these samples owned_T"
    ):
        engine.forward_backward(cut(), loss)
    engine.zero_grad()
    assert engine.forward_backward(whole(), loss).sequences == 6
    assert engine.evaluate(cut(), loss).sequences == 6  # which has no losses of routers


def test_a_trajectory_of_two_prompts_is_refused_by_name(inputs, one_rank):
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    first, *others = cut()
    with pytest.raises(ValueError, match=r"sequence=100 has group=9 \(sample 'row:0'\) and group=0"):
        engine.forward_backward([replace(first, group=9), *others], Loss.of(negative_log_likelihood))
