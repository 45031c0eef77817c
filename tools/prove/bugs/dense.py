"""Bugs that every model and loss can show: the normalization and sharding mistakes that trainers have shipped."""

import dataclasses
import types
from collections.abc import Callable

import torch

from isoloss.parallel.attention import document_attention
from isoloss.parallel.ops.row_order import tokens_of
from isoloss.tools.prove.bugs.bug import PlantedBug, RunTraits, gradients_changed, means_differ, weights_changed


def _mean_of_micro_batch_means(samples, plan, mesh):
    own = plan.micro_batches[mesh.dp.rank()]
    tokens = [sum(int(samples[i].mask_T.sum()) for i in micro_batch) for micro_batch in own]
    share = len(own) * mesh.dp.size()
    return lambda i, weights: torch.full_like(weights, 1 / (max(tokens[i], 1) * share))


def _dropped_micro_batch(samples, plan, mesh):
    own = plan.micro_batches[mesh.dp.rank()]
    filled = [i for i, micro_batch in enumerate(own) if any(samples[s].mask_T.any() for s in micro_batch)]
    dropped = filled[-1] if len(filled) > 1 else None
    return lambda i, weights: torch.zeros_like(weights) if i == dropped else weights


def _context_factor_twice(samples, plan, mesh):
    del samples, plan
    return lambda i, weights: weights * mesh.layout.context


def _counts_over_dp_and_sp(count_tokens: Callable) -> Callable:
    """Count on every rank, though ranks that share rows hold the same samples."""
    return lambda masks, group, **kwargs: count_tokens(masks, group, **kwargs | {"counted": True})


def _gradients_averaged_over_dp(chunks, groups):
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.div_(groups.dp.size())


def _every_tp_rank_counts(chunks, groups):
    """Count a weight that all TP ranks hold once a rank, in the norm of the gradient."""
    _mark(chunks, groups, sharded=True)


def _first_tp_rank_counts(chunks, groups):
    """Count the first TP rank's part of a weight alone, in the norm of the gradient."""
    _mark(chunks, groups, sharded=False)


def _mark(chunks, groups, *, sharded):
    del groups
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.tensor_model_parallel = sharded


def _deaf(distributed):
    """Return a torch.distributed that leaves every rank with numbers of its own."""
    return types.SimpleNamespace(all_reduce=lambda *args, **kwargs: None, get_backend=distributed.get_backend)


def _targets_shifted_after_sharding(pack):
    def pack_wrongly(*args, **kwargs):
        packed = pack(*args, **kwargs)
        return dataclasses.replace(packed, targets_N=packed.tokens_R.roll(-1)[packed.labelled_N])

    return pack_wrongly


def _fully_masked_sequence_counted(token_weights):
    def other_way(masks, counts, aggregation):
        changed = dataclasses.replace(aggregation, count_fully_masked=not aggregation.count_fully_masked)
        return token_weights(masks, counts, changed)

    return other_way


def _attention_sees_its_own_shard(grid_attention):
    del grid_attention

    def attention_of_shard(query, key, value, row, ulysses, ring, heads):
        tokens = tokens_of(row.lengths, ring.size(), ring.rank(), ulysses.size(), ulysses.rank())
        ends = torch.tensor(row.lengths).cumsum(0)
        documents = torch.searchsorted(ends, tokens, right=True)  # the part of each that lies in this rank's slice
        own = tuple(documents.unique_consecutive(return_counts=True)[1].tolist())
        return document_attention(query, key, value, own, heads)

    return attention_of_shard


def _on_context(run: RunTraits) -> bool:
    return run.layout.context > 1


def _on_tp(run: RunTraits) -> bool:
    return run.layout.tp > 1


CONTEXT = "a layout with ulysses or ring"
DENSE = (
    PlantedBug(
        "mean-of-micro-batch-means",
        weights_changed(_mean_of_micro_batch_means),
        lambda run: any(means_differ(run.targets, mode) for mode in run.aggregations),
        "two micro-batches, a layout with dp, or another aggregation than token-mean",
    ),
    PlantedBug(
        "counts-over-dp-and-sp",
        {"isoloss.engine.step.step_batch.count_tokens": _counts_over_dp_and_sp},
        lambda run: run.layout.context > 1 and any(mode != "sum" for mode in run.aggregations),
        f"{CONTEXT}, and another aggregation than sum",
    ),
    PlantedBug(
        "gradients-averaged-over-dp",
        gradients_changed(_gradients_averaged_over_dp),
        lambda run: run.layout.dp > 1,
        "a layout with dp",
    ),
    PlantedBug("context-factor-twice", weights_changed(_context_factor_twice), _on_context, CONTEXT),
    PlantedBug(
        "rank-local-denominators",
        {"isoloss.parallel.normalizer.dist": _deaf},
        lambda run: run.layout.dp * run.layout.context > 1 and any(mode != "sum" for mode in run.aggregations),
        "a layout with dp, ulysses or ring, and another aggregation than sum",
    ),
    PlantedBug(
        "targets-shifted-after-sharding",
        {"isoloss.engine.step.step_batch.pack": _targets_shifted_after_sharding},
        lambda run: run.layout.context > 1,
        CONTEXT,
    ),
    PlantedBug(
        "dropped-micro-batch", weights_changed(_dropped_micro_batch), lambda run: run.filled > 1, "two micro-batches"
    ),
    PlantedBug(
        "fully-masked-sequence-counted",
        {"isoloss.engine.step.step_batch.token_weights": _fully_masked_sequence_counted},
        lambda run: any(mode.startswith("seq-mean") for mode in run.aggregations),
        "an aggregation that begins with seq-mean",
    ),
    PlantedBug(
        "attention-sees-its-own-shard",
        {"isoloss.parallel.attention.grid_attention": _attention_sees_its_own_shard},
        lambda run: run.layout.context > 1,
        CONTEXT,
    ),
    PlantedBug(
        "replicas-counted-by-every-tp-rank", gradients_changed(_every_tp_rank_counts), _on_tp, "a layout with tp"
    ),
    PlantedBug(
        "shards-of-the-first-tp-rank-alone", gradients_changed(_first_tp_rank_counts), _on_tp, "a layout with tp"
    ),
)
