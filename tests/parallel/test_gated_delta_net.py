"""A layer of Gated DeltaNet on context and TP ranks is the layer on one rank: output and every gradient, in fp64."""

import pytest
import torch
from support.models.gated_delta import architecture, exchanged, on_slices, random_case, whole_of

from isoloss.parallel import Layout

LENGTHS = (37, 1, 151, 3, 2, 70, 24)  # 288: documents of several chunks, and shorter than the convolution
LAYOUTS = {
    "ring2": Layout(ring=2),
    "ring3": Layout(ring=3),
    "ring4": Layout(ring=4),
    "ulysses2": Layout(ulysses=2),
    "ulysses2+ring2": Layout(ulysses=2, ring=2),
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "tp2+ring2": Layout(tp=2, ring=2),
    "tp2+sp+ulysses2": Layout(tp=2, sequence_parallel=True, ulysses=2),
}


def compare(pool, layout: Layout, **changes) -> None:
    heads = {"key_heads": 3, "value_heads": 6} if layout.ring == 3 else {"key_heads": 4, "value_heads": 8}
    if layout.context == 4:
        heads["key_heads"] = 2  # repeated: four ranks have two
    case = random_case(LENGTHS, architecture(**heads), 0, **changes)
    wanted = whole_of(pool.run(1, on_slices, case, Layout()), Layout())
    found = whole_of(pool.run(layout.world_size, on_slices, case, layout), layout)
    for name, a, b in (("output", found[0], wanted[0]), ("hidden", found[1], wanted[1])):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert found[2].keys() == wanted[2].keys()
    for name, grad in wanted[2].items():
        torch.testing.assert_close(found[2][name], grad, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", [Layout(ring=3), Layout(ulysses=2), Layout(ulysses=2, ring=2)], ids=str)
def test_whole_rows_of_a_share_of_the_heads(pool, layout):
    """In the order of the row, share r of every part on rank r; there and back is nothing; and what is sent: of each
    token, all channels but the rank's own share forth, and those of what goes back."""
    lengths, ranks = (25, 1, 34), layout.context
    widths = (2 * ranks, ranks, 3 * ranks)
    for rank, (whole, same, sent) in enumerate(pool.run(ranks, exchanged, lengths, layout, widths)):
        shares = [first + torch.arange(width).chunk(ranks)[rank] for first, width in zip((0, *widths), widths)]
        shares[2] += widths[0]
        assert whole.equal((torch.arange(60)[:, None] * 1000 + torch.cat(shares)).double())
        assert same
        tokens, others = 60 // ranks, ranks - 1
        forth, back = (8 * tokens * width // ranks * others for width in (sum(widths), widths[2]))
        assert sent == [forth, back, back, forth]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_are_one_rank(pool, layout):
    compare(pool, layout)


def test_recomputed_on_ranks(pool):
    compare(pool, Layout(tp=2, ulysses=2), recompute=True)
