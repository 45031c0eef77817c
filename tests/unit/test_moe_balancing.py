"""Losses of the routers against their papers' formulas, written out document by document in numpy; what a run's keys
about balance mean, and which are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.decoders import decoder, with_mlp

from isoloss.engine.config.schema import LossConfig, MoeConfig
from isoloss.engine.step import moe_balancing
from isoloss.engine.step.losses import Loss, Term, cross_entropy, negative_log_likelihood
from isoloss.models.kinds.experts import Experts
from isoloss.models.mcore.moe.router import route, selection_margin
from isoloss.models.mcore.moe.router_losses import RoutedTokens
from isoloss.parallel import UserError
from isoloss.parallel.aggregation import Aggregation

EXPERTS = Experts(6, 2, 28, "softmax", True)
DENSE = decoder(6, 48, (8, 4, 6), 72, 100)
SPARSE = replace(with_mlp(DENSE, EXPERTS), family="mixtral")
BIASED = with_mlp(SPARSE, replace(EXPERTS, selection_bias=True))
LENGTHS = (5, 1, 9, 2)  # of the documents of a row; then two tokens of padding
TOKENS = sum(LENGTHS)
COEFFICIENTS = (0.3, 0.02)


def logits() -> np.ndarray:
    return np.random.default_rng(1).normal(0.0, 2.0, (TOKENS + 2, EXPERTS.count))


def scores(x: np.ndarray, score: str) -> np.ndarray:
    if score == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def of_documents(x: np.ndarray, score: str, bias: np.ndarray) -> list[float]:
    """arXiv:2412.19437, equations 17 to 20, for each document."""
    losses = []
    for document in np.split(x[:TOKENS], np.cumsum(LENGTHS)[:-1]):
        s = scores(document, score)
        chosen = np.argsort(-(s + bias), axis=1)[:, : EXPERTS.top_k]
        count = np.array([(chosen == expert).sum() for expert in range(EXPERTS.count)])
        f = EXPERTS.count / (EXPERTS.top_k * len(document)) * count
        losses.append(float(f @ (s / s.sum(1, keepdims=True)).mean(0)))
    return losses


def z_of_tokens(x: np.ndarray) -> np.ndarray:
    """The router z-loss of arXiv:2202.08906, for each token."""
    return np.log(np.exp(x[:TOKENS]).sum(1)) ** 2


def formula(x: np.ndarray, score: str, bias: np.ndarray, mode: str) -> float:
    mean = np.sum if mode == "sum" else np.mean
    aux, z = COEFFICIENTS
    return aux * mean(of_documents(x, score, bias)) + z * mean(z_of_tokens(x))


def slopes(x: np.ndarray, *rest) -> np.ndarray:
    """Central differences of the formula; the choices, hence f, are the same on both sides."""
    found = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        found[place] = (formula(x + step, *rest) - formula(x - step, *rest)) / 2e-6
    return found


@pytest.mark.parametrize("mode", ("token-mean", "seq-mean-token-sum", "sum"))
@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
@pytest.mark.parametrize("biased", (False, True))
def test_losses_and_gradients_are_those_of_the_papers(one_rank, mode, score, biased):
    """The row's documents in the order 2, 0, 3, 1 of the step; padding, whose logits matter to nobody, behind."""
    x_ZE = torch.tensor(logits(), requires_grad=True)
    bias = np.array([0.3, -0.2, 0.0, 0.1, -0.4, 0.2]) * biased
    experts = replace(EXPERTS, score=score, selection_bias=biased)
    place = {2: 0, 0: LENGTHS[2], 3: LENGTHS[2] + LENGTHS[0], 1: TOKENS - LENGTHS[1]}  # where each begins in the step
    position = [at for length in LENGTHS for at in range(length)]
    document = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    config = MoeConfig("sequence", *COEFFICIENTS)
    step_lengths = [LENGTHS[index] for index in place]
    loss = Loss.of(negative_log_likelihood, mode)
    asked = moe_balancing.configured(config, SPARSE)
    assert asked is not None
    started = moe_balancing.start(asked, step_lengths, loss, torch.device("cpu"))
    starts = torch.tensor([place[index] for index in range(len(LENGTHS))])
    of_row = torch.eye(len(LENGTHS), dtype=torch.float64), torch.tensor(LENGTHS), starts
    tokens = RoutedTokens(torch.tensor([*document, -1, -1]), torch.tensor([*position, 0, 1]), *of_row, one_rank)
    routing = route(x_ZE, experts, torch.tensor(bias) if biased else None)
    (0.0 * started.add(routing.weights_ZX, routing, tokens)).sum().backward()

    aux, z = started.sums_A.tolist()
    assert COEFFICIENTS[0] * aux + COEFFICIENTS[1] * z == pytest.approx(formula(logits(), score, bias, mode), rel=1e-13)
    assert x_ZE.grad is not None and not x_ZE.grad[TOKENS:].any()
    np.testing.assert_allclose(x_ZE.grad.numpy(), slopes(logits(), score, bias, mode), rtol=1e-6, atol=1e-9)
    for consumed, counts in zip(started.consumed_A.tolist(), started.counts, strict=True):
        assert consumed == pytest.approx(counts.weight_sum, rel=1e-14)


