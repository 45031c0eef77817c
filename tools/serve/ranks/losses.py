"""The losses of the Tinker API: sums over all targets, with no denominator; the client scales.

Each is a function of log-probabilities and fields at the targets. r = exp(logprobs of the policy - field `logprobs`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isoloss.engine.step.losses import Loss, Term, TokenInputs, target_logprobs
from isoloss.parallel import UserError
from isoloss.parallel.aggregation import Aggregation

# Where the public description of a loss gives no number.
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class Kind:
    """A loss: its function, the fields that it reads, and its options with their defaults."""

    function: Callable[..., Tensor]
    fields: tuple[str, ...]
    options: Mapping[str, float]


def cross_entropy(inputs: TokenInputs) -> Tensor:
    """Return -weights * logp, [N]; the sum over the targets of a position where there are several."""
    losses = -inputs.fields["weights"] * inputs.logprobs_N
    return losses if losses.ndim == 1 else losses.sum(-1)


def importance_sampling(inputs: TokenInputs) -> Tensor:
    """Return -r * advantages."""
    return -_ratio(inputs) * inputs.fields["advantages"]


def ppo(inputs: TokenInputs, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    """Return -min(r A, clip(r) A) (arXiv:1707.06347), with bounds of r itself."""
    return _clipped(_ratio(inputs), inputs.fields["advantages"], clip_low_threshold, clip_high_threshold)


def cispo(inputs: TokenInputs, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    """Return -stop(clip(r)) logp A (arXiv:2506.13585)."""
    weight_N = _ratio(inputs).detach().clamp(clip_low_threshold, clip_high_threshold)
    return -weight_N * inputs.logprobs_N * inputs.fields["advantages"]


def dro(inputs: TokenInputs, beta: float) -> Tensor:
    """Return -(logp A - beta / 2 (logp - logprobs)^2) (arXiv:2405.19107)."""
    distance_N = inputs.logprobs_N - inputs.fields["logprobs"]
    return -(inputs.logprobs_N * inputs.fields["advantages"] - beta / 2 * distance_N.square())


def gspo(inputs: TokenInputs, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    """Return `ppo` with the ratio of the whole sequence, whose gradient goes to each token (arXiv:2507.18071, 4.3):
    r = stop(s) exp(logp - stop(logp)), log s = mean of logp - logprobs, weighted with sequence_ratio_mask."""
    mask_N, logprobs_N = inputs.fields["sequence_ratio_mask"], inputs.logprobs_N
    distance_N = logprobs_N.detach() - inputs.fields["logprobs"]
    count_N = inputs.sequence_sum(mask_N)
    mean_N = inputs.sequence_sum(mask_N * distance_N) / torch.where(count_N == 0, 1.0, count_N)
    ratio_N = mean_N.exp() * (logprobs_N - logprobs_N.detach()).exp()
    return _clipped(ratio_N, inputs.fields["advantages"], clip_low_threshold, clip_high_threshold)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)


def _ratio(inputs: TokenInputs) -> Tensor:
    return (inputs.logprobs_N - inputs.fields["logprobs"]).exp()


POLICY = ("logprobs", "advantages")
KINDS = {
    "cross_entropy": Kind(cross_entropy, ("weights",), {}),
    "importance_sampling": Kind(importance_sampling, POLICY, {}),
    "ppo": Kind(ppo, POLICY, CLIP),
    "cispo": Kind(cispo, POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": Kind(gspo, (*POLICY, "sequence_ratio_mask"), CLIP),
    "dro": Kind(dro, POLICY, {"beta": 0.05}),
}


def loss_of(name: str, config: Mapping[str, float | str]) -> Loss:
    """Return the loss of a request. Raises UserError for one that does not exist here, or an option that it lacks."""
    kind = kind_of(name)
    for option, value in config.items():
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise UserError(f"loss_fn_config: {name} has no option {option!r}; its options are: {known}")
        if not isinstance(value, (int, float)):
            raise UserError(f"loss_fn_config: {option}={value!r} of {name} must be a number")
    per_token = partial(kind.function, **{**kind.options, **config})
    return Loss((Term(per_token, Aggregation("sum")),), outputs={"logprobs": target_logprobs})


def kind_of(name: str) -> Kind:
    """Return a kind of loss. Raises UserError, with another one to ask for, if its formula is not public or unknown."""
    if name == "stable_reinforce":
        raise UserError(
            "loss_fn=stable_reinforce has no public formula: run the recipe with loss_fn=importance_sampling, ppo or "
            "cispo"
        )
    if name not in KINDS:
        raise UserError(f"loss_fn={name!r} does not exist here; choose one of {', '.join(KINDS)}")
    return KINDS[name]
