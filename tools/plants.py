"""Known bugs, to be planted into the production code: what a proof has to catch before it may be believed.

Each patches the function that the engine really calls, says which runs it spoils, and leaves all others as they were.
They are the normalization and sharding mistakes that trainers have shipped (docs/normalization.md).
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine import balance as balance_module
from isoloss.engine import engine as engine_module
from isoloss.engine import losses as losses_module
from isoloss.engine import step as step_module
from isoloss.models import balance as router_losses_module
from isoloss.models.balance import RoutedTokens
from isoloss.parallel import Layout, Mesh
from isoloss.parallel import attention as attention_module
from isoloss.parallel import normalizer as normalizer_module
from isoloss.parallel import sequence as sequence_module
from isoloss.parallel.collectives import sum_parts
from isoloss.parallel.normalizer import take_census, weigh


@dataclass(frozen=True)
class Run:
    """What decides whether a plant shows: the layout, the micro-batches of each rank, the aggregation, the loss."""

    layout: Layout
    micro_batches: int
    aggregation: str
    loss: str = "cross-entropy"


@dataclass(frozen=True)
class Plant:
    """patch: a context manager in which the bug is there. spoils: the runs whose loss or gradient must be wrong."""

    name: str
    patch: Callable[[], contextlib.AbstractContextManager]
    spoils: Callable[[Run], bool]

    def planted(self) -> contextlib.AbstractContextManager:
        return self.patch()

    def __reduce__(self):
        return (_by_name, (self.name,))  # functions made here do not pickle; the name does


def _by_name(name: str) -> Plant:
    return (PLANTS | RL_PLANTS | MOE_PLANTS).get(name, NONE)


def _patch_prepare(change: Callable) -> contextlib.AbstractContextManager:
    """Patch the step's preparation: change(batch, samples, plan, mesh) -> batch."""
    original = step_module.prepare_step

    def prepare_step(samples, loss, plan, mesh, device):
        return change(original(samples, loss, plan, mesh, device), samples, plan, mesh)

    return mock.patch.object(engine_module, "prepare_step", prepare_step)


def _with_weights(batch, scale: Callable[[int, torch.Tensor], torch.Tensor]):
    micro_batches = tuple(
        dataclasses.replace(m, weights_AN=scale(index, m.weights_AN)) for index, m in enumerate(batch.micro_batches)
    )
    return dataclasses.replace(batch, micro_batches=micro_batches)


def _mean_of_micro_batch_means():
    def change(batch, samples, plan, mesh):
        mine = plan.micro_batches[mesh.dp.rank()]
        tokens = [sum(int(samples[i].mask_T.sum()) for i in micro_batch) for micro_batch in mine]
        share = len(mine) * mesh.dp.size()
        return _with_weights(batch, lambda i, w: torch.full_like(w, 1 / (max(tokens[i], 1) * share)))

    return _patch_prepare(change)


def _dropped_micro_batch():
    def change(batch, samples, plan, mesh):
        del samples
        filled = [i for i, micro_batch in enumerate(plan.micro_batches[mesh.dp.rank()]) if micro_batch]
        dropped = filled[-1] if len(filled) > 1 else None
        return _with_weights(batch, lambda i, w: torch.zeros_like(w) if i == dropped else w)

    return _patch_prepare(change)


def _context_factor_twice():
    def change(batch, samples, plan, mesh):
        del samples, plan
        return _with_weights(batch, lambda i, w: w * mesh.layout.context)

    return _patch_prepare(change)


@contextlib.contextmanager
def _counts_over_dp_and_sp() -> Iterator[None]:
    mesh_of_step: list[Mesh] = []

    def census(masks, dp_group, **kwargs):
        del dp_group
        return take_census(masks, mesh_of_step[-1].dp_context, **kwargs)

    original = step_module.prepare_step

    def prepare_step(samples, loss, plan, mesh, device):
        mesh_of_step.append(mesh)
        return original(samples, loss, plan, mesh, device)

    with (
        mock.patch.object(step_module, "take_census", census),
        mock.patch.object(engine_module, "prepare_step", prepare_step),
    ):
        yield


def _patch_reduction(change: Callable) -> contextlib.AbstractContextManager:
    """Patch the reduction of gradients: change(chunks, groups) follows it."""
    original = engine_module.finalize_model_grads

    def finalize_model_grads(chunks, **kwargs):
        original(chunks, **kwargs)
        change(chunks, kwargs["pg_collection"])

    return mock.patch.object(engine_module, "finalize_model_grads", finalize_model_grads)


def _gradients_averaged_over_dp():
    def change(chunks, groups):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.div_(groups.dp.size())

    return _patch_reduction(change)


def _rank_local_denominators():
    deaf = types.SimpleNamespace(all_reduce=lambda *args, **kwargs: None, get_backend=dist.get_backend)
    return mock.patch.object(normalizer_module, "dist", deaf)


def _targets_shifted_after_sharding():
    original = step_module.pack

    def pack(*args, **kwargs):
        packed = original(*args, **kwargs)
        return dataclasses.replace(packed, targets_N=packed.tokens_R.roll(-1)[packed.labelled_N])

    return mock.patch.object(step_module, "pack", pack)


