"""Pack the samples of a micro-batch into one (THD) row, and take this rank's slice of it.

Shape suffixes: T tokens of one sample, R of this rank's slice, N labelled positions that it predicts at, L those of the
whole row, S samples of the row, P its pieces, A aggregations of the loss, Y layers with experts, X experts chosen for a
token. A labelled position has one target, or K.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isoloss.engine.batching.sample import UNKNOWN, Sample, known_routes
from isoloss.parallel import Mesh
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.runtime.upload import upload
from isoloss.parallel.sequence import own_tokens, padded_document, padded_length


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as one rank sees it.

    tokens_R, positions_R: int64; positions go on along a document, and restart in the next.
    lengths, parents: the pieces of the whole row, as in `PrefixTree`, with the padding that some attention kernels want
        behind each; padding of the row last.
    piece_R: the piece of the row that each token belongs to; -1 for padding and dummy tokens. Where samples own tokens,
        pieces are cut where owners change.
    members_SP: 1 where a sample of the row owns the tokens of a piece that it goes through, else 0, fp64.
    length_S, start_S: tokens of each sample of the row (where samples own tokens, of its sequence), and the sample's
        start in the concatenation of all samples of the step.
    sequence_S: number of its sequence in the step.
    labelled_N: for each target, the position of the slice that predicts it. targets_N: token ids of the targets, [N] or
        [N, K].
    document_N, origin_N: for each target, its sample in the row, and its place in that concatenation.
    weights_AN: fp64, from the normalizer. fields: per-target tensors of the samples, [N]
        or [N, K].
    sequence_N: for each target, the number of its sequence in the step.
    cut_sequences: whether a sequence of the step is cut into several samples; spread_sequences: whether these are in
        several micro-batches. num_sequences: number of sequences of the step.
    longest: tokens of the longest whole row that a data-parallel rank has of this micro-batch, with padding.
    uploads: tensors that describe the row to attention on the device, for all chunks of the model.
    routes_RYX: int16, the experts given for each token, `UNKNOWN` where none are; None where no sample has any.
    """

    tokens_R: Tensor
    positions_R: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    piece_R: Tensor
    members_SP: Tensor
    length_S: Tensor
    start_S: Tensor
    sequence_S: Tensor
    labelled_N: Tensor
    targets_N: Tensor
    document_N: Tensor
    origin_N: Tensor
    weights_AN: Tensor
    fields: Mapping[str, Tensor]
    sequence_N: Tensor
    cut_sequences: bool = False
    spread_sequences: bool = False
    num_sequences: int = 0
    longest: int = 0
    uploads: VarlenCache = field(default_factory=VarlenCache)
    routes_RYX: Tensor | None = None


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step, and the weights that this rank needs.

    samples: all samples of the step; an outline is enough for one that another rank computes.
    weights: weight of every token as a target, [A, T] fp64, by sample that this rank computes.
    modes: number of aggregations A.
    sequences: number of each sample's sequence.
    owned: tokens of each sequence, where samples own tokens.
    """

    samples: Sequence[Sample]
    weights: Mapping[int, Tensor]
    modes: int
    sequences: Sequence[int]
    owned: Sequence[int] = ()

    def length(self, index: int) -> int:
        """Return the tokens of a sample, or of its sequence where samples own tokens."""
        return self.owned[self.sequences[index]] if self.owned else len(self.samples[index])

    @cached_property
    def starts(self) -> list[int]:
        """Return the place of each sample's first token in the concatenation of all samples."""
        return [0, *accumulate(map(len, self.samples))]

    @cached_property
    def no_fields(self) -> dict[str, Tensor]:
        """Return the samples' fields of no target."""
        fields = self.samples[0].fields if self.samples else {}
        return {n: torch.zeros((0, *fields[n].shape[1:]), dtype=torch.float64) for n in sorted(fields)}


