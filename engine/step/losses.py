"""Per-token losses and their sum. They are never averaged here: the normalizer's weights hold the only division."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.config.schema import LossConfig
from isoloss.parallel import UserError
from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.sequence import sum_over_documents


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of a loss at the targets of a micro-batch on this rank; tensors are [N] unless said.

    logprobs_N: log-probabilities of the targets at the loss's temperature; [N, K] where each position has K targets.
    entropy_N: entropy of the predicted distribution, in nats, if the loss asked for it.
    values_N: output of a critic's value head; logprobs_N is then empty and entropy_N None.
    fields: fields of the samples, each [N] or [N, K] like the samples' own.
    document_N: the document of the row that each target belongs to, or its sequence, where one has several documents.
    sums: function that sums over sequences in place of the documents of the row (`isoloss.engine.step.sequence_sums`).
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None
    values_N: Tensor | None
    fields: Mapping[str, Tensor]
    document_N: Tensor
    num_documents: int
    context: dist.ProcessGroup
    sums: Callable[[Tensor], Tensor] | None = None

    def sequence_sum(self, values_N: Tensor) -> Tensor:
        """Sum `values_N` over all targets of each target's sequence, [N], however it is sharded or cut into samples.

        Differentiable. Call it for every micro-batch, also for one without targets. Collectives: one all-reduce over
        context, another in the backward; none where a first pass has found the sums.
        """
        if self.sums is not None:
            return self.sums(values_N)
        return sum_over_documents(values_N, self.document_N, self.num_documents, self.context)[self.document_N]


PerToken = Callable[[TokenInputs], Tensor]
TOKEN_MEAN = Aggregation("token-mean")


@dataclass(frozen=True)
class Term:
    """coefficient * sum(weight * per_token), with weights that the aggregation makes of the counts of the whole step.

    per_token: TokenInputs -> [N], not yet weighted.
    name: key of the sum, without the coefficient, among the metrics.
    """

    per_token: PerToken
    aggregation: Aggregation = TOKEN_MEAN
    coefficient: float = 1.0
    name: str = "loss"

    def values(self, inputs: TokenInputs) -> Tensor:
        """Return per_token of the inputs, [N]. Raises UserError where it is not one number per target, or has no
        gradient."""
        values_N = one_per_target(self.name, self.per_token, inputs)
        if torch.is_grad_enabled() and len(values_N) and not values_N.requires_grad:
            raise UserError(
                f"{self.name}: {defined(self.per_token)} returned numbers without a gradient: compute them from "
                "inputs.logprobs_N, without detach() or item()"
            )
        return values_N


@dataclass(frozen=True)
class Loss:
    """A sum of terms, each with an aggregation of its own.

    needs_entropy: whether a term or an observed value reads TokenInputs.entropy_N.
    temperature: logits are divided by it.
    mean_metrics: further per-token values, reported as means over the valid tokens of the step.
    max_metrics: further values, none of them negative, whose largest is reported.
    correlation_metrics: pairs of further values, reported as Pearson's correlation.
    outputs: further values that the pass returns for every target, sample by sample (`StepMetrics.outputs`); where each
        position has K targets, [N] or [N, K].
    """

    terms: tuple[Term, ...]
    needs_entropy: bool = False
    temperature: float = 1.0
    mean_metrics: Mapping[str, PerToken] = field(default_factory=dict)
    max_metrics: Mapping[str, PerToken] = field(default_factory=dict)
    correlation_metrics: Mapping[str, Callable[[TokenInputs], tuple[Tensor, Tensor]]] = field(default_factory=dict)
    outputs: Mapping[str, PerToken] = field(default_factory=dict)

    def __post_init__(self):
        names = [term.name for term in self.terms] + [*self.mean_metrics, *self.max_metrics, *self.correlation_metrics]
        if len(set(names)) < len(names) or not self.terms:
            raise ValueError(f"a loss needs terms, and every term and observed value a name of its own, not {names}")

    @classmethod
    def of(
        cls,
        per_token: PerToken,
        aggregation: str = "token-mean",
        norm_length: int | None = None,
        count_fully_masked: bool = False,
        needs_entropy: bool = False,
    ) -> "Loss":
        """Make a loss of one term."""
        return cls((Term(per_token, Aggregation(aggregation, norm_length, count_fully_masked)),), needs_entropy)

    @property
    def aggregations(self) -> tuple[Aggregation, ...]:
        """Return the distinct aggregations, in the order of the terms."""
        return tuple(dict.fromkeys(term.aggregation for term in self.terms))


LossLike = Loss | PerToken


def as_loss(loss: LossLike, config: LossConfig) -> Loss:
    """Return a loss, or the loss of a bare function of `TokenInputs`, aggregated as configured.

    Raises ValueError for anything else.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise ValueError(
            f"the loss is {loss!r}: give a Loss, or a function of TokenInputs that returns one number each"
        )
    return Loss((Term(loss, config.weighting()),))


class Fields(dict[str, Tensor]):
    """Fields of the samples, by name."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"a loss asks for the field {name!r}, but the samples have {', '.join(self) or 'none'}")


def one_per_target(name: str, per_token: PerToken, inputs: TokenInputs, *, or_each: bool = False) -> Tensor:
    """Return per_token of the inputs, [N]. Raises UserError where it is not one number per labelled position.

    or_each: whether it may also be one for each of the K targets of a position, [N, K].
    """
    values_N, shape = per_token(inputs), tuple(inputs.document_N.shape)
    each = or_each and isinstance(values_N, Tensor) and values_N.shape == (*shape, *inputs.logprobs_N.shape[1:])
    if not isinstance(values_N, Tensor) or not (each or values_N.shape == shape):
        raise UserError(
            f"{name}: {defined(per_token)} returned {shape_or_type(values_N)} instead of shape {shape}: "
            "return one number per target, neither summed nor averaged, which loss.aggregation does"
        )
    return values_N


def shape_or_type(returned: object) -> str:
    """Describe the result of a user's function in an error message."""
    return f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else f"a {type(returned).__name__}"


def defined(function: Callable[..., Any]) -> str:
    """Return the name of a function, and the file and line of its definition."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" if code else repr(function)


def target_logprobs(inputs: TokenInputs) -> Tensor:
    """Return log p(target), as `Engine.logprobs` does; for `Loss.outputs`."""
    return inputs.logprobs_N


def negative_log_likelihood(inputs: TokenInputs) -> Tensor:
    """Return cross-entropy with the target as a one-hot distribution, in nats."""
    return -inputs.logprobs_N


def cross_entropy(config: LossConfig) -> Loss:
    """Return the SFT loss, aggregated as configured."""
    return Loss((Term(negative_log_likelihood, config.weighting()),))
