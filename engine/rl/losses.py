"""Compute per-token losses of policy and critic. The normalizer weights their terms, like those of every other loss.

A loss reads these fields of its samples: `advantages`; `rollout_logprobs`, from the backend; `train_logprobs` of the
policy that generated, from the trainer (without them the present policy is that one, as in the first optimizer step
after generation); `importance`, weights that were computed before the step; `ref_logprobs` of the initial policy;
`returns` and `old_values`, with a critic.

All tensors are [N], the labeled tokens of a micro-batch on this rank.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from isoloss.engine.config.schema import LossConfig
from isoloss.engine.rl.algorithms import KL_ESTIMATORS, imported, loss_of
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.step.losses import Loss, PerToken, Term, TokenInputs
from isoloss.parallel.aggregation import Aggregation

# Its exponential is far beyond any clipping range and still finite in fp32, where inf * 0 would be a NaN.
LARGEST_LOG_RATIO = 20.0
LARGEST_K3 = 10.0  # most that k3 is as a penalty, per token; as in verl and NeMo-RL
OUTLIER = 0.5  # nats between the trainer's and the backend's log-probability of a token


def policy_loss(config: RLConfig, function: Callable[..., Tensor] | None = None) -> Loss:
    """Return the loss of a policy step: the policy term, the KL term and the entropy bonus that are switched on.

    function: function of (inputs, algorithm) for the policy term; None: that of algorithm.loss.
    """
    algorithm, main = config.algorithm, config.loss.weighting()

    def weighting(mode: str | None) -> Aggregation:
        if mode is None or mode == main.mode:
            return main
        length = config.trajectory_tokens if mode == "seq-mean-token-sum-norm" else None
        return dataclasses.replace(main, mode=mode, norm_length=length)

    function = function or imported(loss_of(algorithm.loss).function, "algorithm.loss")
    terms = [Term(partial(function, algorithm=algorithm), main, name="policy_loss")]
    if algorithm.uses_reference and algorithm.kl_in == "loss":
        per_token = partial(kl_from_reference, estimator=kl_estimator(algorithm))
        terms.append(Term(per_token, weighting(algorithm.kl_aggregation), algorithm.kl_coef, "kl_loss"))
    if algorithm.entropy_coef > 0:
        terms.append(Term(entropy, weighting(algorithm.entropy_aggregation), -algorithm.entropy_coef, "entropy_term"))
    return Loss(
        tuple(terms),
        needs_entropy=True,
        temperature=config.rollout.temperature,
        mean_metrics=mean_metrics(algorithm),
        max_metrics={"train_rollout_logprob_diff_max": rollout_difference},
        correlation_metrics={"train_rollout_correlation": rollout_probabilities},
    )


# ---- policy ---------------------------------------------------------------------------------------------------------


def clip_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with separate bounds below and
    above (clip-higher: Yu et al. 2025, DAPO, arXiv 2503.14476) and, for negative advantages, dual clipping (Ye et al.
    2020, arXiv 1912.09729). GRPO, Dr.GRPO and DAPO differ from it in advantages and aggregation only."""
    ratio, advantages = torch.exp(log_ratio(inputs, algorithm)), inputs.fields["advantages"]
    objective = torch.minimum(ratio * advantages, clipped(ratio, algorithm) * advantages)
    if algorithm.dual_clip is not None:
        floor = torch.maximum(objective, algorithm.dual_clip * advantages)
        objective = torch.where(advantages < 0, floor, objective)
    return -objective * importance(inputs, algorithm)


def gspo_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the clipped surrogate of the sequence's likelihood ratio, length-normalized: the geometric mean of its
    tokens' ratios (Zheng et al. 2025, GSPO, arXiv 2507.18071, eq. 5-7). Every token carries the sequence's number,
    which seq-mean-token-mean makes the paper's objective."""
    ratio, advantages = torch.exp(sequence_log_ratio(inputs, algorithm)), inputs.fields["advantages"]
    objective = torch.minimum(ratio * advantages, clipped(ratio, algorithm) * advantages)
    return -objective * importance(inputs, algorithm)


def cispo_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the REINFORCE loss with the clipped ratio as a constant weight: no token loses its gradient (MiniMax-M1,
    arXiv 2506.13585, eq. 4-5; the paper bounds the ratio from above only: algorithm.clip_low=1)."""
    weight = clipped(torch.exp(log_ratio(inputs, algorithm)), algorithm).detach()
    return -weight * inputs.fields["advantages"] * inputs.logprobs_N * importance(inputs, algorithm)


def reinforce_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return -advantage * log-probability (Williams 1992), corrected by the importance weight if one is configured."""
    return -inputs.fields["advantages"] * inputs.logprobs_N * importance(inputs, algorithm)


