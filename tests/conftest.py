"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from isoloss.parallel import launch, mesh
from isoloss.tools.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight ranks at most, started when a test first needs them and kept to the end of the session.

    What they run must be importable by name: put it into `tests/worlds`.
    """
    with WorkerPool(8) as workers:
        yield workers


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone, left again after the test."""
    launch.init_process_group()
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    mesh.destroy()
    dist.destroy_process_group()
