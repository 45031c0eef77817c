"""The promise in reinforcement learning: one recorded batch of rollouts, one optimizer step, the same on every layout.

Every loss with every aggregation, parameter by parameter in fp64 against one rank and one micro-batch; also every term,
and every observed metric. On-policy, GRPO's loss cancels to about 0, so its rounding is told relative to the sum of the
absolute values of what was added up.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from numerics import rl_calls as world
from support.models.families import VOCAB, published, write_config
from support.ranks.grid import Grid
from support.ranks.invariance import FOUR_LAYERS, MAX_LENGTH, loss_of

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, LossConfig, MemoryConfig, ModelConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.parallel import Layout
from isoloss.parallel.aggregation import MODES
from isoloss.tools.prove.bugs.policy import POLICY
from isoloss.tools.prove.parity import TOLERANCE, Case, compare
from isoloss.tools.prove.proof import rollout_fields

LAYOUTS = (
    "1", "ulysses2", "ulysses4", "ulysses8", "tp2", "pp2", "dp2", "dp4", "tp2+pp2+ulysses2", "ring4", "ulysses2+ring2",
)  # fmt: skip
# The cases of all losses are dealt to these; the others, of long rings and many heads, run some of them.
COVERED = [layout for layout in LAYOUTS if layout not in ("ulysses4", "ulysses8", "ring4")]
PLAIN = AlgorithmConfig()
# Each loss at least once, with what it is combined with: both kinds of correction, all estimators, terms that are
# aggregated otherwise than the main one.
LOSSES = {
    "grpo": PLAIN,
    "dapo": AlgorithmConfig(clip_high=0.28),
    "dual-clip": AlgorithmConfig(dual_clip=1.5, kl_coef=0.1, kl_estimator="k1"),
    "clip+k3+entropy": AlgorithmConfig(kl_coef=0.2, entropy_coef=0.05),
    "clip+k2-by-sequence": AlgorithmConfig(
        kl_coef=0.2, kl_estimator="k2", kl_aggregation="seq-mean-token-mean", entropy_coef=0.1,
        entropy_aggregation="prompt-mean-token-mean",
    ),
    "clip+token-importance": AlgorithmConfig(importance="token", importance_cap=1.2),
    "clip+sequence-importance": AlgorithmConfig(importance="sequence", importance_cap=3.0),
    "clip-from-rollout": AlgorithmConfig(old_logprobs="rollout"),
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.03),
    "gspo+sequence-importance+kl": AlgorithmConfig(
        loss="gspo", clip_low=0.02, clip_high=0.03, importance="sequence", importance_cap=3.0, kl_coef=0.1,
        kl_aggregation="token-mean",
    ),
    "cispo": AlgorithmConfig(loss="cispo", clip_low=1.0, clip_high=0.1),
    "reinforce": AlgorithmConfig(loss="reinforce", advantage="rloo"),
    "reinforce-from-rollout": AlgorithmConfig(loss="reinforce", old_logprobs="rollout", importance="sequence"),
}  # fmt: skip
BUDGETS = (MAX_LENGTH, 160, 0)


def recorded_batch(on_policy: bool) -> list[Sample]:
    """16 completions of 5 prompts: log-normal lengths, one fully masked, one of a single token, one of maximum length.

    on_policy: nothing was noted of the policy that generated, so that the ratio is exactly 1.
    """
    rng = np.random.default_rng(11)
    lengths = np.clip(rng.lognormal(math.log(28), 0.8, 14).astype(int), 6, MAX_LENGTH).tolist()
    samples = []
    for index, length in enumerate([*lengths, MAX_LENGTH, 13]):
        prompt = int(rng.integers(2, 5))
        mask = torch.arange(length) >= prompt
        if index == 3:
            mask[:] = False
        if index == 15:
            mask[:-1] = False
        near = rng.normal(-math.log(VOCAB), 0.3, length)  # about what random weights give
        fields = rollout_fields(near, mask, rng)
        if on_policy:
            del fields["train_logprobs"]
        tokens = torch.from_numpy(rng.integers(0, VOCAB, length))
        samples.append(Sample(tokens, mask, index // 4, fields))
    return samples


def case_of(grid: Grid, name: str, mode: str, budget: int) -> Case:
    policy = dataclasses.replace(grid.config, algorithm=LOSSES.get(name, PLAIN), loss=loss_of(mode))
    return Case(budget, loss_of(mode), policy, critic=name == "value")


def cases_of(grid: Grid, triples: Iterable[tuple[str, str, int]]) -> list[Case]:
    return [case_of(grid, *triple) for triple in triples]


def check(grid: Grid, layout: str, triples: Iterable[tuple[str, str, int]], **changes) -> None:
    for found in grid.check(layout, cases_of(grid, triples), **changes):
        # Squared norms: no parameter agrees on a gradient of 0.
        assert min(norms.reference for norms in found.parameters.values()) > 1e-16


@pytest.fixture(scope="module")
def grid_of(pool, tmp_path_factory) -> Callable[[bool], Grid]:
    def make(on_policy: bool) -> Grid:
        folder = tmp_path_factory.mktemp("rl-invariance")
        config = RLConfig(
            ModelConfig(str(write_config(folder / "model", published("qwen3", **FOUR_LAYERS))), from_scratch=True),
            batch=BatchConfig(),
            train=TrainConfig(precision="fp64", seed=3),
            rollout=RolloutConfig(max_new_tokens=MAX_LENGTH, temperature=0.8),
        )
        return Grid(pool, config, recorded_batch(on_policy), folder)

    return make


@pytest.fixture(scope="module")
def grid(grid_of) -> Grid:
    return grid_of(on_policy=False)


@pytest.fixture(scope="module")
def on_policy_grid(grid_of) -> Grid:
    return grid_of(on_policy=True)


GSPO = [name for name in LOSSES if name.startswith("gspo")]  # has one aggregation, others are refused
PAIRS = [pair for pair in itertools.product(LOSSES, MODES) if pair[0] not in GSPO or pair[1] == "seq-mean-token-mean"]
CASES = [(name, mode, budget) for name, mode in PAIRS for budget in BUDGETS]


def covering(index: int) -> list[tuple[str, str, int]]:
    """The cases of layout number `index`: of the 18 of every loss two, others for the next loss, so that the
    layouts together see them all; of GSPO one."""
    others = [case for case in CASES if case[0] not in GSPO]
    of_gspo = [(name, "seq-mean-token-mean", BUDGETS[index % len(BUDGETS)]) for name in GSPO]
    return [case for n, case in enumerate(others) if (n + n // 18) % len(COVERED) == index] + of_gspo


def test_the_covering_array_covers():
    shares = [covering(index) for index in range(len(COVERED))]
    assert {case for share in shares for case in share} >= set(CASES)
    for share in shares:
        assert {name for name, _, _ in share} == set(LOSSES)
        assert {mode for _, mode, _ in share} == set(MODES)


@pytest.mark.parametrize("index", range(len(COVERED)), ids=COVERED)
def test_every_layout(grid, index):
    check(grid, COVERED[index], covering(index))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_product(grid, layout):
    check(grid, layout, CASES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_policy_where_the_loss_cancels(on_policy_grid, layout):
    """Without the old policy's log-probabilities the ratio is 1, and with advantages of mean 0 the loss about 0."""
    check(on_policy_grid, layout, [("grpo", "token-mean", 160), ("gspo", "seq-mean-token-mean", 96)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_critic(grid, layout):
    check(grid, layout, [("value", "token-mean", 160), ("value", "seq-mean-token-mean", 0)])


@pytest.mark.parametrize("layout", ("1", "tp2+pp2+ulysses2"))
def test_critic_that_recomputes_its_activations(grid, layout):
    check(grid, layout, [("value", "token-mean", 160)], memory=MemoryConfig("full"))


def test_the_batch_reaches_every_branch(grid):
    """Clipping on both sides, masks and terms all have something to do: what agrees is not agreement on nothing."""
    whole = {(name, mode): case_of(grid, name, mode, 0) for name, mode in PAIRS}
    grid.refer(whole.values())
    for (name, mode), case in whole.items():
        reference = grid.reference(case)
        clipped = reference.details["clip_fraction"]
        assert (0.01 < clipped < 0.99) or name.startswith("reinforce"), (name, mode, clipped)
        assert abs(reference.loss) < reference.magnitude
        assert reference.details["entropy"] > 1 and reference.details["kl"] > 1e-3
        assert reference.details["train_rollout_logprob_diff_max"] > 2 * reference.details["train_rollout_logprob_diff"]
        assert 0 < reference.details["train_rollout_outliers"] < 1 and reference.details["train_rollout_kl"] > 1e-3
        assert abs(reference.details["train_rollout_correlation"]) < 0.999
    token_mean = grid.reference(whole["clip+k2-by-sequence", "token-mean"]).details
    by_sequence = grid.reference(whole["clip+k2-by-sequence", "seq-mean-token-mean"]).details
    assert token_mean["kl_loss"] == pytest.approx(by_sequence["kl_loss"], rel=1e-14)  # its own aggregation, always
    assert token_mean["policy_loss"] != pytest.approx(by_sequence["policy_loss"], rel=1e-3)


@pytest.mark.parametrize("layout", ("1", "dp2", "ulysses2"))
def test_sum_leaves_normalization_to_the_caller(grid, layout):
    """Tinker's verbs: pre-scaled advantages, several calls before a step; the gradient is that of one call."""
    ranks = grid.on_ranks(layout, world.calls_before_a_step, grid.on(layout, loss=LossConfig("sum")), grid.frozen)
    for apart, together in ranks:
        assert apart.keys() == together.keys() == ranks[0][1].keys()
        for name, gradient in together.items():
            assert np.linalg.norm(gradient) > 1e-6, name
            assert np.linalg.norm(apart[name] - gradient) <= 1e-12 * np.linalg.norm(gradient), name
            np.testing.assert_allclose(gradient, ranks[0][1][name], rtol=1e-9, atol=1e-12)  # one model, all ranks


@pytest.mark.parametrize("bug", POLICY, ids=lambda bug: bug.name)
def test_a_planted_bug_fails_where_it_shows_and_only_there(grid, bug):
    triples = [
        ("gspo", "seq-mean-token-mean", 96),
        ("clip+k2-by-sequence", "token-mean", 96),
        ("grpo", "token-mean", 0),
    ]
    cases, samples = cases_of(grid, triples), recorded_batch(False)
    for layout in map(Layout.parse, ("ulysses2", "dp2", "1")):
        run = grid.run(layout, cases, bug)
        for case, found in zip(cases, run, strict=True):
            against = compare(found, grid.reference(case), TOLERANCE["fp64"])
            spoiled = bug.must_fail_on(case.run(layout, samples, grid.arch))
            assert against.passed != spoiled, f"{bug.name} on {layout}, {case.name}: {against.reason or 'not noticed'}"
            assert not spoiled or against.gradient_error > 1e-6
