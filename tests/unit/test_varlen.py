"""Compare the arguments of varlen calls for a packed row with lists worked by hand."""

import torch

from isoloss.parallel.ops.mask_blocks import Block
from isoloss.parallel.ops.varlen import Segments, VarlenCache

CPU = torch.device("cpu")
SQUARE = (Block(slice(0, 3), slice(0, 3), right=0), Block(slice(3, 4), slice(3, 4), right=0))


def test_tokens_starts_and_the_longest():
    segments = Segments.of([slice(2, 5), slice(7, 8), slice(10, 14)], 14, CPU)
    assert segments.tokens is not None and segments.tokens.dtype == torch.int64
    assert segments.tokens.tolist() == [2, 3, 4, 7, 10, 11, 12, 13]
    assert segments.starts.tolist() == [0, 3, 4, 8] and segments.starts.dtype == torch.int32
    assert segments.longest == 4


def test_all_tokens_in_order_are_not_gathered():
    whole = torch.arange(14)
    segments = Segments.of([slice(0, 5), slice(5, 14)], 14, CPU)
    assert segments.take(whole) is whole and segments.starts.tolist() == [0, 5, 14]
    assert Segments.of([slice(0, 5), slice(5, 13)], 14, CPU).take(whole).tolist() == list(range(13))
    assert Segments.of([slice(0, 5), slice(6, 14)], 14, CPU).take(whole).tolist() == [*range(5), *range(6, 14)]


def test_a_call_for_every_mask_and_queries_once_in_each():
    """A chunk of queries that sees two chunks of keys under one mask is in two calls."""
    blocks = (
        Block(slice(0, 2), slice(0, 4), left=3),
        Block(slice(0, 2), slice(4, 8), left=3),
        Block(slice(2, 4), slice(0, 4), left=3),
        Block(slice(4, 6), slice(4, 6), right=0),
    )
    calls = VarlenCache().calls(blocks, 6, 8, CPU)
    assert [(call.left, call.right, call.causal) for call in calls] == [(3, -1, False), (3, -1, False), (-1, 0, True)]
    assert [call.queries.take(torch.arange(6)).tolist() for call in calls] == [[0, 1, 2, 3], [0, 1], [4, 5]]
    assert [call.keys.take(torch.arange(8)).tolist() for call in calls] == [[*range(4)] * 2, [4, 5, 6, 7], [4, 5]]


def test_the_same_blocks_are_uploaded_once_and_others_are_others():
    uploads = VarlenCache()
    (first,) = uploads.calls(SQUARE, 4, 4, CPU)
    assert uploads.calls(SQUARE, 4, 4, CPU)[0] is first and first.queries is first.keys
    other = (Block(slice(0, 2), slice(0, 2), right=0), SQUARE[1])
    assert uploads.calls(other, 4, 4, CPU)[0].queries.take(torch.arange(4)).tolist() == [0, 1, 3]
    assert VarlenCache().calls(SQUARE, 4, 4, CPU)[0] is not first
