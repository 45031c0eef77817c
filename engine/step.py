"""One pass over the samples of a step: plan, weights, packed micro-batches, schedule, metrics. SFT and RL share it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.engine.batch import Sample
from isoloss.engine.losses import Loss, TokenInputs
from isoloss.engine.packing import PackedBatch, pack
from isoloss.engine.plan import Plan
from isoloss.models.architecture import Architecture
from isoloss.models.gpt import forward_row, labelled_logits, labelled_logprobs
from isoloss.parallel import GlobalLossNormalizer, Mesh
from isoloss.parallel.normalizer import Counts
from isoloss.parallel.schedule import run_schedule

# How far the consumed weights may be from their closed form: rounding of fp64 and of fp32 weights.
CANARY_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}


class CanaryError(RuntimeError):
    """The loss head did not consume the weights that the counts promise: the loss of this step is not to be trusted."""


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of this rank, and what the step holds over all ranks."""

    micro_batches: tuple[PackedBatch, ...]
    counts: Counts
    num_samples: int
    total_tokens: int


@dataclass(frozen=True)
class StepMetrics:
    """Over all ranks. loss: the number that was differentiated. weight_sum: of the weights that the loss head consumed.

    valid_tokens: targets; total_tokens: tokens without padding; micro_batches: of each rank.
    """

    loss: float
    weight_sum: float
    valid_tokens: int
    total_tokens: int
    sequences: int
    micro_batches: int


def prepare_step(samples: Sequence[Sample], loss: Loss, plan: Plan, mesh: Mesh, device: torch.device) -> StepBatch:
    """Count, weigh and pack this rank's share of `samples`, which every rank passes whole.

    Collectives: one all-reduce of int64 counts over dp, whatever the number of micro-batches.
    """
    mine = plan.micro_batches[mesh.dp.rank()]
    order = [index for micro_batch in mine for index in micro_batch]
    normalizer = GlobalLossNormalizer(
        loss.aggregation,
        mesh.dp,
        mask_placement="replicated",
        norm_length=loss.norm_length,
        count_fully_masked=loss.count_fully_masked,
    )
    weights, counts = normalizer.weights(
        [samples[index].mask_T for index in order],
        [samples[index].group for index in order],
        num_groups=1 + max((sample.group for sample in samples), default=-1),
    )
    weight_of = dict(zip(order, weights))
    lengths = [len(sample) for sample in samples]
    start_of = [0, *accumulate(lengths)]
    packed = tuple(
        pack([samples[i] for i in m], [weight_of[i] for i in m], [start_of[i] for i in m], mesh, device) for m in mine
    )
    return StepBatch(packed, counts, len(samples), sum(lengths))


def run_step(
    mesh: Mesh,
    chunks: Sequence[nn.Module],
    arch: Architecture,
    batch: StepBatch,
    loss: Loss,
    *,
    forward_only: bool = False,
) -> StepMetrics:
    """Forward and backward of every micro-batch; gradients accumulate unreduced in the chunks' buffers.

    Raises CanaryError if the weights consumed by the loss head are not those of the counts.
    Collectives: the model's; one all-reduce over dp x context and one over pp of two numbers.
    """

    def token_loss(micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        inputs = _token_inputs(mesh, chunks, arch, micro_batch, hidden, loss.needs_entropy)
        per_token_N = loss.per_token(inputs)
        weights_N = micro_batch.weights_N.to(per_token_N.dtype)
        terms_N = weights_N * per_token_N
        consumed = torch.stack([terms_N.detach().sum(dtype=torch.float64), weights_N.sum(dtype=torch.float64)])
        return terms_N.sum(), consumed

    consumed = run_schedule(mesh, chunks, batch.micro_batches, _forward, token_loss, forward_only=forward_only)
    totals = sum(consumed, torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device()))
    dist.all_reduce(totals, group=mesh.dp_context)
    dist.all_reduce(totals, group=mesh.pp)  # only the last stage has something to add
    loss_value, weight_sum = totals.tolist()
    check_canary(weight_sum, batch.counts, chunks)
    return StepMetrics(
        loss=loss_value,
        weight_sum=weight_sum,
        valid_tokens=batch.counts.tokens,
        total_tokens=batch.total_tokens,
        sequences=batch.num_samples,
        micro_batches=len(batch.micro_batches),
    )


def run_logprobs(mesh: Mesh, chunks: Sequence[nn.Module], arch: Architecture, batch: StepBatch) -> Tensor:
    """log-probabilities of all targets of the step, [total tokens] fp64 in the order of the samples, on every rank.

    Collectives: the model's; one all-reduce over dp x context and one over pp of the result.
    """

    def logprobs(micro_batch: PackedBatch, hidden: Tensor) -> Tensor:
        return _token_inputs(mesh, chunks, arch, micro_batch, hidden, with_entropy=False).logprobs_N

    return _collect(mesh, chunks, batch, logprobs, ())


def run_logits(mesh: Mesh, chunks: Sequence[nn.Module], arch: Architecture, batch: StepBatch) -> Tensor:
    """The logits that predict each target, [total tokens, vocab_size] fp64, as `run_logprobs`. For small models."""

    def logits(micro_batch: PackedBatch, hidden: Tensor) -> Tensor:
        return labelled_logits(chunks[-1], hidden, micro_batch.labelled_N, arch, mesh)

    return _collect(mesh, chunks, batch, logits, (arch.vocab_size,))


def _collect(mesh: Mesh, chunks: Sequence[nn.Module], batch: StepBatch, of_targets, shape: tuple[int, ...]) -> Tensor:
    """What `of_targets(micro_batch, hidden)` gives for each target, in the order of the samples, on every rank."""

    def collect(micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return hidden.new_zeros(()), (micro_batch.origin_N, of_targets(micro_batch, hidden))

    flat = torch.zeros((batch.total_tokens, *shape), dtype=torch.float64, device=torch.cuda.current_device())
    for origin_N, found in run_schedule(mesh, chunks, batch.micro_batches, _forward, collect, forward_only=True):
        flat[origin_N] = found.to(torch.float64)
    dist.all_reduce(flat, group=mesh.dp_context)
    dist.all_reduce(flat, group=mesh.pp)
    return flat


def _forward(chunk: nn.Module, micro_batch: PackedBatch) -> Tensor:
    return forward_row(chunk, micro_batch.tokens_R, micro_batch.positions_R, micro_batch.lengths)


def _token_inputs(mesh, chunks, arch, micro_batch: PackedBatch, hidden: Tensor, with_entropy: bool) -> TokenInputs:
    logprobs_N, entropy_N = labelled_logprobs(
        chunks[-1], hidden, micro_batch.labelled_N, micro_batch.targets_N, arch, mesh, with_entropy=with_entropy
    )
    fields = {name: values.to(logprobs_N.dtype) for name, values in micro_batch.fields.items()}
    return TokenInputs(logprobs_N, entropy_N, fields)


def check_canary(weight_sum: float, counts: Counts, chunks: Sequence[nn.Module]) -> None:
    dtype = next(chunks[-1].parameters()).dtype
    tolerance = CANARY_TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    if not abs(weight_sum - counts.weight_sum) <= tolerance * max(abs(counts.weight_sum), tolerance):
        raise CanaryError(
            f"the loss head consumed weights that add up to {weight_sum!r}, but {counts.tokens} valid tokens in "
            f"{counts.sequences} sequences promise {counts.weight_sum!r}: a shard, a micro-batch or a mask is wrong"
        )