def _fully_masked_sequence_counted():
    def other_way(masks, census, aggregation):
        changed = dataclasses.replace(aggregation, count_fully_masked=not aggregation.count_fully_masked)
        return weigh(masks, census, changed)

    return mock.patch.object(step_module, "weigh", other_way)


def _attention_sees_its_own_shard():
    def grid_attention(query, key, value, lengths, ulysses, ring, heads):
        tokens = sequence_module.tokens_of(lengths, ring.size(), ring.rank(), ulysses.size(), ulysses.rank())
        ends = torch.tensor(lengths).cumsum(0)
        documents = torch.searchsorted(ends, tokens, right=True)  # the part of each that lies in this rank's slice
        own = tuple(documents.unique_consecutive(return_counts=True)[1].tolist())
        return attention_module.document_attention(query, key, value, own, heads)

    return mock.patch.object(attention_module, "grid_attention", grid_attention)


def _sequence_sum_of_its_own_shard():
    """The ratio of the part of a sequence that lies on this rank."""

    def own(values_N, document_N, num_documents, group):
        del group
        return values_N.new_zeros(num_documents).index_add(0, document_N, values_N)

    return mock.patch.object(losses_module, "sum_over_documents", own)


def _sequence_gradient_of_its_own_shard():
    """The right ratio, whose gradient forgets what the other ranks' losses made of it."""

    def forgetful(x, group):
        return sum_parts(x, group)

    return mock.patch.object(sequence_module, "sum_over_ranks", forgetful)


def _second_term_by_micro_batch_means():
    """The KL and entropy terms as means over the micro-batch, averaged, while the policy term is weighed rightly."""

    def change(batch, samples, plan, mesh):
        del samples
        share = len(plan.micro_batches[0]) * mesh.dp.size()

        def scale(index, weights_AN):
            del index
            tokens = torch.tensor(float(weights_AN.shape[1]), dtype=torch.float64, device=weights_AN.device)
            dist.all_reduce(tokens, group=mesh.context)
            others = torch.full_like(weights_AN[1:], 1 / (max(float(tokens), 1.0) * share))
            return torch.cat([weights_AN[:1], others])

        return _with_weights(batch, scale)

    return _patch_prepare(change)


def _expert_gradients_averaged():
    def change(chunks, groups):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".local_experts." in name:
                    parameter.main_grad.div_(groups.expt_dp.size())

    return _patch_reduction(change)


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


NONE = Plant("none", contextlib.nullcontext, lambda run: False)

PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "mean-of-micro-batch-means",
            _mean_of_micro_batch_means,
            lambda run: run.micro_batches > 1 or run.layout.dp > 1 or run.aggregation != "token-mean",
        ),
        Plant(
            "counts-over-dp-and-sp",
            _counts_over_dp_and_sp,
            lambda run: run.layout.context > 1 and run.aggregation != "sum",
        ),
        Plant("gradients-averaged-over-dp", _gradients_averaged_over_dp, lambda run: run.layout.dp > 1),
        Plant("context-factor-twice", _context_factor_twice, lambda run: run.layout.context > 1),
        Plant(
            "rank-local-denominators",
            _rank_local_denominators,
            lambda run: run.layout.dp > 1 and run.aggregation != "sum",
        ),
        Plant("targets-shifted-after-sharding", _targets_shifted_after_sharding, lambda run: run.layout.context > 1),
        Plant("dropped-micro-batch", _dropped_micro_batch, lambda run: run.micro_batches > 1),
        Plant(
            "fully-masked-sequence-counted",
            _fully_masked_sequence_counted,
            lambda run: run.aggregation.startswith("seq-mean"),
        ),
        Plant("attention-sees-its-own-shard", _attention_sees_its_own_shard, lambda run: run.layout.context > 1),
    )
}

# Bugs that only a loss of reinforcement learning can show.
RL_PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "sequence-sum-of-its-own-shard",
            _sequence_sum_of_its_own_shard,
            lambda run: run.layout.context > 1 and run.loss.startswith("gspo"),
        ),
        Plant(
            "sequence-gradient-of-its-own-shard",
            _sequence_gradient_of_its_own_shard,
            lambda run: run.layout.context > 1 and run.loss.startswith("gspo"),
        ),
        Plant(
            "second-term-by-micro-batch-means",
            _second_term_by_micro_batch_means,
            lambda run: run.loss == "clip+k2-by-sequence",
        ),
    )
}

# Bugs of a mixture of experts. The last two are about selection biases: runs of several steps show them, whatever the
# loss.
MOE_PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "expert-gradients-averaged",
            _expert_gradients_averaged,
            lambda run: run.layout.tp * run.layout.context * run.layout.dp > run.layout.ep * run.layout.etp,
        ),
        Plant(
            "router-losses-by-micro-batch",
            _router_losses_by_micro_batch,
            lambda run: run.micro_batches > 1 or run.layout.dp > 1 or run.aggregation == "sum",
        ),
        Plant(
            "balance-of-its-own-shard",
            _balance_of_its_own_shard,
            lambda run: run.layout.tp * run.layout.context > 1,
        ),
        Plant("padding-counted", _padding_counted, lambda run: run.layout.tp * run.layout.context > 1),
        Plant("loads-of-its-own-rank", _loads_of_its_own_rank, lambda run: run.layout.world_size > run.layout.pp),
    )
}
