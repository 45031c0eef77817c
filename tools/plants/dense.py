"""Bugs that every model and loss can show: the normalization and sharding mistakes that trainers have shipped."""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine import engine as engine_module
from isoloss.engine import step as step_module
from isoloss.parallel import Mesh
from isoloss.parallel import attention as attention_module
from isoloss.parallel import normalizer as normalizer_module
from isoloss.parallel import sequence as sequence_module
from isoloss.parallel.normalizer import count_tokens, token_weights
from isoloss.tools.plants.plant import Plant, means_differ, patch_prepare, patch_reduction, with_weights


def _mean_of_micro_batch_means():
    def change(batch, samples, plan, mesh):
        mine = plan.micro_batches[mesh.dp.rank()]
        tokens = [sum(int(samples[i].mask_T.sum()) for i in micro_batch) for micro_batch in mine]
        share = len(mine) * mesh.dp.size()
        return with_weights(batch, lambda i, w: torch.full_like(w, 1 / (max(tokens[i], 1) * share)))

    return patch_prepare(change)


def _dropped_micro_batch():
    def change(batch, samples, plan, mesh):
        mine = plan.micro_batches[mesh.dp.rank()]
        filled = [i for i, micro_batch in enumerate(mine) if any(samples[s].mask_T.any() for s in micro_batch)]
        dropped = filled[-1] if len(filled) > 1 else None
        return with_weights(batch, lambda i, w: torch.zeros_like(w) if i == dropped else w)

    return patch_prepare(change)


def _context_factor_twice():
    def change(batch, samples, plan, mesh):
        del samples, plan
        return with_weights(batch, lambda i, w: w * mesh.layout.context)

    return patch_prepare(change)


@contextlib.contextmanager
def _counts_over_dp_and_sp() -> Iterator[None]:
    mesh_of_step: list[Mesh] = []

    def counts(masks, dp_group, **kwargs):
        del dp_group
        return count_tokens(masks, mesh_of_step[-1].dp_context, **kwargs)

    original = step_module.prepare_step

    def prepare_step(samples, loss, plan, mesh, device):
        mesh_of_step.append(mesh)
        return original(samples, loss, plan, mesh, device)

    with (
        mock.patch.object(normalizer_module, "count_tokens", counts),
        mock.patch.object(engine_module, "prepare_step", prepare_step),
    ):
        yield


def _gradients_averaged_over_dp():
    def change(chunks, groups):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.div_(groups.dp.size())

    return patch_reduction(change)


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
    def other_way(masks, counts, aggregation):
        changed = dataclasses.replace(aggregation, count_fully_masked=not aggregation.count_fully_masked)
        return token_weights(masks, counts, changed)

    return mock.patch.object(normalizer_module, "token_weights", other_way)


def _attention_sees_its_own_shard():
    def grid_attention(query, key, value, lengths, ulysses, ring, heads):
        tokens = sequence_module.tokens_of(lengths, ring.size(), ring.rank(), ulysses.size(), ulysses.rank())
        ends = torch.tensor(lengths).cumsum(0)
        documents = torch.searchsorted(ends, tokens, right=True)  # the part of each that lies in this rank's slice
        own = tuple(documents.unique_consecutive(return_counts=True)[1].tolist())
        return attention_module.document_attention(query, key, value, own, heads)

    return mock.patch.object(attention_module, "grid_attention", grid_attention)


CONTEXT = "a layout with ulysses or ring"
DENSE = (
    Plant(
        "mean-of-micro-batch-means",
        _mean_of_micro_batch_means,
        lambda run: any(means_differ(run.targets, mode) for mode in run.aggregations),
        "two micro-batches, a layout with dp, or another aggregation than token-mean",
    ),
    Plant(
        "counts-over-dp-and-sp",
        _counts_over_dp_and_sp,
        lambda run: run.layout.context > 1 and any(mode != "sum" for mode in run.aggregations),
        f"{CONTEXT}, and another aggregation than sum",
    ),
    Plant("gradients-averaged-over-dp", _gradients_averaged_over_dp, lambda run: run.layout.dp > 1, "a layout with dp"),
    Plant("context-factor-twice", _context_factor_twice, lambda run: run.layout.context > 1, CONTEXT),
    Plant(
        "rank-local-denominators",
        _rank_local_denominators,
        lambda run: run.layout.dp > 1 and any(mode != "sum" for mode in run.aggregations),
        "a layout with dp, and another aggregation than sum",
    ),
    Plant(
        "targets-shifted-after-sharding", _targets_shifted_after_sharding, lambda run: run.layout.context > 1, CONTEXT
    ),
    Plant("dropped-micro-batch", _dropped_micro_batch, lambda run: run.filled > 1, "two micro-batches"),
    Plant(
        "fully-masked-sequence-counted",
        _fully_masked_sequence_counted,
        lambda run: any(mode.startswith("seq-mean") for mode in run.aggregations),
        "an aggregation that begins with seq-mean",
    ),
    Plant("attention-sees-its-own-shard", _attention_sees_its_own_shard, lambda run: run.layout.context > 1, CONTEXT),
)
