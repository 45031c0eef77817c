"""Which tests are quick, and what runs where under pytest-xdist: expensive things are made once, and what is short
fills the gaps."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from support.suite.rows import ORDINARY, QUICK

TESTS = Path(__file__).parents[2]

# Fixtures that are made once a session at great cost, and the group of those who use one: it goes to one worker.
SHARED = {"sorter": "sorter", "te_pool": "te_pool", "service": "servers", "model_folder": "servers"}
# What is made once a file: ranks, whose references are kept a file, and whole runs and conversions.
ONCE_A_FILE = {"pool", "killed", "pairs", "plain", "run", "undisturbed", "outcomes", "reports", "planned"}


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


def mark(items: list[pytest.Item], rows: Mapping[str, Mapping[str, str]], marker: pytest.MarkDecorator) -> list[str]:
    """Marks what `rows` leaves out; returns what it names in vain: what no test of these files has, and patterns of
    slow rows alone."""
    in_vain: dict[tuple[str, str], dict[str, str]] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        for test, patterns in rows.get(file, {}).items():
            function, _, row = name.removesuffix("]").partition("[")
            found = in_vain.setdefault((file, test), dict.fromkeys(["", *patterns.split()], "matches nothing"))
            if fnmatchcase(function, test) and (row or test != "*"):
                matched = {pattern for pattern in patterns.split() if fnmatchcase(row, pattern)}
                found.pop("", None)
                for pattern in matched & found.keys():
                    if item.get_closest_marker("slow"):
                        found[pattern] = "matches slow rows only"
                    else:
                        del found[pattern]
                if not matched:
                    item.add_marker(marker)
    return [
        f"{file}::{test}{pattern and f'[{pattern}]'} {why}"
        for (file, test), found in in_vain.items()
        for pattern, why in found.items()
    ]


class Schedule:
    """Groups first, in the order of the files; then the tests that any worker takes."""

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the markers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        # The slow ones first: a row that is slow cannot be quick.
        in_vain = [*mark(items, ORDINARY, pytest.mark.slow), *mark(items, QUICK, pytest.mark.full)]
        in_vain += [f"{file}, which is not there" for file in {**ORDINARY, **QUICK} if not (TESTS / file).is_file()]
        if in_vain and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"tests/support/suite/rows.py names tests in vain: {'; '.join(in_vain)}")
        groups = {item: group_of(item) for item in items}
        for item, group in groups.items():
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(group))
        items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
