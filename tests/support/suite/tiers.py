"""Which tests are quick, and what runs where under pytest-xdist: expensive things are made once, and what is short
fills the gaps."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from support.suite.rows import FULL, QUICK

TESTS = Path(__file__).parents[2]

# Fixtures that are made once a session at great cost, and the group of those who use one: it goes to one worker.
SHARED = {"sorter": "sorter", "te_pool": "te_pool", "service": "servers", "model_folder": "servers"}
# What is made once a file: ranks, whose references are kept a file, whole runs and conversions, and an installation.
ONCE_A_FILE = {
    "pool", "killed", "pairs", "plain", "run", "undisturbed", "outcomes", "reports", "planned", "refusals", "installed",
}  # fmt: skip
# Of tests that `make test-all` leaves out.
ELSEWHERE = ("slow", "sglang", "docs", "gpu")


def group_of(item: pytest.Item) -> str | None:
    """The xdist group of a test: that of a shared fixture; its file where that makes something once; none where it
    needs nothing, so that any worker takes it. Returns None, too, if the test is marked with a group of its own."""
    if item.get_closest_marker("xdist_group"):
        return None
    names = getattr(item, "fixturenames", ())
    file = item.nodeid.partition("::")[0]
    for fixture, group in SHARED.items():
        if fixture in names:
            return group
    return None if ONCE_A_FILE.isdisjoint(names) else file


def parts(item: pytest.Item) -> tuple[str, str, str]:
    """The file of a row below tests/, its function, and its id."""
    file, _, name = item.nodeid.removeprefix("tests/").partition("::")
    function, _, row = name.removesuffix("]").partition("[")
    return file, function, row


class Patterns:
    """A table of rows.py, and which of its names and patterns no row has matched yet."""

    def __init__(self, table: Mapping[str, Mapping[str, str]]) -> None:
        self._table = table
        self._unmatched = {
            (file, test): dict.fromkeys(["", *patterns.split()], "matches nothing")
            for file, tests in table.items()
            for test, patterns in tests.items()
        }

    def keep(self, item: pytest.Item) -> bool | None:
        """Whether a pattern matches the row; None where the table does not name its test."""
        file, function, row = parts(item)
        kept = None
        for test, patterns in self._table.get(file, {}).items():
            if fnmatchcase(function, test) and (row or test != "*"):
                matched = {pattern for pattern in patterns.split() if fnmatchcase(row, pattern)}
                unmatched = self._unmatched[file, test]
                unmatched.pop("", None)
                for pattern in matched & unmatched.keys():
                    if item.get_closest_marker("slow"):
                        unmatched[pattern] = "matches slow rows only"
                    else:
                        del unmatched[pattern]
                kept = bool(kept or matched)
        return kept

    def in_vain(self, files: Collection[str]) -> list[str]:
        """A line for each name and pattern of these files that no row has matched."""
        return [
            f"{file}::{test}{pattern and f'[{pattern}]'} {why}"
            for (file, test), found in self._unmatched.items()
            if file in files
            for pattern, why in found.items()
        ]


def mark(items: Sequence[pytest.Item], quick: Patterns, full: Patterns, named: Collection[str]) -> None:
    """Marks the rows that `quick` leaves out: `full` where a mutant (`named`) or the table `full` names the row, and
    the first row of a test that would have none; `slow` the others."""
    left_out: dict[tuple[str, str], list[pytest.Item]] = {}
    with_rows: set[tuple[str, str]] = set()
    for item in items:
        test, kept, also = parts(item)[:2], quick.keep(item), full.keep(item)
        if item.get_closest_marker("slow"):
            continue
        if kept is not False:
            with_rows.add(test)
        elif also or item.nodeid in named:
            with_rows.add(test)
            item.add_marker(pytest.mark.full)
        else:
            left_out.setdefault(test, []).append(item)
    for test, rows in left_out.items():
        for item in rows:
            alone = item is rows[0] and test not in with_rows
            item.add_marker(pytest.mark.full if alone else pytest.mark.slow)


@cache
def named_by_mutants() -> frozenset[str]:
    """The tests that the catalogue of mutants names: each is the one, or one of the few, that must notice a bug."""
    catalogue = (tomllib.loads(path.read_text()) for path in (TESTS / "mutants").glob("*.toml"))
    return frozenset(name for file in catalogue for mutant in file["mutant"] for name in mutant["tests"])


def not_run(items: Sequence[pytest.Item], named: Collection[str]) -> list[str]:
    """Of what mutants name in the files of these rows: what `make test-all` does not run, or what is not there."""
    files = {item.nodeid.partition("::")[0] for item in items}
    run = {item.nodeid for item in items if not any(map(item.get_closest_marker, ELSEWHERE))}
    run |= {row.partition("[")[0] for row in run} | {row.partition("::")[0] for row in run}
    there = files | {
        name.partition("::")[0] for name in named if not (TESTS.parent / name.partition("::")[0]).is_file()
    }
    return sorted(name for name in named if name not in run and name.partition("::")[0] in there)


def other_shares(items: Sequence[pytest.Item], share: str) -> list[pytest.Item]:
    """The full rows that a share, such as 2/3, leaves to the others. Raises UsageError where it is none."""
    number, _, count = share.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share={share}: give one of the shares, such as 2/3")
    full = (item for item in items if item.get_closest_marker("full"))
    return [item for item in full if crc32(item.nodeid.encode()) % int(count) != int(number) - 1]


class Schedule:
    """Groups first, in the order of the files; then the tests that any worker takes."""

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the markers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        quick, full = Patterns(QUICK), Patterns(FULL)
        named = named_by_mutants()
        mark(items, quick, full, named)
        files = {parts(item)[0] for item in items}
        in_vain = [*quick.in_vain(files), *full.in_vain(files)]
        in_vain += [f"{file}, which is not there" for file in {**QUICK, **FULL} if not (TESTS / file).is_file()]
        in_vain += [
            f"{file}::{test} of FULL" for file in FULL for test in FULL[file] if test not in QUICK.get(file, {})
        ]
        if not any("::" in argument for argument in config.args):
            if in_vain:
                raise pytest.UsageError(f"tests/support/suite/rows.py names tests in vain: {'; '.join(in_vain)}")
            if missing := not_run(items, named):
                raise pytest.UsageError(f"mutants name tests that make test-all does not run: {'; '.join(missing)}")
        others = set(other_shares(items, config.getoption("share")))
        if others:
            config.hook.pytest_deselected(items=[*others])
            items[:] = [item for item in items if item not in others]
        groups = {item: group_of(item) for item in items}
        for item, group in groups.items():
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(group))
        items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
