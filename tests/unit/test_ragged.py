"""Index tensors of a packed row's pieces, against lists worked by hand."""

import torch

from isoloss.parallel.ragged import Uploads

CPU = torch.device("cpu")


def test_tokens_starts_and_the_longest():
    ragged = Uploads().ragged([slice(2, 5), slice(7, 8), slice(10, 14)], CPU)
    assert ragged.tokens.tolist() == [2, 3, 4, 7, 10, 11, 12, 13] and ragged.tokens.dtype == torch.int64
    assert ragged.starts.tolist() == [0, 3, 4, 8] and ragged.starts.dtype == torch.int32
    assert ragged.longest == 4


def test_the_same_pieces_are_uploaded_once_and_others_are_others():
    uploads = Uploads()
    first = uploads.ragged([slice(0, 3), slice(3, 4)], CPU)
    assert uploads.ragged((slice(0, 3), slice(3, 4)), CPU) is first
    assert uploads.ragged([slice(0, 2), slice(3, 4)], CPU).tokens.tolist() == [0, 1, 3]
    assert uploads.ragged([slice(0, 3), slice(3, 4)], torch.device("meta")).tokens.is_meta
    assert Uploads().ragged([slice(0, 3), slice(3, 4)], CPU) is not first
