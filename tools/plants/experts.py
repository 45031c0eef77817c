"""Bugs of a mixture of experts."""

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine import balance as balance_module
from isoloss.engine import engine as engine_module
from isoloss.engine import step as step_module
from isoloss.models.mcore import router_losses as router_losses_module
from isoloss.models.mcore.router_losses import RoutedTokens
from isoloss.tools.plants.plant import Plant, Run, means_differ, patch_reduction


def _expert_gradients_averaged():
    def change(chunks, groups):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".local_experts." in name:
                    parameter.main_grad.div_(groups.expt_dp.size())

    return patch_reduction(change)


@contextlib.contextmanager
def _router_losses_by_micro_batch() -> Iterator[None]:
    """The mean over the sequences, or tokens, of each micro-batch, averaged over micro-batches."""
    plans = []
    original_prepare, original_start = step_module.prepare_step, balance_module.start

    def prepare_step(samples, loss, plan, mesh, device):
        plans.append(plan)
        return original_prepare(samples, loss, plan, mesh, device)

    def start(balancing, lengths, loss, device):
        balance = original_start(balancing, lengths, loss, device)
        micro_batches = [m for of_rank in plans[-1].micro_batches for m in of_rank]
        first = [sum(lengths[:index]) for index in range(len(lengths))]
        for weights_O, router_loss in zip(balance.weights_BO, balance.losses):
            by_token = router_loss.aggregation.mode == "token-mean"
            for m in micro_batches:
                size = sum(lengths[i] for i in m) if by_token else len(m)
                for i in m:
                    weights_O[first[i] : first[i] + lengths[i]] = 1 / (size * len(micro_batches))
        return balance

    with (
        mock.patch.object(engine_module, "prepare_step", prepare_step),
        mock.patch.object(balance_module, "start", start),
    ):
        yield


def _balance_of_its_own_shard():
    """The experts' frequencies in the part of a document that lies on this rank."""
    return mock.patch.object(router_losses_module, "sum_parts", lambda x, group: x)


def _padding_counted():
    everything = property(lambda tokens: torch.ones_like(tokens.document_T, dtype=torch.bool))
    return mock.patch.object(RoutedTokens, "real_T", everything)


def _loads_of_its_own_rank():
    def all_reduce(tensor, **kwargs):
        if tensor.dtype != torch.int64:
            dist.all_reduce(tensor, **kwargs)

    return mock.patch.object(balance_module, "dist", types.SimpleNamespace(all_reduce=all_reduce))


def _balances_by_sequence(run: Run) -> bool:
    return run.moe is not None and run.moe.aux_loss == "sequence"


def _rows_are_shared(run: Run) -> bool:
    return run.layout.tp * run.layout.context > 1


def _averages_router_losses(run: Run) -> bool:
    """Whether means over micro-batches, averaged, are other losses of the routers: one mean over documents, one over
    tokens, and sums where the loss leaves the normalization to the caller."""
    if run.moe is None:
        return False
    ones = tuple(tuple(1 for _ in lengths) for lengths in run.documents)
    balanced = run.moe.aux_loss_coef > 0 and (run.aggregation == "sum" or means_differ(ones, "token-mean"))
    return balanced or (
        run.moe.z_loss_coef > 0 and (run.aggregation == "sum" or means_differ(run.documents, "token-mean"))
    )


BALANCED = "a model with experts, moe.aux_loss=sequence with its moe.aux_loss_coef"
EXPERTS = (
    Plant(
        "expert-gradients-averaged",
        _expert_gradients_averaged,
        lambda run: (
            run.moe is not None and run.layout.tp * run.layout.context * run.layout.dp > run.layout.ep * run.layout.etp
        ),
        "a model with experts, and a layout in which several ranks hold the same ones, such as dp2",
    ),
    Plant(
        "router-losses-by-micro-batch",
        _router_losses_by_micro_batch,
        _averages_router_losses,
        "a model with experts, moe.aux_loss_coef or moe.z_loss_coef above 0, and two micro-batches or a layout with dp",
    ),
    Plant(
        "balance-of-its-own-shard",
        _balance_of_its_own_shard,
        lambda run: _balances_by_sequence(run) and _rows_are_shared(run),
        f"{BALANCED}, and a layout with tp, ulysses or ring",
    ),
    Plant(
        "padding-counted",
        _padding_counted,
        lambda run: run.moe is not None and run.padded,
        "a model with experts, and a layout with tp, ulysses or ring that does not divide the tokens of a micro-batch",
    ),
    Plant(
        "loads-of-its-own-rank",
        _loads_of_its_own_rank,
        lambda run: run.biases and run.layout.world_size > run.layout.pp,
        "selection biases after several optimizer steps, which a proof of one step does not compare",
    ),
)