def train_logprobs(inputs: TokenInputs) -> Tensor:
    return inputs.fields.get("train_logprobs", inputs.logprobs_N.detach())


def old_logprobs(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the log-probabilities of the policy that the ratio starts from."""
    return inputs.fields["rollout_logprobs"] if algorithm.old_logprobs == "rollout" else train_logprobs(inputs)


def log_ratio(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the log of each token's present probability over its old one."""
    return (inputs.logprobs_N - old_logprobs(inputs, algorithm)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_log_ratio(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the mean of log_ratio over a sequence's tokens, at each of them. Two all-reduces over context."""
    tokens = inputs.sequence_sum(torch.ones_like(inputs.logprobs_N))
    mean = inputs.sequence_sum(inputs.logprobs_N - old_logprobs(inputs, algorithm)) / tokens
    return mean.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clipped(ratio: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    return ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)


def importance(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor | float:
    """Return the importance weight of the trainer's policy over the rollout's, of each token or its sequence: those of
    the samples' field, or else `importance_weights`.

    The trainer's policy is the one that generated, or with algorithm.old_logprobs=rollout, where no ratio accounts for
    the steps since then, the present one.

    Engines compute the same weights to different rounding (or precision), so tokens come from a policy that is not
    quite the trainer's: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    Collectives: those of `importance_weights`.
    """
    if not algorithm.corrects:
        return 1.0
    if "importance" in inputs.fields:
        return inputs.fields["importance"]
    train = inputs.logprobs_N.detach() if algorithm.old_logprobs == "rollout" else train_logprobs(inputs)
    return importance_weights(train - inputs.fields["rollout_logprobs"], inputs.sequence_sum, algorithm)


def importance_weights(
    difference: Tensor, sequence_sum: Callable[[Tensor], Tensor], algorithm: AlgorithmConfig
) -> Tensor:
    """Return the weight of each target, with d the trainer's log-probability less the backend's, r = exp(d), or of the
    sum of d over its sequence (algorithm.importance), and sums over the targets of its sequence:

    truncate      min(r, cap)
    mask          r if r <= cap, else 0; with a lower bound too: IcePop (Ring-1T, arXiv 2510.18855)
    rejection     0 where exp(sum d), or exp(mean d), is outside its bounds
    veto          0 where some target of the sequence has exp(d) below it

    sequence_sum: function that sums over the targets of each target's sequence. One call of it for each of
        importance=sequence and veto, one for rejection=sequence and two for geometric.
    """
    weight = torch.ones_like(difference)
    if algorithm.importance != "none":
        log = sequence_sum(difference) if algorithm.importance == "sequence" else difference
        ratio = torch.exp(log.clamp(max=LARGEST_LOG_RATIO))
        weight = ratio.clamp(max=algorithm.importance_cap)
        if algorithm.importance_beyond == "mask":
            kept = (ratio <= algorithm.importance_cap) & (ratio >= (algorithm.importance_low or 0.0))
            weight = torch.where(kept, ratio, 0.0)
    if algorithm.rejection != "none":
        log = sequence_sum(difference)
        if algorithm.rejection == "geometric":
            log = log / sequence_sum(torch.ones_like(difference))
        low, high = algorithm.rejection_low, algorithm.rejection_high
        outside = (log < (-math.inf if low is None else math.log(low))) | (log > math.log(high or math.inf))
        weight = torch.where(outside, 0.0, weight)
    if algorithm.veto is not None:
        below = (difference < math.log(algorithm.veto)).to(difference.dtype)
        weight = torch.where(sequence_sum(below) > 0, 0.0, weight)
    return weight


# ---- KL and entropy -------------------------------------------------------------------------------------------------


def k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def bounded_k3(log_ratio: Tensor) -> Tensor:
    """Return k3, at most LARGEST_K3, which 2.6 nats up or 11 down reach: one token cannot dominate the gradient, which
    is at most 12.6, and 0 beyond the bound, where k1 and k2 still pull back."""
    return k3(log_ratio).clamp(max=LARGEST_K3)


# Above: estimators of KL(policy || reference) from tokens of the policy, given log(reference / policy): Schulman 2020,
# "Approximating KL divergence". As a term of the loss, k2's gradient is that of the KL divergence; k1's is 0 in
# expectation, and k3's that of the reverse one.


def kl_estimator(algorithm: AlgorithmConfig) -> Callable[[Tensor], Tensor]:
    """Return the KL estimator, a function of log(reference / policy)."""
    return imported(KL_ESTIMATORS[algorithm.kl_estimator], "algorithm.kl_estimator")


def kl_from_reference(inputs: TokenInputs, estimator: Callable[[Tensor], Tensor]) -> Tensor:
    return estimator(inputs.fields["ref_logprobs"] - inputs.logprobs_N)


def entropy(inputs: TokenInputs) -> Tensor:
    assert inputs.entropy_N is not None, "the loss says that it needs it"
    return inputs.entropy_N


# ---- critic ---------------------------------------------------------------------------------------------------------


def value_loss(algorithm: AlgorithmConfig, loss: LossConfig) -> Loss:
    """Return half the squared error of the values, clipped around the old ones like PPO's ratio (OpenAI's ppo2)."""

    def per_token(inputs: TokenInputs) -> Tensor:
        assert inputs.values_N is not None, "the model has a value head"
        values, returns, old = inputs.values_N, inputs.fields["returns"], inputs.fields["old_values"]
        error = (values - returns).square()
        if algorithm.value_clip is not None:
            near = old + (values - old).clamp(-algorithm.value_clip, algorithm.value_clip)
            error = torch.maximum(error, (near - returns).square())
        return error / 2

    return Loss((Term(per_token, loss.weighting(), name="value_loss"),))


# ---- metrics --------------------------------------------------------------------------------------------------------


def mean_metrics(algorithm: AlgorithmConfig) -> dict[str, PerToken]:
    """Return the metrics of a policy step that are means over its tokens.

    clip_fraction: share of tokens whose clipped ratio changed the objective (cispo: the weight); 0 for a loss without a
    ratio. kl: k3 estimate of the divergence from the initial policy if there is a reference, else from the policy that
    generated. entropy: nats. Three metrics compare the trainer's and the backend's log-probabilities under the weights
    that generated: train_rollout_logprob_diff, their absolute difference; train_rollout_kl, k3 of the backend's policy
    from the trainer's; train_rollout_outliers, the share of tokens that are more than half a nat apart.
    rejected_fraction, where algorithm.rejected=counted and tokens can be rejected: the share of weight 0.
    These metrics have to show a tail, so their k3 has no LARGEST_K3.
    """

    loss = loss_of(algorithm.loss)

    def clip_fraction(inputs: TokenInputs) -> Tensor:
        if loss.ratio is None:
            return torch.zeros_like(inputs.logprobs_N)
        ratio_of = sequence_log_ratio if loss.ratio == "sequence" else log_ratio
        ratio = torch.exp(ratio_of(inputs, algorithm))
        bounded = clipped(ratio, algorithm)
        if loss.constant:
            return (bounded != ratio).to(ratio.dtype)
        return ((bounded - ratio) * inputs.fields["advantages"] < 0).to(ratio.dtype)

    def kl(inputs: TokenInputs) -> Tensor:
        return kl_from_reference(inputs, k3) if "ref_logprobs" in inputs.fields else k3(log_ratio(inputs, algorithm))

    def rollout_kl(inputs: TokenInputs) -> Tensor:
        return k3(train_logprobs(inputs) - inputs.fields["rollout_logprobs"])

    def outliers(inputs: TokenInputs) -> Tensor:
        difference = rollout_difference(inputs)
        return (difference > OUTLIER).to(difference.dtype)

    def rejected_fraction(inputs: TokenInputs) -> Tensor:
        weight = importance(inputs, algorithm)
        assert isinstance(weight, Tensor), "the algorithm rejects"
        return (weight == 0).to(inputs.logprobs_N.dtype)

    rejected = {"rejected_fraction": rejected_fraction} if algorithm.rejects and algorithm.rejected == "counted" else {}
    return {
        "clip_fraction": clip_fraction,
        "kl": kl,
        "entropy": entropy,
        "train_rollout_logprob_diff": rollout_difference,
        "train_rollout_kl": rollout_kl,
        "train_rollout_outliers": outliers,
        **rejected,
    }


def rollout_difference(inputs: TokenInputs) -> Tensor:
    return (train_logprobs(inputs) - inputs.fields["rollout_logprobs"]).abs()


def rollout_probabilities(inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """Return the trainer's and the backend's probabilities, whose correlation MiniMax-M1 (arXiv 2506.13585) watches."""
    return train_logprobs(inputs).exp(), inputs.fields["rollout_logprobs"].exp()
