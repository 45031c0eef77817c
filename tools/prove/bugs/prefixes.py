"""Bugs in what samples share that begin alike."""

from dataclasses import replace
from itertools import accumulate

import torch

from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.tools.prove.bugs.bug import PlantedBug, RunTraits

PACK, FORWARD_ROW = "isoloss.engine.step.forward_backward.pack", "isoloss.engine.step.forward_backward.forward_row"


def _label_of_the_first_sample(pack):
    """What ends a prompt predicts the first token of one completion only."""

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
    """A completion goes on counting where the one before it ended."""

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
    """The mask of one document in the place of that of a tree."""

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
    """The mask forgets what comes before."""

    def forward_wrongly(chunk, tokens_R, positions_R, row):
        row.parents = ()
        return forward_row(chunk, tokens_R, positions_R, row)

    return forward_wrongly


def _routed_once(routed_tokens):
    """A token counts for the first of its samples only."""

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