def pack(
    step: StepSamples, micro_batch: Sequence[int], tree: PrefixTree, mesh: Mesh, device: torch.device
) -> PackedBatch:
    """Concatenate the pieces of a micro-batch and keep this rank's slice.

    micro_batch: indices of its samples. None make a row of dummy tokens without labels, through which every parameter
        still gets a (zero) gradient.
    tree: the row's pieces, whose documents are the samples.
    Targets are found here, on whole samples, before sharding: the last token that several samples share predicts a
    target for each.
    """
    samples = [step.samples[index] for index in micro_batch]
    row = _Row.of([sample.tokens_T for sample in samples], tree, mesh)
    owned = any(sample.owned_T is not None for sample in samples)
    piece_of, members_SP = _owned_pieces(samples, row) if owned else (row.piece_of, row.members_SP)
    labels = _Labels.of(step, micro_batch, row.places)
    own_R = own_tokens(row.lengths, mesh)
    slot = torch.full((len(row.tokens),), -1)
    slot[own_R] = torch.arange(len(own_R))
    mine = (slot[labels.place_L] >= 0).nonzero().squeeze(1)
    mine = mine[slot[labels.place_L[mine]].argsort(stable=True)]
    host = {
        "tokens_R": row.tokens[own_R],
        "positions_R": row.positions[own_R],
        "piece_R": piece_of[own_R],
        "members_SP": members_SP,
        "length_S": torch.tensor([step.length(index) for index in micro_batch], dtype=torch.int64),
        "start_S": torch.tensor([step.starts[index] for index in micro_batch], dtype=torch.int64),
        "labelled_N": slot[labels.place_L[mine]],
        "targets_N": labels.target_L[mine],
        "document_N": labels.sample_L[mine],
        "origin_N": labels.origin_L[mine],
        "weights_AN": labels.weights_AL[:, mine],
    }
    host["sequence_S"] = torch.tensor([step.sequences[index] for index in micro_batch], dtype=torch.int64)
    host["sequence_N"] = host["sequence_S"][host["document_N"]]
    fields = {name: values_L[mine] for name, values_L in labels.fields.items()}
    tensors = _upload([*host.values(), *fields.values()], device)
    on_device: dict[str, Any] = dict(zip(host, tensors))
    fields = dict(zip(fields, tensors[len(host) :]))
    routes = _routes(samples, row)
    routes = None if routes is None else upload(routes[own_R], device)
    return PackedBatch(lengths=row.lengths, parents=row.parents, fields=fields, routes_RYX=routes, **on_device)


@dataclass(frozen=True)
class _Row:
    """A whole row, before sharding.

    lengths, parents: its pieces, with padding. piece_of: the piece of each token, -1 for padding.
    places: for each sample, where its tokens are in the row.
    """

    tokens: Tensor
    positions: Tensor
    piece_of: Tensor
    members_SP: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    places: Sequence[Tensor]

    @classmethod
    def of(cls, tokens: Sequence[Tensor], tree: PrefixTree, mesh: Mesh) -> "_Row":
        """Lay the pieces of `tree` out. tokens: tokens of each sample, [T]."""
        padded = [padded_document(length, mesh) for length in tree.lengths]
        used = sum(padded)
        total = padded_length(used, mesh)
        rest = (total - used,) if total > used else ()
        starts, spans = [*accumulate(padded, initial=0)], tree.spans
        row, positions = torch.zeros(total, dtype=torch.int64), torch.arange(total) - used
        piece_of = torch.full((total,), -1)
        for piece, ((start, stop), length) in enumerate(zip(spans, padded)):
            # Padding of a document goes on in it: no token before it sees it, and it needs no mask of its own.
            positions[starts[piece] : starts[piece] + length] = torch.arange(start, start + length)
            piece_of[starts[piece] : starts[piece] + stop - start] = piece
        members = torch.zeros((len(tokens), len(tree.lengths)), dtype=torch.float64)
        places = [torch.empty(len(tokens_T), dtype=torch.int64) for tokens_T in tokens]
        for sample, path in enumerate(tree.paths):
            for piece in path:
                start, stop = spans[piece]
                places[sample][start:stop] = torch.arange(starts[piece], starts[piece] + stop - start)
                members[sample, piece] = 1
            row[places[sample]] = tokens[sample]  # each sample writes the tokens that it shares
        return cls(row, positions, piece_of, members, (*padded, *rest), (*tree.parents, *(-1 for _ in rest)), places)


