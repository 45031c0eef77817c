"""The losses of the server against numbers by hand and PyTorch."""

import math
from types import SimpleNamespace

import pytest
import torch

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve.ranks.losses import KINDS, loss_of

LOGP, OLD, ADVANTAGE = math.log(0.5), math.log(0.25), 3.0  # r = 2


def value(name: str, advantage: float = ADVANTAGE, **config: float) -> tuple[float, float]:
    """Return a loss of one token and its derivative."""
    logp = torch.tensor([LOGP], dtype=torch.float64, requires_grad=True)
    fields = {"weights": [advantage], "logprobs": [OLD], "advantages": [advantage]}
    inputs = SimpleNamespace(
        logprobs_N=logp, fields={name: torch.tensor(of, dtype=torch.float64) for name, of in fields.items()}
    )
    (term,) = loss_of(name, config).terms
    loss = term.per_token(inputs).sum()  # pyright: ignore[reportArgumentType]
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("name", "config", "advantage", "loss", "slope"),
    [
        ("cross_entropy", {}, 3.0, -3 * LOGP, -3),
        ("cross_entropy", {}, -0.5, 0.5 * LOGP, 0.5),
        ("importance_sampling", {}, 3.0, -6, -6),
        ("ppo", {}, 3.0, -1.2 * 3, 0),
        ("ppo", {}, -3.0, 6, 6),
        ("ppo", {"clip_high_threshold": 2.5}, 3.0, -6, -6),
        ("cispo", {}, 3.0, -2 * 3 * LOGP, -6),
        ("cispo", {"clip_high_threshold": 1.5}, 3.0, -1.5 * 3 * LOGP, -4.5),
        ("dro", {"beta": 0.4}, 3.0, -(3 * LOGP - 0.2 * math.log(2) ** 2), -(3 - 0.4 * math.log(2))),
    ],
)
def test_a_loss_of_one_token_by_hand(name, config, advantage, loss, slope):
    assert value(name, advantage, **config) == pytest.approx((loss, slope), abs=1e-14)


def test_targets_of_one_position_are_added():
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    fields = {"weights": torch.tensor([[0.5, 0.25], [0.0, -1.0]])}
    inputs = SimpleNamespace(logprobs_N=logp, fields=fields)
    (term,) = loss_of("cross_entropy", {}).terms
    assert term.per_token(inputs).tolist() == [1.0, -4.0]  # pyright: ignore[reportArgumentType]


def test_gspo_has_the_ratio_of_a_sequence_and_a_gradient_at_each_token():
    logp = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.7], dtype=torch.float64, requires_grad=True)
    document = torch.tensor([0, 0, 0, 1, 1])
    fields = {
        "logprobs": torch.tensor([-1.1, -2.3, -9.0, -0.4, -0.3], dtype=torch.float64),
        "advantages": torch.tensor([2.0, 2.0, 0.0, -1.0, -1.0], dtype=torch.float64),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64),
    }
    sums = lambda values: torch.zeros(2, dtype=torch.float64).index_add(0, document, values)[document]
    inputs = SimpleNamespace(logprobs_N=logp, fields=fields, sequence_sum=sums)
    (term,) = loss_of("gspo", {"clip_high_threshold": 1.3}).terms
    losses = term.per_token(inputs)  # pyright: ignore[reportArgumentType]
    losses.sum().backward()
    ratio = math.exp(0.2)  # the mean of 0.1 and 0.3; a sequence without a mask has the ratio 1
    assert losses.tolist() == pytest.approx([-2 * ratio, -2 * ratio, 0, 1, 1], abs=1e-14)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-2 * ratio, -2 * ratio, 0, 1, 1], abs=1e-14)
    (clipped,) = loss_of("gspo", {}).terms  # at 1.2
    assert clipped.per_token(inputs)[0].item() == pytest.approx(-2.4)  # pyright: ignore[reportArgumentType]


def test_every_loss_is_a_sum_without_a_denominator():
    assert [term.aggregation.mode for name in KINDS for term in loss_of(name, {}).terms] == ["sum"] * len(KINDS)


@pytest.mark.parametrize(
    ("name", "config", "line"),
    [
        ("stable_reinforce", {}, "no public formula: run the recipe with loss_fn=importance_sampling"),
        ("reinforce", {}, "does not exist here; choose one of cross_entropy"),
        ("ppo", {"clip": 0.2}, "ppo has no option 'clip'; its options are: clip_low_threshold"),
        ("dro", {"beta": "much"}, "beta='much' of dro must be a number"),
    ],
)
def test_what_a_loss_cannot_do_is_refused_in_one_line(name, config, line):
    with pytest.raises(UserError, match=line.replace("(", r"\(")):
        loss_of(name, config)
