"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from isoloss.tools.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight ranks at most, started when a test first needs them and kept to the end of the session.

    What they run must be importable by name: put it into `tests/worlds`.
    """
    with WorkerPool(8) as workers:
        yield workers
