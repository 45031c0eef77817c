"""Which rows of a table the tests of this session ask for: where all are made at once, and each takes seconds."""

from typing import Any

import pytest


def asked_for(request: pytest.FixtureRequest) -> set[Any]:
    """Values of the parameters of the tests that were collected of the file of this fixture's test."""
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {value for item in mine for value in item.callspec.params.values()}  # pyright: ignore[reportAttributeAccessIssue]
