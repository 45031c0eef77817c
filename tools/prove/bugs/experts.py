"""Bugs of a mixture of experts."""

import types
from collections.abc import Callable, Mapping

import torch

from isoloss.tools.prove.bugs.bug import PREPARE_STEP, PlantedBug, RunTraits, Wrong, gradients_changed, means_differ


def _expert_gradients_averaged(chunks, groups):
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".local_experts." in name:
                parameter.main_grad.div_(groups.expt_dp.size())


def _router_losses_by_micro_batch() -> Mapping[str, Wrong]:
    """Average, over micro-batches, the means over the sequences or tokens of each."""
    plans = []

    def remember(prepare_step: Callable) -> Callable:
        def prepare_and_remember(samples, loss, plan, mesh, device):
            plans.append(plan)
            return prepare_step(samples, loss, plan, mesh, device)

        return prepare_and_remember

    def start_wrongly(start: Callable) -> Callable:
        def start_by_micro_batch(load_balancing, lengths, loss, device):
            router_losses = start(load_balancing, lengths, loss, device)
            micro_batches = [m for rank_batches in plans[-1].micro_batches for m in rank_batches]
            first = [sum(lengths[:index]) for index in range(len(lengths))]
            for weights_O, router_loss in zip(router_losses.weights_AO, router_losses.losses):
                by_token = router_loss.aggregation.mode == "token-mean"
                for m in micro_batches:
                    size = sum(lengths[i] for i in m) if by_token else len(m)
                    for i in m:
                        weights_O[first[i] : first[i] + lengths[i]] = 1 / (size * len(micro_batches))
            return router_losses

        return start_by_micro_batch

    return {PREPARE_STEP: remember, "isoloss.engine.step.moe_balancing.start": start_wrongly}


def _every_token(real_Z: property) -> property:
    """Count padding as well."""
    del real_Z
    return property(lambda tokens: torch.ones_like(tokens.piece_Z, dtype=torch.bool))


def _of_a_document(documents_Z: property) -> property:
    """Count padding as a token of a document."""
    return property(lambda tokens: documents_Z.__get__(tokens).clamp(min=1))


def _deaf_for_counts(distributed):
    """Return a torch.distributed that leaves every rank with loads of its own."""

    def all_reduce(tensor, **kwargs):
        if tensor.dtype != torch.int64:
            distributed.all_reduce(tensor, **kwargs)

    return types.SimpleNamespace(all_reduce=all_reduce)


def _balances_by_sequence(run: RunTraits) -> bool:
    return run.moe is not None and run.moe.aux_loss == "sequence"


def _rows_are_shared(run: RunTraits) -> bool:
    return run.layout.tp * run.layout.context > 1


def _averages_router_losses(run: RunTraits) -> bool:
    """Return whether averaged means over micro-batches change a router loss. One router loss is a mean over documents,
    one a mean over tokens, and both are sums where the loss leaves the normalization to the caller."""
    if run.moe is None:
        return False
    ones = tuple(tuple(1 for _ in lengths) for lengths in run.documents)
    balanced = run.moe.aux_loss_coef > 0 and (run.aggregation == "sum" or means_differ(ones, "token-mean"))
    return balanced or (
        run.moe.z_loss_coef > 0 and (run.aggregation == "sum" or means_differ(run.documents, "token-mean"))
    )


BALANCED = "a model with experts, moe.aux_loss=sequence with its moe.aux_loss_coef"
EXPERTS = (
    PlantedBug(
        "expert-gradients-averaged",
        gradients_changed(_expert_gradients_averaged),
        lambda run: (
            run.moe is not None and run.layout.tp * run.layout.context * run.layout.dp > run.layout.ep * run.layout.etp
        ),
        "a model with experts, and a layout in which several ranks hold the same ones, such as dp2",
    ),
    PlantedBug(
        "router-losses-by-micro-batch",
        _router_losses_by_micro_batch(),
        _averages_router_losses,
        "a model with experts, moe.aux_loss_coef or moe.z_loss_coef above 0, and two micro-batches or a layout with dp",
    ),
    PlantedBug(
        "balance-of-its-own-shard",
        {"isoloss.models.mcore.moe.router_losses.sum_parts": lambda sum_parts: lambda x, group: x},
        lambda run: _balances_by_sequence(run) and _rows_are_shared(run),
        f"{BALANCED}, and a layout with tp, ulysses or ring",
    ),
    PlantedBug(
        "padding-counted",
        {
            "isoloss.models.mcore.moe.router_losses.RoutedTokens.real_Z": _every_token,
            "isoloss.models.mcore.moe.router_losses.RoutedTokens.documents_Z": _of_a_document,
        },
        lambda run: run.moe is not None and run.padded,
        "a model with experts, and a layout with tp, ulysses or ring that does not divide the tokens of a micro-batch",
    ),
    PlantedBug(
        "loads-of-its-own-rank",
        {"isoloss.engine.step.moe_balancing.dist": _deaf_for_counts},
        lambda run: run.biases and run.layout.world_size > run.layout.pp,
        "selection biases after several optimizer steps, which a proof of one step does not compare",
    ),
)
