"""Linear attention over documents that share what they begin with: each piece once, as if every document were whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.gated_delta import token_by_token
from torch import Tensor

import isoloss.parallel.ops.gated_delta
from isoloss.parallel.ops.gated_delta import DeltaInputs, delta_rule, delta_rule_and_states
from isoloss.parallel.ops.gated_delta_chunks import CHUNK
from isoloss.parallel.ops.prefix_scan import convolve_forest, scan_forest
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.short_convolution import short_convolution
from isoloss.parallel.ops.varlen import VarlenCache

# A prompt with completions, one of which branches again; one token that is shared; documents that share nothing.
FORESTS = (
    PrefixTree((70, 5, 66, 1, 130, 3, 9, 64, 64), (-1, 0, 0, 2, 2, 0, -1, -1, 7)),
    PrefixTree((1, 1, 2, 1), (-1, 0, 0, 2)),
    PrefixTree((2, 1, 1, 1, 1), (-1, 0, 1, 2, 2)),
    PrefixTree((200, 3), (-1, -1)),
)
SPEEDS = torch.tensor([0.005, 0.05, 1.0, 16.0], dtype=torch.float64)


@st.composite
def forests(draw) -> PrefixTree:
    """Pieces of any lengths; each goes on from one on the way to the piece before it, or begins a document."""
    lengths = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 140)), min_size=1, max_size=9))
    parents, path = [], []
    for piece in range(len(lengths)):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path = [*path, piece]
    return PrefixTree(tuple(lengths), tuple(parents))


def documents(forest: PrefixTree) -> list[list[int]]:
    """Of each way from a root to any piece, its tokens in the row."""
    starts = torch.tensor([0, *forest.lengths]).cumsum(0).tolist()
    ways: list[list[int]] = []
    for piece, parent in enumerate(forest.parents):
        ways.append([*(ways[parent] if parent >= 0 else []), *range(starts[piece], starts[piece + 1])])
    return ways


def of_whole_documents(function, given: list[Tensor], forest: PrefixTree, *more: Tensor) -> Tensor:
    """Each piece from a document that ends with it, computed alone."""
    outs = []
    for length, way in zip(forest.lengths, documents(forest), strict=True):
        outs.append(function(*(x[way] for x in given), *more, (len(way),))[-length:])
    return torch.cat(outs)


def compare(found, wanted, given: list[Tensor], bound: float = 1e-11) -> None:
    """Results and all gradients. found, wanted: functions of `given`."""
    sides = []
    for function in (found, wanted):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out = function(leaves)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        sides.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for a, b in zip(*sides, strict=True):
        assert (a - b).norm() <= bound * (b.norm() + 1e-30)


def check_rule(forest: PrefixTree) -> None:
    random, tokens = torch.Generator().manual_seed(0), sum(forest.lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    given = [normal(tokens, 2, 6), normal(tokens, 2, 6), normal(tokens, 4, 5)]
    given += [-SPEEDS * normal(tokens, 4).exp(), normal(tokens, 4).sigmoid()]
    compare(
        lambda mine: scan_forest(delta_rule, delta_rule_and_states, DeltaInputs(*mine), forest, VarlenCache()),
        lambda mine: of_whole_documents(token_by_token, mine, forest),
        given,
    )


def check_convolution(forest: PrefixTree, width: int) -> None:
    random, tokens = torch.Generator().manual_seed(0), sum(forest.lengths)
    x_TX, weight_XK = (torch.randn(n, m, generator=random, dtype=torch.float64) for n, m in ((tokens, 5), (5, width)))
    compare(
        lambda mine: convolve_forest(short_convolution, *mine, forest, VarlenCache()),
        lambda mine: of_whole_documents(short_convolution, mine[:1], forest, mine[1]),
        [x_TX, weight_XK],
    )


@pytest.mark.parametrize("forest", FORESTS, ids=str)
def test_a_piece_goes_on_from_the_one_before(forest):
    check_rule(forest)
    for width in (1, 2, 4):
        check_convolution(forest, width)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(forest=forests())
def test_any_forest(forest):
    check_rule(forest)
    check_convolution(forest, 4)


@pytest.mark.parametrize("chunks", [1, 3])
def test_some_chunks_after_the_other(chunks, monkeypatch):
    monkeypatch.setattr(isoloss.parallel.ops.gated_delta, "CACHED_ELEMENTS", chunks * 4 * CHUNK**2)
    check_rule(FORESTS[0])
