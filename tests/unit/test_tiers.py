"""Tests that share something expensive run in one process, and no row is called quick that is not run."""

import os
from types import SimpleNamespace

import pytest
from support.suite.tiers import Patterns, group_of, mark, named_by_mutants, not_run, other_shares


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


def rows(*names: str) -> list[SimpleNamespace]:
    """Of tests/a.py; a name that ends with ! is marked slow where it stands."""

    def row(name: str) -> SimpleNamespace:
        marked = ["slow"] if name.endswith("!") else []
        add, get = lambda marker: marked.append(marker.name), lambda name: name if name in marked else None
        return SimpleNamespace(
            nodeid=f"tests/a.py::{name.removesuffix('!')}", add_marker=add, get_closest_marker=get, marked=marked
        )

    return [row(name) for name in names]


def test_what_is_not_quick_is_in_ci_where_a_mutant_names_it():
    items = rows("b[1]", "b[2]", "b[3]", "b[4]", "c[1]", "c[2]", "d[1]", "d[2]", "e", "f[1]!", "f[2]", "g[1]")
    quick = Patterns({"a.py": {"b": "1", "c": "", "d": "", "e": "", "f": ""}})
    full = Patterns({"a.py": {"b": "4"}})
    mark(items, quick, full, {"tests/a.py::b[2]", "tests/a.py::d[2]", "tests/a.py::g[1]"})
    assert {item.nodeid.partition("::")[2]: item.marked for item in items} == {
        "b[1]": [],
        "b[2]": ["full"],  # of a mutant
        "b[3]": ["slow"],
        "b[4]": ["full"],  # of the table
        "c[1]": ["full"],  # the test has no other
        "c[2]": ["slow"],
        "d[1]": ["slow"],
        "d[2]": ["full"],
        "e": ["full"],
        "f[1]": ["slow"],
        "f[2]": ["full"],
        "g[1]": [],
    }
    assert quick.in_vain(["a.py"]) == full.in_vain(["a.py"]) == []


def test_a_pattern_that_makes_nothing_quick_is_told():
    quick = Patterns({"a.py": {"b": "tp* pp4 ring2", "c": "", "d": "1"}, "b.py": {"e": ""}})
    mark(rows("b[tp2]", "b[pp2]", "b[tp4]!", "b[pp4]!"), quick, Patterns({}), ())
    assert quick.in_vain(["a.py"]) == [
        "a.py::b[pp4] matches slow rows only",
        "a.py::b[ring2] matches nothing",
        "a.py::c matches nothing",
        "a.py::d matches nothing",
        "a.py::d[1] matches nothing",
    ]
    assert quick.in_vain(["b.py"]) == ["b.py::e matches nothing"]


def test_a_row_that_a_mutant_names_and_that_never_runs_is_told():
    """A row that was renamed, or that only `make prove-all` runs, notices nothing."""
    items = rows("b[1]", "b[2]!", "c!", "d")
    good = ["tests/a.py", "tests/a.py::b", "tests/a.py::b[1]", "tests/a.py::d", "tests/unit/test_tiers.py::other file"]
    bad = ["tests/a.py::b[2]", "tests/a.py::b[3]", "tests/a.py::c", "tests/no_such_file.py"]
    assert not_run(items, [*good, *bad]) == bad


def test_names_of_mutants_are_read():
    named = named_by_mutants()
    assert len(named) > 300 and all(name.startswith("tests/") for name in named)


def test_shares_of_the_full_rows_are_all_of_them():
    items = rows(*(f"b[{k}]" for k in range(60)))
    mark(items, Patterns({"a.py": {"b": "[0-9]"}}), Patterns({"a.py": {"b": "*"}}), set())
    run = [[item for item in items if item not in other_shares(items, f"{k}/3")] for k in (1, 2, 3)]
    assert all(len(share) > 20 for share in run)  # ten quick rows each
    assert sum(sum("full" in item.marked for item in share) for share in run) == 50
    assert {item.nodeid for share in run for item in share} == {item.nodeid for item in items}
    assert other_shares(items, "1/1") == []
    with pytest.raises(pytest.UsageError, match="--share=4/3"):
        other_shares(items, "4/3")