def _owned_pieces(samples: Sequence[Sample], row: _Row) -> tuple[Tensor, Tensor]:
    """Return the piece of each token of a whole row, and members_SP: pieces are cut where owners change."""
    real, piece_of, owned = row.piece_of >= 0, row.piece_of, list[Tensor]()
    for sample, place_T in zip(samples, row.places):
        owned.append(place_T if sample.owned_T is None else place_T[sample.owned_T])
        code = 2 * piece_of
        code[owned[-1]] += 1
        piece_of = torch.full_like(piece_of, -1)
        piece_of[real] = code[real].unique(return_inverse=True)[1]
    members = torch.zeros((len(samples), int(piece_of.max()) + 1), dtype=torch.float64)
    for of_sample_P, place in zip(members, owned):
        of_sample_P[piece_of[place]] = 1
    return piece_of, members


@dataclass(frozen=True)
class _Labels:
    """The targets of a row.

    place_L: the position of the row that predicts each. target_L: its token id. sample_L: the sample of the row.
    origin_L: its place in the concatenation of the step's samples.
    """

    place_L: Tensor
    target_L: Tensor
    sample_L: Tensor
    origin_L: Tensor
    weights_AL: Tensor
    fields: Mapping[str, Tensor]

    @classmethod
    def of(cls, step: StepSamples, micro_batch: Sequence[int], places: Sequence[Tensor]) -> "_Labels":
        """Find the targets of a micro-batch. places: for each sample, where its tokens are in the row."""
        samples = [step.samples[index] for index in micro_batch]
        if not samples:
            none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros((step.modes, 0), dtype=torch.float64)
            no_targets = none.reshape(0, *(step.samples[0].target_shape if step.samples else ()))
            return cls(none, no_targets, none, none, nothing, step.no_fields)
        at = [sample.mask_T[1:].nonzero().squeeze(1) for sample in samples]  # position t predicts token t + 1
        names = sorted({name for sample in samples for name in sample.fields})
        return cls(
            torch.cat([place_T[at_L] for place_T, at_L in zip(places, at)]),
            torch.cat([sample.predicted_T[at_L + 1] for sample, at_L in zip(samples, at)]),
            torch.arange(len(samples)).repeat_interleave(torch.tensor([len(at_L) for at_L in at])),
            torch.cat([step.starts[index] + at_L + 1 for index, at_L in zip(micro_batch, at)]),
            torch.cat([step.weights[index][:, at_L + 1] for index, at_L in zip(micro_batch, at)], dim=1),
            {
                name: torch.cat([sample.fields[name][at_L + 1].to(torch.float64) for sample, at_L in zip(samples, at)])
                for name in names
            },
        )


def _routes(samples: Sequence[Sample], row: _Row) -> Tensor | None:
    """Return the experts given for each token of the whole row, int16, at the tokens' own places."""
    given = [
        (known_routes(each.routes), place_T) for each, place_T in zip(samples, row.places) if each.routes is not None
    ]
    if not given:
        return None
    routes = torch.full((len(row.tokens), *given[0][0].shape[1:]), UNKNOWN, dtype=torch.int16)
    for of_sample, place_T in given:
        routes[place_T] = of_sample
    return routes


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring tensors of int64 and fp64 to the device in one copy."""
    words = upload(torch.cat([tensor.flatten().view(torch.int64) for tensor in tensors]), device)
    parts = words.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.dtype).view_as(tensor) for part, tensor in zip(parts, tensors)]
