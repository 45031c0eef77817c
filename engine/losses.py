"""Per-token losses. They are never averaged here: the normalizer's weights hold the only division."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from isoloss.engine.config import LossConfig


@dataclass(frozen=True)
class TokenInputs:
    """What a loss sees of the labelled positions of a micro-batch on this rank; all tensors are [N].

    entropy_N: entropy of the predicted distribution, in nats, if the loss asked for it. fields: those of the samples.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None
    fields: Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """A per-token loss and how it is aggregated over a step.

    per_token: TokenInputs -> [N], not yet weighted. aggregation, norm_length, count_fully_masked: see LossConfig.
    """

    per_token: Callable[[TokenInputs], Tensor]
    aggregation: str = "token-mean"
    norm_length: int | None = None
    count_fully_masked: bool = False
    needs_entropy: bool = False


def negative_log_likelihood(inputs: TokenInputs) -> Tensor:
    """Cross-entropy with the target as a one-hot distribution, in nats."""
    return -inputs.logprobs_N


def cross_entropy(config: LossConfig) -> Loss:
    """The SFT loss, aggregated as configured."""
    return Loss(negative_log_likelihood, config.aggregation, config.norm_length, config.count_fully_masked)
