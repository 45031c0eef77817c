"""Which ranks are in which group, against a grid of rank numbers; and what a layout asks of rows and micro-batches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.ranks import groups

from isoloss.parallel import Layout, Mesh
from isoloss.parallel.schedule import run_schedule

# Axes of the grid of ranks, the slowest first: neighbours in tp have consecutive ranks.
GRID = ("pp", "dp", "ring", "ulysses", "tp")
SPANS = {
    "tp": ("tp",), "pp": ("pp",), "ulysses": ("ulysses",), "ring": ("ring",), "dp": ("dp",),
    "context": ("ring", "ulysses"), "dp_context": ("dp", "ring", "ulysses"), "stage": ("pp", "tp"),
}  # fmt: skip


def expected(layout: Layout, axis: str, rank: int) -> list[int]:
    """The ranks that differ from `rank` along the axes which the group spans, and along no other."""
    sizes = [getattr(layout, each) for each in GRID]
    ranks = np.arange(layout.world_size).reshape(sizes)
    here = np.argwhere(ranks == rank)[0]
    return ranks[tuple(slice(None) if each in SPANS[axis] else at for each, at in zip(GRID, here))].flatten().tolist()


@pytest.mark.parametrize("text", ("ulysses2+ring4", "tp2+pp2+ulysses2", "tp2+ring2+dp2", "ulysses3+dp2", "pp2+ring3"))
def test_groups_are_those_of_the_grid(pool, text):
    layout = Layout.parse(text)
    for rank, found in enumerate(pool.run(layout.world_size, groups.members, layout)):
        assert {axis: found[axis] for axis in SPANS} == {axis: expected(layout, axis, rank) for axis in SPANS}, rank


def test_experts_are_divided_within_a_stage(pool):
    """Four ranks, worked by hand: neighbours divide the experts, and every second rank holds the same ones."""
    of_ranks = pool.run(4, groups.members, Layout.parse("ep2+dp4"))
    assert [found["ep"] for found in of_ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["expert_dp"] for found in of_ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["etp"] for found in of_ranks] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("text", "stage", "world", "losses"),
    [
        ("tp2+dp2", "tp", True, ["dp_context"]),
        ("pp2+ring2", "pp", False, ["dp_context", "pp"]),
        ("tp2+pp2", None, False, ["pp"]),
        ("tp2+pp2+dp2", None, False, ["dp_context", "pp"]),
    ],
)
def test_scalars_go_over_groups_that_are_there_anyway(pool, text, stage, world, losses):
    """On GPUs every group that is used is a communicator with buffers."""
    layout = Layout.parse(text)
    assert set(map(repr, pool.run(layout.world_size, groups.for_scalars, layout))) == {repr((stage, world, losses))}


def fake_mesh(text: str, cp_kernel: str = "isoloss") -> Any:
    return Mesh(Layout.parse(text), *[SimpleNamespace()] * 12, cp_kernel=cp_kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kernel", "document", "row"),
    [
        ("1", "isoloss", 1, 1),
        ("tp2+ulysses2", "isoloss", 1, 4),
        ("tp2+ulysses2+nosp", "isoloss", 1, 2),
        ("tp4+ring3", "isoloss", 1, 12),
        ("ring2", "p2p", 4, 4),
        ("tp3+ring2", "p2p", 4, 12),
        ("tp2", "p2p", 1, 2),
    ],
)
def test_rows_are_padded_to_what_divides_over_the_ranks(text, kernel, document, row):
    mesh = fake_mesh(text, kernel)
    assert (mesh.document_multiple, mesh.row_multiple) == (document, row)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_interleaved_schedule_refuses_what_does_not_divide(count):
    def never(*_):
        raise AssertionError

    with pytest.raises(ValueError, match=rf"multiple of pp=2 micro-batches, not {count}"):
        run_schedule(fake_mesh("pp2+vpp2"), [], list(range(count)), [4] * count, never, never)


@pytest.mark.parametrize(
    ("text", "from_prev", "from_next"),
    [
        ("pp2", [[], [0, 1, 2, 3]], [[0, 1, 2, 3], []]),
        ("tp2+pp2", [[], [], [0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 1, 2, 3], [], []]),
        # Two micro-batches go through the first chunks, then through the second ones. The first stage has made what its
        # first chunk gets, the last one what its last gives.
        ("pp2+vpp2", [[0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3]], [[0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_stages_know_what_they_are_sent(pool, text, from_prev, from_next):
    """Worked by hand, of four micro-batches of other lengths. A stage sends as often to a neighbour as it hears of it,
    and what is not as long as planned is not sent."""
    layout, rows = Layout.parse(text), [8, 24, 16, 4]
    for rank, found in enumerate(pool.run(layout.world_size, groups.planned_messages, layout, rows)):
        wanted = [[[rows[k] // layout.tp, 1, 5] for k in order[rank]] for order in (from_prev, from_next)]
        assert found == ([wanted[0], wanted[0], wanted[1], wanted[1]], True), rank


def test_shares_of_different_sizes_reach_their_ranks(pool):
    """On a CPU, where gloo wants equal ones. Rank r's sum is over ranks s of 100^s (r + 1): 10101 (r + 1) of three."""
    for rank, (gathered, summed) in enumerate(pool.run(3, groups.uneven_shares)):
        assert gathered == [[10.0], [11.0, 11.0], [12.0, 12.0, 12.0]]
        assert summed == [10101.0 * (rank + 1)] * (rank + 1)
