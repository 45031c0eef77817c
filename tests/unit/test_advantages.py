"""Advantages against the papers' formulas (tests/oracles/rl/formulas.py), on groups and lengths of uneven size."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.rl import formulas

from isoloss.engine.rl import advantages

REWARDS = st.floats(-5, 5, allow_subnormal=False)
GROUPED = {
    advantages.grpo: lambda rewards: formulas.grpo(rewards, advantages.EPSILON),
    advantages.dr_grpo: formulas.dr_grpo,
    advantages.rloo: formulas.rloo,
}


@st.composite
def batches(draw):
    """Rewards, groups (interleaved, of uneven sizes) and valid ones of a batch; an invalid reward is any number."""
    count = draw(st.integers(1, 14))
    rewards = draw(st.lists(REWARDS | st.sampled_from([0.0, 1.0]), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    valid = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid)


def of_groups(formula, rewards_S, group_S, valid_S):
    """The formula for the valid completions of each group; 0 for the others."""
    wanted = np.zeros(len(rewards_S))
    for group in set(group_S.tolist()):
        at = np.flatnonzero((group_S == group).numpy() & valid_S.numpy())
        if len(at):
            wanted[at] = formula(rewards_S.numpy()[at].tolist())
    return wanted


@pytest.mark.parametrize("estimator", GROUPED)
@given(batch=batches())
def test_grouped(estimator, batch):
    got_S = estimator(*batch)
    assert got_S.dtype == torch.float64
    # Rewards that are alike but for rounding have a deviation of rounding: 1e-6 beside it amplifies by 1e6 at most.
    assert got_S.numpy() == pytest.approx(of_groups(GROUPED[estimator], *batch), rel=1e-9, abs=1e-8)


@pytest.mark.parametrize("estimator", GROUPED)
def test_worked_by_hand(estimator):
    group_S, valid_S = torch.tensor([0, 1, 0, 0, 1]), torch.ones(5, dtype=torch.bool)
    rewards_S = torch.tensor([1.0, 5.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    wanted = {
        advantages.grpo: [0.0, 2**-0.5, -1.0, 1.0, -(2**-0.5)],  # deviations 1 and 2 ** 0.5
        advantages.dr_grpo: [0.0, 1.0, -1.0, 1.0, -1.0],
        advantages.rloo: [0.0, 2.0, -1.5, 1.5, -2.0],
    }[estimator]
    assert estimator(rewards_S, group_S, valid_S).tolist() == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("estimator", GROUPED)
@given(batch=batches(), other=REWARDS)
def test_an_invalid_completion_influences_nothing(estimator, batch, other):
    rewards_S, group_S, valid_S = batch
    got_S = estimator(rewards_S, group_S, valid_S)
    changed_S = estimator(torch.where(valid_S, rewards_S, other), group_S, valid_S)
    assert torch.equal(got_S, changed_S) and not got_S[~valid_S].any()
    left_out_S = estimator(rewards_S[valid_S], group_S[valid_S], valid_S[valid_S])
    assert torch.equal(got_S[valid_S], left_out_S)


@pytest.mark.parametrize("estimator", GROUPED)
def test_groups_that_teach_nothing(estimator):
    """One valid completion; all alike; none valid."""
    rewards_S = torch.tensor([3.0, 9.0, 0.7, 0.7, 0.7, 1.0], dtype=torch.float64)
    group_S = torch.tensor([0, 0, 1, 1, 1, 2])
    valid_S = torch.tensor([True, False, True, True, True, False])
    assert estimator(rewards_S, group_S, valid_S).tolist() == pytest.approx([0.0] * 6, abs=1e-9)


@given(batch=batches(), shift=REWARDS, scale=st.floats(0.5, 3))
def test_of_shifted_and_scaled_rewards(batch, shift, scale):
    rewards_S, *rest = batch
    for estimator in (advantages.dr_grpo, advantages.rloo):
        moved_S = estimator(rewards_S * scale + shift, *rest)
        assert moved_S.numpy() == pytest.approx(scale * estimator(rewards_S, *rest).numpy(), abs=1e-12)


@given(st.lists(REWARDS, max_size=12), st.floats(0, 1))
def test_discounted_returns(rewards, gamma):
    wanted = [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
    got_C = advantages.discounted_returns(torch.tensor(rewards, dtype=torch.float64), gamma)
    assert got_C.dtype == torch.float64 and got_C.tolist() == pytest.approx(wanted, abs=1e-12)


@given(st.data(), st.integers(0, 12), st.floats(0, 1), st.floats(0, 1))
def test_gae(data, length, gamma, lam):
    tokens = st.lists(REWARDS, min_size=length, max_size=length)
    rewards, values = data.draw(tokens), data.draw(tokens)
    got = advantages.gae(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64), gamma, lam
    )
    for of_tokens, wanted in zip(got, formulas.gae(rewards, values, gamma, lam)):
        assert of_tokens.tolist() == pytest.approx(wanted.tolist(), abs=1e-11)


def test_gae_at_the_ends_of_lambda():
    rewards_C = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)
    values_C = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    advantages_C, returns_C = advantages.gae(rewards_C, values_C, 1.0, 1.0)
    assert advantages_C.tolist() == [1.5, 1.0, 0.5] and returns_C.tolist() == [2.0, 2.0, 2.0]  # Monte Carlo
    advantages_C, returns_C = advantages.gae(rewards_C, values_C, 0.5, 0.0)
    assert advantages_C.tolist() == [0.0, -0.25, 0.5] and returns_C.tolist() == [0.5, 0.75, 2.0]  # one step


@given(st.lists(st.lists(REWARDS, max_size=6), max_size=5))
def test_whitening(of_completions):
    got = advantages.whiten([torch.tensor(part, dtype=torch.float64) for part in of_completions])
    assert [len(part) for part in got] == [len(part) for part in of_completions]
    if sum(map(len, of_completions)) < 2:
        assert not any(part.any() for part in got)
        return
    for part, wanted in zip(got, formulas.whiten(of_completions, 1e-8)):
        assert part.tolist() == pytest.approx(wanted.tolist(), rel=1e-9, abs=1e-9)


def test_whitened_values_have_mean_0_and_variance_1():
    parts = advantages.whiten([torch.tensor([1.0, 5.0]).double(), torch.tensor([-3.0, 0.0, 9.0]).double()])
    assert float(torch.cat(parts).mean()) == pytest.approx(0, abs=1e-15)
    assert float(torch.cat(parts).var()) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(("longest", "buffer"), [(20, 5), (16, 16), (7, 1), (9, 0)])
def test_overlong_punishment(longest, buffer):
    lengths = range(1, longest + 4)
    got = advantages.overlong_punishment(torch.tensor(lengths), longest, buffer)
    wanted = [formulas.overlong(length, longest, buffer) if buffer else 0.0 for length in lengths]
    assert got.tolist() == pytest.approx(wanted, abs=1e-15)
