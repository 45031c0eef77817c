"""What samples begin with alike is found, and each target is still predicted from all tokens before it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloss.engine.batching.packing import StepSamples, pack
from isoloss.engine.batching.prefixes import fold, shared_beginnings
from isoloss.engine.batching.sample import Sample
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.row_order import tokens_of

from .test_packing import mesh

CPU = torch.device("cpu")


def tensors(*samples: str) -> list[torch.Tensor]:
    """A letter a token."""
    return [torch.tensor([ord(letter) for letter in sample]) for sample in samples]


def texts(*samples: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """The pieces of these samples: text, parent and samples of each."""
    tree = fold(tensors(*samples))
    of_piece = [tuple(s for s, path in enumerate(tree.paths) if piece in path) for piece in range(len(tree.lengths))]
    text = [samples[of[0]][start:stop] for of, (start, stop) in zip(of_piece, tree.spans)]
    return list(zip(text, tree.parents, of_piece))


def test_a_group_is_its_prompt_and_its_completions():
    assert texts("promptA", "promptBB", "promptC") == [
        ("prompt", -1, (0, 1, 2)), ("A", 0, (0,)), ("BB", 0, (1,)), ("C", 0, (2,))
    ]  # fmt: skip


def test_branches_of_a_tree_and_what_is_alone():
    assert texts("sysAxP", "other", "sysAxQQ", "sysB", "sysAyR") == [
        ("sys", -1, (0, 2, 3, 4)), ("A", 0, (0, 2, 4)), ("x", 1, (0, 2)), ("P", 2, (0,)), ("QQ", 2, (2,)),
        ("yR", 1, (4,)), ("B", 0, (3,)), ("other", -1, (1,)),
    ]  # fmt: skip


def test_samples_that_are_the_same_or_begin_another():
    assert texts("same", "same") == [("same", -1, (0, 1))]
    assert texts("long", "longer", "lo") == [("lo", -1, (0, 1, 2)), ("ng", 0, (0, 1)), ("er", 1, (1,))]


def test_a_beginning_that_saves_little_is_not_shared():
    """One token of 40, three times; what two of them share is long enough, and begins at the first token."""
    long = "x" + "a" * 20
    assert texts(long + "b" * 20, "x" + "c" * 40, long + "d" * 20) == [
        (long, -1, (0, 2)), ("b" * 20, 0, (0,)), ("d" * 20, 0, (2,)), ("x" + "c" * 40, -1, (1,))
    ]  # fmt: skip


@pytest.mark.parametrize(("shared", "worthwhile"), [(2, False), (3, True)])
def test_where_it_begins_to_pay(shared, worthwhile):
    """A sixteenth of the 32 tokens behind it."""
    found = texts("x" * shared + "a" * 16, "x" * shared + "b" * 16)
    assert (len(found) == 3) == worthwhile


@st.composite
def rows(draw) -> list[torch.Tensor]:
    """Samples of few different tokens, many of which go on from the beginning of another."""
    samples: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        start = draw(st.sampled_from(samples))[: draw(st.integers(0, 12))] if samples else []
        samples.append(start + draw(st.lists(st.integers(0, 2), min_size=0 if start else 1, max_size=9)))
    return [torch.tensor(sample) for sample in samples]


@settings(max_examples=150, deadline=None)
@given(rows(), st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]))
def test_every_target_is_there_once_behind_its_own_beginning(tokens, grid):
    """By a walk up the tree from each label, on all ranks of a grid."""
    ring, ulysses = grid
    random = torch.Generator().manual_seed(0)
    samples, weights, offsets, place = [], [], [], 0
    for index, sample in enumerate(tokens):
        origin = torch.arange(place, place + len(sample), dtype=torch.float64)
        mask = (torch.rand(len(sample), generator=random) < 0.7) & (torch.arange(len(sample)) > 0)
        samples.append(Sample(sample, mask, fields={"origin": origin + 0.5, "sample": torch.full_like(origin, index)}))
        weights.append(torch.stack([origin, -origin]))
        offsets.append(place)
        place += len(sample)
    tree = fold(tokens)
    step = StepSamples(samples, dict(enumerate(weights)), 2, range(len(samples)))
    ranks = [mesh(ulysses, rank, 1, ring) for rank in range(ring * ulysses)]
    packed = [pack(step, range(len(samples)), tree, rank, CPU) for rank in ranks]
    lengths, forest = packed[0].lengths, PrefixTree(packed[0].lengths, packed[0].parents)
    starts = [0, *itertools.accumulate(lengths)]
    own = [tokens_of(lengths, ring, rank // ulysses, ulysses, rank % ulysses) for rank in range(len(ranks))]
    row = torch.zeros(sum(lengths), dtype=torch.int64)
    for places, of_rank in zip(own, packed):
        row[places] = of_rank.tokens_R
        piece_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        assert of_rank.piece_R.equal(torch.where(piece_of < len(tree.lengths), piece_of, -1)[places])
        at = torch.arange(sum(lengths)) - torch.tensor(starts)[piece_of] + torch.tensor(forest.offsets)[piece_of]
        assert of_rank.positions_R.equal(at[places])
    found = []
    for places, of_rank in zip(own, packed):
        assert of_rank.labelled_N.equal(of_rank.labelled_N.sort().values)
        for n, at in enumerate(places[of_rank.labelled_N].tolist()):
            piece = next(p for p in range(len(lengths)) if starts[p] <= at < starts[p + 1])
            before, start = row[starts[piece] : at + 1].tolist(), piece
            while (start := forest.parents[start]) >= 0:
                before = row[starts[start] : starts[start + 1]].tolist() + before
            sample, origin = int(of_rank.document_N[n]), int(of_rank.origin_N[n])
            assert before == tokens[sample][: origin - offsets[sample]].tolist()
            assert int(of_rank.targets_N[n]) == int(tokens[sample][origin - offsets[sample]])
            assert of_rank.weights_AN[:, n].tolist() == [origin, -origin]
            assert float(of_rank.fields["origin"][n]) == origin + 0.5 and int(of_rank.fields["sample"][n]) == sample
            found.append(origin)
    wanted = [offset + t for offset, s in zip(offsets, samples) for t in range(len(s)) if s.mask_T[t]]
    assert sorted(found) == wanted
    members = [[float(piece in path) for piece in range(len(tree.lengths))] for path in tree.paths]
    assert packed[0].members_SP.tolist() == members
    assert sum(tree.lengths) <= sum(map(len, tokens))


def test_what_goes_to_other_experts_is_not_alike():
    """Two servers routed the fourth token of a prompt in two ways; a third said nothing."""
    tokens = tensors("promptA", "promptB", "promptC", "promptD")
    here = torch.zeros((7, 2, 2), dtype=torch.int16)
    there = here.clone()
    there[3, 1, 0] = 5
    tree = fold(tokens, [here, there, here, None])
    spans = list(zip(tree.spans, tree.parents))
    assert spans == [((0, 3), -1), ((3, 6), 0), ((6, 7), 1), ((6, 7), 1), ((3, 7), 0), ((0, 7), -1)]
    assert shared_beginnings(tokens, [0] * 4, [here, there, here, here]) == {(0, 1, 2, 3): 3}
    assert shared_beginnings(tokens, [0] * 4) == {(0, 1, 2, 3): 6}
