"""What runs where under pytest-xdist: expensive things are made once, and what is short fills the gaps."""

import pytest

# Fixtures that are made once a session at great cost, and the group of those who use one: it goes to one worker.
SHARED = {"sorter": "sorter", "te_pool": "te_pool", "service": "servers", "model_folder": "servers"}


def group_of(item: pytest.Item) -> str | None:
    """The xdist group of a test: that of a shared fixture; its file where it uses ranks, since references are kept a
    file; none where it needs nothing, so that any worker takes it."""
    names = getattr(item, "fixturenames", ())
    file = item.nodeid.partition("::")[0]
    for fixture, group in SHARED.items():
        if fixture in names:
            return group
    return file if "pool" in names else None


class Schedule:
    """Groups first, in the order of the files; then the tests that any worker takes."""

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        groups = {item: group_of(item) for item in items}
        for item, group in groups.items():
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(group))
        items.sort(key=lambda item: groups[item] is None)
