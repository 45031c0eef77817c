"""Tests that share something expensive run in one process."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="nothing is shared out where one process runs all")
@pytest.mark.xdist_group("one worker")
def test_pytest_xdist_sees_the_groups(request):
    """It sends a group to one worker where the ids of its tests end with the name, and ignores it in silence where a
    newer pytest keeps them from it: every claim still passes then, and takes minutes longer."""
    assert request.node.nodeid.endswith("@one worker")
