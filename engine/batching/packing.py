"""Samples of a micro-batch -> one packed (THD) row -> this rank's slice of it.

Shape suffixes: T tokens of one sample, R of this rank's slice, N targets that it predicts, L those of the whole row,
S samples of the row, P its pieces, A aggregations of the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from isoloss.engine.batching.prefixes import Piece, unfolded
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Mesh
from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.runtime.upload import upload
from isoloss.parallel.sequence import own_tokens, padded_document, padded_length


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as one rank sees it.

    tokens_R, positions_R: int64; positions go on along a document, and restart in the next.
    lengths, parents: of the pieces of the whole row, as in `PrefixTree`, with the padding that some attention
        kernels want behind each; padding of the row last.
    piece_R: the piece of the row that each token belongs to; -1 for padding and dummy tokens.
    members_SP: 1 where a sample of the row goes through a piece, else 0, fp64.
    length_S, start_S: tokens of each sample of the row, and where it begins in the concatenation of all of the step.
    labelled_N: indices into the slice of the positions that predict a target, one for each target; targets_N: those.
    document_N, origin_N: the sample of the row that each target belongs to, and where it stands in that concatenation.
    weights_AN: fp64, from the normalizer. fields: per-target tensors of the samples, [N].
    longest: tokens of the longest whole row that a data-parallel rank has of this micro-batch, with padding.
    uploads: what attention has told the device of the row, for all chunks of the model.
    """

    tokens_R: Tensor
    positions_R: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    piece_R: Tensor
    members_SP: Tensor
    length_S: Tensor
    start_S: Tensor
    labelled_N: Tensor
    targets_N: Tensor
    document_N: Tensor
    origin_N: Tensor
    weights_AN: Tensor
    fields: Mapping[str, Tensor]
    longest: int = 0
    uploads: VarlenCache = field(default_factory=VarlenCache)


def pack(
    samples: Sequence[Sample],
    weights: Sequence[Tensor],
    offsets: Sequence[int],
    mesh: Mesh,
    device: torch.device,
    names: Sequence[str] = (),
    modes: int = 1,
    pieces: Sequence[Piece] | None = None,
) -> PackedBatch:
    """Pack samples into one row and take this rank's slice.

    weights: for each sample, weights for every token as a target, [A, T].
    offsets: of each sample, its start in the step.
    names, modes: fields of the step's samples and number of aggregations; a row of dummies has them too.
    pieces: of the samples, where what they begin with alike is to be in the row once (`prefixes.fold`).
    Targets are found here, on whole samples, before sharding: a token that ends what several samples share predicts a
    target for each. No samples make a row of dummy tokens without labels, through which every parameter still gets a
    (zero) gradient.
    """
    pieces = pieces if pieces is not None else unfolded([len(sample) for sample in samples])
    spans = [padded_document(len(piece), mesh) for piece in pieces]
    used = sum(spans)
    total = padded_length(used, mesh)
    rest = (total - used,) if total > used else ()
    tokens = torch.zeros(total, dtype=torch.int64)
    positions = torch.arange(total) - used
    piece_of = torch.full((total,), -1)
    places = [torch.empty(len(sample), dtype=torch.int64) for sample in samples]  # of each token in the row
    members = torch.zeros((len(samples), len(pieces)), dtype=torch.float64)
    for index, (piece, span, start) in enumerate(zip(pieces, spans, accumulate(spans, initial=0))):
        row, own = slice(start, start + len(piece)), slice(piece.start, piece.stop)
        tokens[row] = samples[piece.samples[0]].tokens_T[own]
        # Padding of a document goes on in it: no token before it sees it, and it needs no mask of its own.
        positions[start : start + span] = torch.arange(piece.start, piece.start + span)
        piece_of[row] = index
        members[list(piece.samples), index] = 1
        for sample in piece.samples:
            places[sample][own] = torch.arange(row.start, row.stop)
    all_lengths = (*spans, *rest)
    own_R = own_tokens(all_lengths, mesh)
    labels = _Labels.of(samples, weights, offsets, places, names, modes)
    slot = torch.full((total,), -1)
    slot[own_R] = torch.arange(len(own_R))
    mine = (slot[labels.place_L] >= 0).nonzero().squeeze(1)
    mine = mine[slot[labels.place_L[mine]].argsort(stable=True)]
    (
        tokens_R,
        positions_R,
        piece_R,
        members_SP,
        length_S,
        start_S,
        labelled_N,
        targets_N,
        document_N,
        origin_N,
        *floats,
    ) = _upload(
        [tokens[own_R], positions[own_R], piece_of[own_R], members]
        + [torch.tensor([len(sample) for sample in samples], dtype=torch.int64)]
        + [torch.tensor(list(offsets), dtype=torch.int64), slot[labels.place_L[mine]], labels.target_L[mine]]
        + [labels.sample_L[mine], labels.origin_L[mine], labels.weights_AL[:, mine]]
        + [values_L[mine] for values_L in labels.fields.values()],
        device,
    )
    return PackedBatch(
        tokens_R=tokens_R,
        positions_R=positions_R,
        lengths=all_lengths,
        parents=(*(piece.parent for piece in pieces), *(-1 for _ in rest)),
        piece_R=piece_R,
        members_SP=members_SP,
        length_S=length_S,
        start_S=start_S,
        labelled_N=labelled_N,
        targets_N=targets_N,
        document_N=document_N,
        origin_N=origin_N,
        weights_AN=floats[0],
        fields=dict(zip(labels.fields, floats[1:])),
    )


@dataclass(frozen=True)
class _Labels:
    """The targets of all samples of a row, [L]: where in the row each is predicted, what it is, its sample, and where
    that has it in the step."""

    place_L: Tensor
    target_L: Tensor
    sample_L: Tensor
    origin_L: Tensor
    weights_AL: Tensor
    fields: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        weights: Sequence[Tensor],
        offsets: Sequence[int],
        places: Sequence[Tensor],
        names: Sequence[str],
        modes: int,
    ) -> "_Labels":
        """places: of each token of each sample, in the row."""
        names = sorted({name for sample in samples for name in sample.fields}) if samples else names
        if not samples:
            none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros((modes, 0), dtype=torch.float64)
            return cls(none, none, none, none, nothing, dict.fromkeys(names, nothing[0]))
        at = [sample.mask_T[1:].nonzero().squeeze(1) for sample in samples]  # position t predicts token t + 1
        return cls(
            torch.cat([place_T[at_L] for place_T, at_L in zip(places, at)]),
            torch.cat([sample.tokens_T[at_L + 1] for sample, at_L in zip(samples, at)]),
            torch.arange(len(samples)).repeat_interleave(torch.tensor([len(at_L) for at_L in at])),
            torch.cat([offset + at_L + 1 for offset, at_L in zip(offsets, at)]),
            torch.cat([weights_AT[:, at_L + 1] for weights_AT, at_L in zip(weights, at)], dim=1),
            {
                name: torch.cat([sample.fields[name][at_L + 1].to(torch.float64) for sample, at_L in zip(samples, at)])
                for name in names
            },
        )


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of int64 and fp64 on the device, in one copy."""
    words = upload(torch.cat([tensor.flatten().view(torch.int64) for tensor in tensors]), device)
    parts = words.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.dtype).view_as(tensor) for part, tensor in zip(parts, tensors)]
