"""Advantages and losses against independent code: what verl and TRL make of one batch (tests/oracles/rl)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.rl import formulas

from isoloss.engine.config.schema import BatchConfig, LossConfig, ModelConfig
from isoloss.engine.rl import advantages
from isoloss.engine.rl.algorithms import KL_ESTIMATORS, imported
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.rl.losses import k1, kl_from_reference, policy_loss, value_loss
from isoloss.engine.step.losses import Loss, Term, TokenInputs
from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.normalizer import count_tokens, token_weights

ORACLE = json.loads((Path(formulas.__file__).parent / "goldens.json").read_text(encoding="utf-8"))
VERL, TRL, LENGTHS = ORACLE["verl"], ORACLE["trl"], ORACLE["lengths"]
BATCH = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["batch"].items()}
GROUP_S = torch.tensor(ORACLE["groups"])
DOCUMENT_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def agrees(got, wanted):
    """Goldens have twelve digits; verl adds 1e-8 to the tokens of a sequence before it divides by them."""
    return got == pytest.approx(wanted, rel=3e-8, abs=1e-10)


# ---------------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "reinforce++-baseline"])
def test_grouped_advantages_are_verls(name):
    estimator = {"grpo": advantages.grpo, "rloo": advantages.rloo}.get(name, advantages.dr_grpo)
    # Sequence 5 has no token, so verl sees a reward of 0 there.
    rewards_S = BATCH["rewards"] * (torch.tensor(LENGTHS) > 0)
    advantages_N = estimator(rewards_S, GROUP_S, torch.ones(len(LENGTHS), dtype=torch.bool))[DOCUMENT_N]
    if name == "reinforce++-baseline":
        (advantages_N,) = advantages.whiten([advantages_N])
    assert agrees(advantages_N.tolist(), VERL[name])


def test_advantages_over_tokens_are_verls():
    """KL (k1, coefficient 0.2) in the reward, gamma 0.9, lambda 0.8."""
    penalty_N = 0.2 * k1(BATCH["ref_logprobs"] - BATCH["train_logprobs"])
    returns, both = [], []
    for penalty_C, values_C, reward in zip(
        penalty_N.split(LENGTHS), BATCH["old_values"].split(LENGTHS), BATCH["rewards"]
    ):
        rewards_C = -penalty_C
        rewards_C[-1:] += reward
        returns.append(advantages.discounted_returns(rewards_C, 0.9))
        both.append(advantages.gae(rewards_C, values_C, 0.9, 0.8))
    assert agrees(torch.cat(advantages.whiten(returns)).tolist(), VERL["reinforce++"])
    assert agrees(torch.cat(advantages.whiten([a for a, _ in both])).tolist(), VERL["gae"]["advantages"])
    assert agrees(torch.cat([r for _, r in both]).tolist(), VERL["gae"]["returns"])


def test_overlong_punishment_is_trls():
    assert agrees(advantages.overlong_punishment(torch.tensor(LENGTHS), 7, 4).tolist(), TRL["overlong"])


# -------------------------------------------------------------------------------------------------------------- losses


def loss_and_gradient(loss: Loss, leaf: str, group) -> dict[str, object]:
    """As the engine adds it up: every term under the weights of its own aggregation."""
    leaf_N = BATCH[leaf].clone().requires_grad_()
    fields = BATCH | {"advantages": BATCH["advantages"][DOCUMENT_N]}
    logprobs_N = leaf_N if leaf == "logprobs" else BATCH["logprobs"]
    values_N = leaf_N if leaf == "values" else BATCH["values"]
    inputs = TokenInputs(logprobs_N, BATCH["entropy"], values_N, fields, DOCUMENT_N, len(LENGTHS), group)
    masks = [torch.ones(length, dtype=torch.bool) for length in LENGTHS]
    counts = count_tokens(masks, group)
    total = torch.zeros((), dtype=torch.float64)
    for term in loss.terms:
        weights_N = torch.cat(token_weights(masks, counts, term.aggregation)[0])
        total = total + term.coefficient * (weights_N * term.per_token(inputs)).sum()
    (gradient_N,) = torch.autograd.grad(total, leaf_N)
    return {"loss": total.item(), "gradient": gradient_N.tolist()}


def weighting(mode: str, count_fully_masked: bool = False) -> LossConfig:
    length = ORACLE["norm_length"] if mode == "seq-mean-token-sum-norm" else None
    return LossConfig(mode, length, count_fully_masked)


def policy(aggregated: LossConfig, **algorithm) -> Loss:
    """clip_low is 0.1, as in every golden. The configuration gives GSPO one aggregation only, its formula is compared
    under all of them."""
    gspo = algorithm.get("loss") == "gspo"
    loss = policy_loss(
        RLConfig(
            ModelConfig("somewhere"),
            batch=BatchConfig(global_size=len(LENGTHS)),
            loss=LossConfig("seq-mean-token-mean") if gspo else aggregated,
            rollout=RolloutConfig(num_generations=2),
            algorithm=AlgorithmConfig(**{"clip_low": 0.1, "clip_high": 0.25, **algorithm}),
        )
    )
    return replace(loss, terms=tuple(replace(t, aggregation=told(t, aggregated)) for t in loss.terms)) if gspo else loss


def told(term: Term, aggregated: LossConfig) -> Aggregation:
    return aggregated.weighting() if term.name in ("policy_loss", "kl_loss") else term.aggregation


def check(got: dict[str, object], wanted: dict[str, object]) -> None:
    assert agrees(got["loss"], wanted["loss"])
    assert agrees(got["gradient"], wanted["gradient"])
    assert any(wanted["gradient"])


CORRECTED = {"importance": "token", "importance_cap": 1.1}
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("importance", ["none", "token", "sequence"])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "reinforce"])
def test_policy_losses_are_verls(name, importance, mode, one_rank):
    ours = {"vanilla": {"loss": "clip", "dual_clip": 1.4}}.get(name, {"loss": name})
    loss = policy(weighting(mode), importance=importance, importance_cap=1.1, **ours)
    got, wanted = loss_and_gradient(loss, "logprobs", one_rank), VERL[f"{name} {importance} {mode}"]
    if (name, importance) == ("gspo", "token"):  # verl differentiates GSPO-token: README.md
        assert agrees(got["loss"], wanted["loss"])
    else:
        check(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_value_losses_are_verls(mode, one_rank):
    loss = value_loss(AlgorithmConfig(value_clip=0.3), weighting(mode))
    check(loss_and_gradient(loss, "values", one_rank), VERL[f"value {mode}"])


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimates_are_verls(name, one_rank):
    inputs = TokenInputs(BATCH["logprobs"], None, None, BATCH, DOCUMENT_N, len(LENGTHS), one_rank)
    assert agrees(kl_from_reference(inputs, imported(KL_ESTIMATORS[name], name)).tolist(), VERL[name])


@pytest.mark.parametrize(
    ("name", "loss", "algorithm"),
    [
        ("grpo", weighting("seq-mean-token-mean", True), {}),
        ("bnpo", weighting("token-mean"), {}),
        ("dr_grpo", weighting("seq-mean-token-sum-norm", True), {}),
        ("dapo", weighting("token-mean"), {}),
        ("dapo delta", weighting("token-mean"), {"dual_clip": 1.4}),
        ("cispo", weighting("token-mean"), {"loss": "cispo", "clip_low": 1.0}),
        ("dapo importance", weighting("token-mean"), CORRECTED),
        ("gspo", weighting("seq-mean-token-mean", True), {"loss": "gspo"}),
        ("gspo importance", weighting("seq-mean-token-mean", True), {"loss": "gspo", **CORRECTED}),
    ],
)
def test_whole_losses_are_trls(name, loss, algorithm, one_rank):
    """With k3 in the loss, aggregated like the policy's term, and a bonus of the mean entropy of the tokens."""
    ours = policy(loss, kl_coef=0.15, entropy_coef=0.05, entropy_aggregation="token-mean", **algorithm)
    check(loss_and_gradient(ours, "logprobs", one_rank), TRL[name])
