"""Balance the load of experts: the configured losses of the routers with their weights, and selection biases.

Shape suffixes: A losses, O tokens of the step, R tokens of this rank's slice, Z tokens that its routers see,
S documents of the row, L layers with experts on this rank, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.config.schema import MoeConfig
from isoloss.engine.step.losses import Loss
from isoloss.engine.step.step_batch import StepBatch
from isoloss.models.architecture import Architecture
from isoloss.models.mcore.moe.router import routers
from isoloss.models.mcore.moe.router_losses import (
    ChoiceCounts,
    RoutedTokens,
    RouterLoss,
    RouterLosses,
    sequence_balance,
    z_loss,
)
from isoloss.parallel import Mesh, UserError
from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.mesh import reuse_world_group
from isoloss.parallel.normalizer import TokenCounts, token_weights


@dataclass(frozen=True)
class LoadBalancing:
    """Methods by which a training step balances the load of experts.

    losses: losses of the routers.
    bias_rate: distance by which a selection bias moves in a step."""

    losses: tuple[RouterLoss, ...]
    bias_rate: float


def configured(config: MoeConfig, arch: Architecture) -> LoadBalancing | None:
    """Return the configured balancing; None if there is none, and for a critic: the keys are for the policy."""
    # Each part of `sequence_balance` is already divided by its document's length.
    losses = (
        RouterLoss("moe_aux_loss", sequence_balance, Aggregation("seq-mean-token-sum"), config.aux_loss_coef),
        RouterLoss("moe_z_loss", z_loss, Aggregation("token-mean"), config.z_loss_coef),
    )
    balancing = LoadBalancing(tuple(loss for loss in losses if loss.coefficient), config.bias_update_rate)
    return None if arch.critic or not (balancing.losses or balancing.bias_rate) else balancing


def start(balancing: LoadBalancing, lengths: Sequence[int], loss: Loss, device: torch.device) -> RouterLosses:
    """Return the weighted losses of the routers for one pass over a step.

    lengths: tokens of every sequence of the step, on every rank.

    Every token counts, target or not: all of them are sent to experts. Where `loss` leaves the normalization to the
    caller, so do the losses of the routers. No collective.
    """
    tokens = TokenCounts.from_lengths(lengths)
    ones = [torch.ones(length) for length in lengths]
    summed = all(aggregation.mode == "sum" for aggregation in loss.aggregations)
    weights_AO, counts = torch.zeros((len(balancing.losses), sum(lengths)), dtype=torch.float64), []
    for weights_O, router_loss in zip(weights_AO, balancing.losses):
        weights, counted = token_weights(ones, tokens, Aggregation("sum") if summed else router_loss.aggregation)
        weights_O[:] = torch.cat([*weights, weights_O[:0]])
        counts.append(counted)
    return RouterLosses(balancing.losses, weights_AO.to(device), counts)


def start_step(balancing: LoadBalancing, batch: StepBatch, loss: Loss, device: torch.device) -> RouterLosses:
    """Return the weighted losses of the routers, as `start`. Where the step cuts trajectories into samples, a document
    is a trajectory, and each of its tokens counts once: for the sample that owns it.

    Raises UserError where such samples do not say which tokens they own. No collective.
    """
    if batch.sequences == len(batch.lengths):
        return start(balancing, batch.lengths, loss, device)
    if not batch.owned:
        raise UserError(
            "moe.aux_loss_coef, moe.z_loss_coef and moe.bias_update_rate count every token that a router sees, and "
            "Sample.sequence cuts a trajectory into several samples, which repeat its tokens: give these samples "
            "owned_T (isoloss.engine.batching.prefixes.with_owned_tokens), or set these keys to 0"
        )
    of_trajectories = start(balancing, batch.owned, loss, device)
    firsts = torch.tensor([0, *accumulate(batch.owned)][:-1])
    first_O = firsts[torch.tensor(batch.sequence_of)].repeat_interleave(torch.tensor(batch.lengths))
    return RouterLosses(balancing.losses, of_trajectories.weights_AO[:, first_O.to(device)], of_trajectories.counts)


def routed_tokens(
    micro_batch: PackedBatch,
    arch: Architecture,
    mesh: Mesh,
    watched: RouterLosses | ChoiceCounts | None,
    counts: dict[int, Tensor] | None = None,
) -> RoutedTokens:
    """Return the tokens of this rank's slice that its routers see, with losses that they add, or counts.

    counts: see `RoutedTokens`.
    """

    def own(row_R: Tensor) -> Tensor:
        return row_R.chunk(mesh.tp.size())[mesh.tp.rank()] if mesh.layout.sequence_parallel else row_R

    tokens = own(micro_batch.piece_R), own(micro_batch.positions_R)
    of_row = micro_batch.members_SP, micro_batch.length_S, micro_batch.start_S
    routed = RoutedTokens(*tokens, *of_row, mesh.megatron.tp_cp, counts=counts)
    if micro_batch.routes_RYX is not None:
        layers = [number for number, sparse in enumerate(arch.sparse, start=1) if sparse]
        routes = dict(zip(layers, own(micro_batch.routes_RYX).unbind(1), strict=True))
        routed = replace(routed, routes=routes)
    if micro_batch.cut_sequences:
        routed = replace(routed, sequence_S=micro_batch.sequence_S)
    if isinstance(watched, ChoiceCounts):
        return replace(routed, choice_counts=watched)
    return replace(routed, router_losses=watched)


def reduce_choices(counts: ChoiceCounts, mesh: Mesh) -> Mapping[int, Tensor]:
    """Return the choices of this stage's routers over all ranks, by layer. Collectives: one all-reduce of them over
    tp x dp x context."""
    layers = sorted(counts.of_layer)
    if not layers:  # a pipeline stage of dense layers
        return {}
    total_LUE = torch.stack([counts.of_layer[layer] for layer in layers])
    dist.all_reduce(total_LUE, group=reuse_world_group(mesh.megatron.tp_dp_cp))
    return dict(zip(layers, total_LUE))


def replayed_fraction(counts: Sequence[Mapping[int, Tensor]], mesh: Mesh, device: torch.device) -> float:
    """Return the part of the choices of a step's tokens, by all layers with experts, that were given.

    counts: for each forward of this rank, those of `RoutedTokens`. Collectives: one all-reduce of 2 numbers over
    dp x context and one over tp x pp.
    """
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    for of_layer in chain.from_iterable(each.values() for each in counts):
        totals += of_layer
    dist.all_reduce(totals, group=mesh.dp_context)
    dist.all_reduce(totals, group=mesh.stage)
    given, all_choices = totals.tolist()
    return given / max(all_choices, 1)


def reduce_losses(router_losses: RouterLosses, mesh: Mesh) -> tuple[list[float], list[float]]:
    """Return the sum of each loss, without its coefficient, and of the weights in it, over all ranks.

    Collectives: one all-reduce of 2A numbers over dp x context and one over tp x pp.
    """
    totals = torch.stack([router_losses.sums_A, router_losses.consumed_A])
    dist.all_reduce(totals, group=mesh.dp_context)
    dist.all_reduce(totals, group=mesh.stage)
    sums, consumed = totals.tolist()
    return sums, consumed


@torch.no_grad()
def update_biases(chunks: Sequence[nn.Module], rate: float, mesh: Mesh) -> None:
    """Move every selection bias by `rate` towards an even load (arXiv:2408.15664, algorithm 1).

    A bias goes up where its expert got fewer tokens of the step than the mean, and down where it got more.

    Integers decide, so the biases are bit-equal on every layout. Collectives: one all-reduce of int64 counts [L, E]
    over tp x dp x context.
    """
    stage_routers = list(routers(chunks))
    if rate == 0 or not stage_routers:  # nothing to move, or a pipeline stage of dense layers
        return
    load_LE = torch.stack([router.load_E for router in stage_routers])
    dist.all_reduce(load_LE, group=reuse_world_group(mesh.megatron.tp_dp_cp))
    below_LE = torch.sign(load_LE.sum(1, keepdim=True) - load_LE.shape[1] * load_LE)  # of mean - load
    for router, below_E in zip(stage_routers, below_LE):
        assert router.expert_bias is not None
        router.expert_bias += rate * below_E


def forget_loads(chunks: Sequence[nn.Module]) -> None:
    """Reset the counts of the experts' loads: a new step begins."""
    for router in routers(chunks):
        router.load_E.zero_()
