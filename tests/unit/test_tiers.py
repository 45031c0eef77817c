"""Tests that share something expensive run in one process, and no row is called quick that is not run."""

import os
from types import SimpleNamespace

import pytest
from support.suite.tiers import group_of, mark


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="nothing is shared out where one process runs all")
@pytest.mark.xdist_group("one worker")
def test_pytest_xdist_sees_the_groups(request):
    """It sends a group to one worker where the ids of its tests end with the name, and ignores it in silence where a
    newer pytest keeps them from it: every claim still passes then, and takes minutes longer."""
    assert request.node.nodeid.endswith("@one worker")


def test_a_test_that_names_its_group_is_in_no_other():
    def group(*marked: str) -> str | None:
        get = lambda name: name if name in marked else None
        return group_of(SimpleNamespace(nodeid="tests/a.py::b", fixturenames=["pool"], get_closest_marker=get))

    assert group() == "tests/a.py" and group("xdist_group") is None


def test_a_pattern_that_makes_nothing_quick_is_told():
    def item(row: str, *markers: str) -> SimpleNamespace:
        marked = list(markers)
        add, get = lambda marker: marked.append(marker.name), lambda name: name if name in marked else None
        return SimpleNamespace(nodeid=f"tests/a.py::test_b[{row}]", add_marker=add, get_closest_marker=get, all=marked)

    items = [item("tp2"), item("pp2"), item("tp4", "slow"), item("pp4", "slow")]
    rows = {"a.py": {"test_b": "tp* pp4 ring2", "test_c": "", "test_d": "1"}, "b.py": {"test_e": ""}}
    assert mark(items, rows, pytest.mark.full) == [
        "a.py::test_b[pp4] matches slow rows only",
        "a.py::test_b[ring2] matches nothing",
        "a.py::test_c matches nothing",
        "a.py::test_d matches nothing",
        "a.py::test_d[1] matches nothing",
    ]
    assert [item.all for item in items] == [[], ["full"], ["slow"], ["slow"]]
