"""Packing: targets are shifted inside documents, nothing else moves, and shards are slices of the whole row."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isoloss.engine.batching.packing import PackedBatch, StepSamples, pack
from isoloss.engine.batching.sample import Sample
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.row_order import chunk_borders, tokens_of

CPU = torch.device("cpu")


def mesh(ulysses: int = 1, rank: int = 0, tp: int = 1, ring: int = 1) -> Any:
    """As much of a mesh as packing looks at. rank: in ulysses x ring."""
    inner = SimpleNamespace(size=lambda: ulysses, rank=lambda: rank % ulysses)
    outer = SimpleNamespace(size=lambda: ring, rank=lambda: rank // ulysses)
    return SimpleNamespace(
        ulysses=inner, ring=outer, row_multiple=ulysses * ring * tp, document_multiple=1, cp_kernel="isoloss"
    )


def make_samples(lengths, seed=0):
    """Tokens are unique over all samples, so that a target tells where it came from. Weights and fields likewise."""
    random = torch.Generator().manual_seed(seed)
    samples, weights, start = [], [], 0
    for length in lengths:
        place = torch.arange(start, start + length)
        mask = torch.rand(length, generator=random) < 0.6
        mask[0] = False
        samples.append(Sample(1000 + place, mask, fields={"advantages": 0.5 * place, "old": -1.0 * place}))
        weights.append(mask * torch.stack([place + 0.25, -3.0 * place]).double())  # of two aggregations
        start += length
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    return samples, weights, offsets


def packed(samples, weights, rank_mesh, chosen=None, modes: int = 2) -> PackedBatch:
    """The row of the chosen samples of a step, all of them by default."""
    chosen = range(len(samples)) if chosen is None else chosen
    tree = PrefixTree.apart([len(samples[index]) for index in chosen])
    return pack(
        StepSamples(samples, dict(enumerate(weights)), modes, range(len(samples))), chosen, tree, rank_mesh, CPU
    )


def concatenated(shards: list[PackedBatch], ring: int = 1) -> PackedBatch:
    """The whole row from the slices of all context ranks."""
    ulysses, lengths = len(shards) // ring, shards[0].lengths
    places = [tokens_of(lengths, ring, rank // ulysses, ulysses, rank % ulysses) for rank in range(len(shards))]
    row_order = torch.cat(places).argsort()
    labeled = torch.cat([place[shard.labelled_N] for place, shard in zip(places, shards)])
    label_order = labeled.argsort(stable=True)

    def whole(values):
        return torch.cat(values)[row_order]

    def of_labels(values):
        return torch.cat(values)[label_order]

    return PackedBatch(
        tokens_R=whole([shard.tokens_R for shard in shards]),
        positions_R=whole([shard.positions_R for shard in shards]),
        lengths=lengths,
        parents=shards[0].parents,
        piece_R=whole([shard.piece_R for shard in shards]),
        members_SP=shards[0].members_SP,
        length_S=shards[0].length_S,
        start_S=shards[0].start_S,
        sequence_S=shards[0].sequence_S,
        labelled_N=labeled[label_order],
        targets_N=of_labels([shard.targets_N for shard in shards]),
        document_N=of_labels([shard.document_N for shard in shards]),
        origin_N=of_labels([shard.origin_N for shard in shards]),
        sequence_N=of_labels([shard.sequence_N for shard in shards]),
        weights_AN=of_labels([shard.weights_AN.T for shard in shards]).T,
        fields={k: of_labels([shard.fields[k] for shard in shards]) for k in shards[0].fields},
    )


def check_whole_row(row: PackedBatch, samples, weights, offsets, total: int):
    """By a walk over samples and tokens, with no slice arithmetic."""
    tokens, positions, labeled, targets, weight_list, origin, fields, documents = [], [], [], [], [], [], [], []
    for index, (sample, weight, offset) in enumerate(zip(samples, weights, offsets)):
        for t in range(len(sample)):
            if t > 0 and sample.mask_T[t]:
                labeled.append(len(tokens) - 1)  # the position before the target, in the same document
                targets.append(int(sample.tokens_T[t]))
                weight_list.append(weight[:, t].tolist())
                origin.append(offset + t)
                documents.append(index)
                fields.append((float(sample.fields["advantages"][t]), float(sample.fields["old"][t])))
            tokens.append(int(sample.tokens_T[t]))
            positions.append(t)
    padding = total - len(tokens)
    assert row.tokens_R.tolist() == tokens + [0] * padding
    assert row.positions_R.tolist() == positions + list(range(padding))
    assert row.lengths == tuple(len(s) for s in samples) + ((padding,) if padding else ())
    assert row.parents == (-1,) * len(row.lengths) and row.members_SP.equal(torch.eye(len(samples)).double())
    assert row.length_S.tolist() == [len(sample) for sample in samples] and row.start_S.tolist() == list(offsets)
    assert row.labelled_N.tolist() == labeled
    assert row.targets_N.tolist() == targets
    assert row.weights_AN.dtype == torch.float64 and row.weights_AN.T.tolist() == weight_list
    assert row.origin_N.tolist() == origin
    assert row.document_N.tolist() == documents
    assert row.piece_R.tolist() == [i for i, s in enumerate(samples) for _ in range(len(s))] + [-1] * padding
    if fields:
        assert list(zip(row.fields["advantages"].tolist(), row.fields["old"].tolist())) == fields


@pytest.mark.parametrize(
    ("lengths", "ulysses", "tp", "total", "ring"),
    [
        ([5, 1, 7, 3], 1, 1, 16, 1),  # no padding
        ([5, 1, 7, 2], 2, 1, 16, 1),
        ([5, 1, 7, 2], 4, 1, 16, 1),
        ([5, 1, 7], 4, 1, 16, 1),
        ([5, 1, 7], 2, 4, 16, 1),  # sequence-parallel TP splits the slices again
        ([9, 8], 4, 2, 24, 1),  # the last slice is padding only
        ([1], 4, 1, 4, 1),
        ([2], 1, 1, 2, 1),
        ([4, 4, 4, 4], 4, 1, 16, 1),  # documents end where shards do
        ([5, 1, 7, 3], 1, 1, 16, 2),
        ([5, 1, 7, 2], 2, 1, 16, 2),
        ([1, 1, 1, 2, 1, 9], 1, 1, 16, 4),  # documents shorter than the ring
        ([5, 31, 7], 2, 2, 48, 4),
        ([1], 1, 1, 3, 3),
    ],
)
def test_the_slices_of_all_ranks_are_the_row(lengths, ulysses, tp, total, ring):
    samples, weights, offsets = make_samples(lengths)
    context = ulysses * ring
    shards = [packed(samples, weights, mesh(ulysses, rank, tp, ring)) for rank in range(context)]
    assert [shard.tokens_R.numel() for shard in shards] == [total // context] * context
    assert all(shard.lengths == shards[0].lengths for shard in shards)
    check_whole_row(concatenated(shards, ring), samples, weights, offsets, total)


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_share_of_tokens_and_of_the_causal_triangle(ring):
    lengths = [1, 1, 1, 3, 5, 1, 97, 400, 2, 1231, 1]
    lengths.append(-sum(lengths) % ring + ring)
    held = [tokens_of(tuple(lengths), ring, rank) for rank in range(ring)]
    assert {len(tokens) for tokens in held} == {sum(lengths) // ring}
    assert torch.cat(held).sort().values.tolist() == list(range(sum(lengths)))
    place = torch.cat([torch.arange(1, n + 1) for n in lengths])  # keys that each token sees
    work = [int(place[tokens].sum()) for tokens in held]
    assert max(work) < 1.01 * sum(work) / ring
    for length, border in zip(lengths, chunk_borders(tuple(lengths), ring)):
        sizes = [b - a for a, b in itertools.pairwise(border)]
        assert sum(sizes) == length and max(sizes) - min(sizes) <= 1


def test_samples_of_a_step_keep_their_place_whatever_the_order():
    samples, weights, offsets = make_samples([4, 6, 3])
    chosen = [2, 0]
    args = [[values[i] for i in chosen] for values in (samples, weights, offsets)]
    row = packed(samples, weights, mesh(), chosen)
    check_whole_row(row, *args, total=7)
    step = torch.cat([sample.tokens_T for sample in samples])
    assert torch.equal(step[row.origin_N], row.targets_N)
    assert row.sequence_N.tolist() == [chosen[document] for document in row.document_N.tolist()]


def test_the_first_token_of_a_document_is_no_target_of_the_one_before():
    samples = [Sample(torch.tensor([1, 2]), torch.tensor([False, True])) for _ in range(3)]
    weights = [torch.ones((1, 2), dtype=torch.float64)] * 3
    whole = concatenated([packed(samples, weights, mesh(2, rank)) for rank in range(2)])
    assert whole.labelled_N.tolist() == [0, 2, 4] and whole.targets_N.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("context", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_an_empty_micro_batch_is_a_row_of_padding_without_labels(context, tp):
    for rank in range(context):
        row = packed([], [], mesh(context, rank, tp))
        assert row.tokens_R.tolist() == [0] * tp and row.lengths == (context * tp,)
        assert row.positions_R.tolist() == list(range(rank * tp, rank * tp + tp))
        for values in (row.labelled_N, row.targets_N, row.weights_AN, row.origin_N, row.document_N):
            assert values.numel() == 0
        assert not row.fields
        row = packed(*make_samples([3])[:2], mesh(context, rank, tp), [])  # the loss reads fields of others of the step
        assert row.weights_AN.shape == (2, 0) and row.fields.keys() == {"advantages", "old"}
        assert row.fields["advantages"].shape == (0,)


def test_a_micro_batch_without_targets_has_no_labels():
    samples = [Sample(torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.bool))]
    row = packed(samples, [torch.zeros((1, 3), dtype=torch.float64)], mesh())
    assert row.labelled_N.numel() == row.targets_N.numel() == row.weights_AN.numel() == 0
