"""Bugs that only a policy loss can show: in its terms, and in prefixes that samples share."""

from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist

from isoloss.parallel.collectives import sum_parts
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.tools.prove.bugs.bug import PlantedBug, RunTraits, means_differ, weights_changed

PACK, FORWARD_ROW = "isoloss.engine.step.step_batch.pack", "isoloss.engine.step.forward_backward.forward_row"


def _sum_of_its_own_shard(sum_over_documents):
    """Take the ratio of the part of a sequence that lies on this rank."""
    del sum_over_documents

    def own(values_N, document_N, num_documents, group):
        del group
        return values_N.new_zeros(num_documents).index_add(0, document_N, values_N)

    return own


def _second_term_by_micro_batch_means(samples, plan, mesh):
    """Average the KL and entropy terms over micro-batches, while the policy term is weighed rightly."""
    del samples
    share = len(plan.micro_batches[0]) * mesh.dp.size()

    def change(index, weights_AN):
        del index
        tokens = torch.tensor(float(weights_AN.shape[1]), dtype=torch.float64, device=weights_AN.device)
        dist.all_reduce(tokens, group=mesh.context)
        others = torch.full_like(weights_AN[1:], 1 / (max(float(tokens), 1.0) * share))
        return torch.cat([weights_AN[:1], others])

    return change


def _uses_sequence_sums(run: RunTraits) -> bool:
    return run.policy is not None and (run.policy.loss == "gspo" or run.policy.importance == "sequence")


POLICY = (
    PlantedBug(
        "sequence-sum-of-its-own-shard",
        {"isoloss.engine.step.losses.sum_over_documents": _sum_of_its_own_shard},
        lambda run: run.layout.context > 1 and _uses_sequence_sums(run),
        "a layout with ulysses or ring, and --loss gspo or another policy loss with algorithm.importance=sequence",
    ),
    PlantedBug(
        "sequence-gradient-of-its-own-shard",
        # the right ratio, whose gradient forgets what the other ranks' losses made of it
        {"isoloss.parallel.sequence.sum_over_ranks": lambda sum_over_ranks: sum_parts},
        lambda run: run.layout.context > 1 and run.policy is not None and run.policy.loss == "gspo",
        "a layout with ulysses or ring, and --loss gspo",
    ),
    PlantedBug(
        "second-term-by-micro-batch-means",
        weights_changed(_second_term_by_micro_batch_means),
        lambda run: any(means_differ(run.targets, mode) for mode in run.others),
        "a KL or entropy term with an aggregation of its own, such as --loss clip algorithm.kl_coef=0.1 "
        "algorithm.kl_aggregation=seq-mean-token-mean",
    ),
)


# ---- shared prefixes -------------------------------------------------------------------------------------------------


def _label_of_the_first_sample(pack):
    """Let the end of a prompt predict the first token of one completion only."""

    def pack_wrongly(*arguments):
        packed = pack(*arguments)
        at_N = packed.labelled_N
        first_N = torch.cat([at_N.new_ones(len(at_N[:1]), dtype=torch.bool), at_N[1:] != at_N[:-1]])
        names = ("labelled_N", "targets_N", "document_N", "origin_N")
        return replace(
            packed,
            **{name: getattr(packed, name)[first_N] for name in names},
            weights_AN=packed.weights_AN[:, first_N],
            fields={name: values_N[first_N] for name, values_N in packed.fields.items()},
        )

    return pack_wrongly


def _positions_across_siblings(pack):
    """Let a completion's positions continue those of the completion before it."""

    def pack_wrongly(*arguments):
        packed = pack(*arguments)
        forest, starts = PrefixTree(packed.lengths, packed.parents), [0, *accumulate(packed.lengths)]
        too_far, root = [], 0
        for piece, parent in enumerate(packed.parents):
            root = root if parent >= 0 else starts[piece]
            too_far.append(starts[piece] - root - forest.offsets[piece])
        of_piece = torch.tensor([*too_far, 0], device=packed.piece_R.device)
        return replace(packed, positions_R=packed.positions_R + of_piece[packed.piece_R])

    return pack_wrongly


def _siblings_see_each_other(forward_row):
    """Use the mask of one document instead of that of a tree."""

    def forward_wrongly(chunk, tokens_R, positions_R, row):
        documents: list[int] = []
        for length, parent in zip(row.lengths, row.parents):
            if parent >= 0:
                documents[-1] += length
            else:
                documents.append(length)
        row.lengths, row.parents = tuple(documents), ()
        return forward_row(chunk, tokens_R, positions_R, row)

    return forward_wrongly


def _prompt_unseen(forward_row):
    """Let the mask forget the prefix."""

    def forward_wrongly(chunk, tokens_R, positions_R, row):
        row.parents = ()
        return forward_row(chunk, tokens_R, positions_R, row)

    return forward_wrongly


def _routed_once(routed_tokens):
    """Count a token for the first of its samples only."""

    def once(*arguments):
        routed = routed_tokens(*arguments)
        first_SP = (routed.members_SP.cumsum(0) == 1) & (routed.members_SP == 1)
        return replace(routed, members_SP=first_SP.to(routed.members_SP.dtype))

    return once


def _branches(run: RunTraits) -> bool:
    return run.branches


NEEDS = "--loss clip or another policy loss, and a micro-batch that holds two answers to one prompt"
PREFIXES = (
    PlantedBug("shared-label-once", {PACK: _label_of_the_first_sample}, _branches, NEEDS),
    PlantedBug("positions-across-siblings", {PACK: _positions_across_siblings}, _branches, NEEDS),
    PlantedBug("siblings-see-each-other", {FORWARD_ROW: _siblings_see_each_other}, _branches, NEEDS),
    PlantedBug("prompt-unseen", {FORWARD_ROW: _prompt_unseen}, _branches, NEEDS),
    PlantedBug(
        "shared-tokens-routed-once",
        {"isoloss.engine.step.forward_backward.routed_tokens": _routed_once},
        lambda run: run.branches and run.moe is not None and run.moe.aux_loss_coef + run.moe.z_loss_coef > 0,
        f"a model with experts, moe.aux_loss_coef or moe.z_loss_coef above 0, {NEEDS}",
    ),
)