def test_only_a_plain_sum_of_everything_leaves_the_division_to_the_caller():
    asked = moe_balancing.configured(MoeConfig(z_loss_coef=0.1), SPARSE)
    assert asked is not None
    summed, mean = (Term(negative_log_likelihood, Aggregation(mode)) for mode in ("sum", "token-mean"))
    for terms, weight in (((summed,), 1.0), ((mean,), 1 / 8), ((summed, replace(mean, name="kl")), 1 / 8)):
        started = moe_balancing.start(asked, [3, 5], Loss(terms), torch.device("cpu"))
        assert started.weights_AO.tolist() == [[weight] * 8]


def test_margins_are_the_distance_to_another_choice():
    """The second and the third of six; among groups of two, of which the best is kept, that of the groups."""
    x_ZE = torch.tensor([[4.0, 1.0, 2.0, 2.5, 0.0, -1.0]], dtype=torch.float64)
    probability = torch.softmax(x_ZE, 1)[0].tolist()
    plain = selection_margin(x_ZE, EXPERTS, None)
    assert plain.tolist() == pytest.approx([probability[3] - probability[2]])
    grouped = selection_margin(x_ZE, replace(EXPERTS, groups=3, groups_kept=1), None)
    assert grouped.tolist() == pytest.approx([probability[0] + probability[1] - probability[2] - probability[3]])
    bias = torch.tensor([0.0, 0.0, probability[3] - probability[2] + 0.01, 0.0, 0.0, 0.0])
    assert selection_margin(x_ZE, EXPERTS, bias).tolist() == pytest.approx([0.01])
    assert selection_margin(x_ZE, replace(EXPERTS, top_k=6), None).tolist() == [float("inf")]


def test_a_step_without_samples_has_no_weights():
    asked = moe_balancing.configured(MoeConfig("sequence", 0.1, 0.1), SPARSE)
    assert asked is not None
    started = moe_balancing.start(asked, [], cross_entropy(LossConfig()), torch.device("cpu"))
    assert started.weights_AO.shape == (2, 0)


def test_nothing_is_balanced_unless_asked():
    assert moe_balancing.configured(MoeConfig(), BIASED) is None
    everything = MoeConfig("sequence", 0.1, 0.2, 0.3)
    assert moe_balancing.configured(everything, BIASED.as_critic()) is None
    asked = moe_balancing.configured(everything, BIASED)
    assert asked is not None and asked.bias_rate == 0.3
    assert [(loss.name, loss.coefficient) for loss in asked.losses] == [("moe_aux_loss", 0.1), ("moe_z_loss", 0.2)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"aux_loss": "aux_loss"},
            "moe.aux_loss='aux_loss' is balance within each micro-batch: .*; use one of",
        ),
        ({"aux_loss": "seq_aux_loss"}, "moe.aux_loss='seq_aux_loss' takes a packed row for one sequence"),
        (
            {"aux_loss": "global_aux_loss"},
            "moe.aux_loss='global_aux_loss' compares each micro-batch with the",
        ),
        ({"aux_loss": "sinkhorn"}, "moe.aux_loss='sinkhorn' iterates over the tokens that a rank happens to hold"),
        ({"aux_loss": "seqence"}, "moe.aux_loss='seqence' is unknown; use one of none, sequence"),
        ({"aux_loss_coef": 0.1}, "moe.aux_loss_coef=0.1 weighs no loss: set moe.aux_loss=sequence"),
        ({"aux_loss": "sequence"}, "moe.aux_loss_coef=0.0 leaves moe.aux_loss=sequence without effect"),
        ({"z_loss_coef": -0.1}, "moe.z_loss_coef=-0.1 must not be negative"),
        ({"bias_update_rate": float("nan")}, "moe.bias_update_rate=nan must be a finite number"),
    ],
)
def test_values_that_are_refused(values, message):
    with pytest.raises(UserError, match=message) as refusal:
        MoeConfig(**values)
    assert "\n" not in str(refusal.value)
