"""The pool of ranks: whose result is whose, and what becomes of a worker that is gone."""

import os
import signal

from support import groups

from isoloss.tools.pool import WorkerPool


def test_results_are_in_the_order_of_the_ranks(pool):
    """Whoever ends first."""
    assert pool.run(3, groups.last_rank_first) == [0, 1, 2]


def test_a_worker_that_was_killed_is_replaced():
    with WorkerPool(2) as pool:
        before = pool.run(2, os.getpid)
        os.kill(before[1], signal.SIGKILL)
        pool._workers[1].process.join()
        after = pool.run(2, os.getpid)
    assert after[0] == before[0] and after[1] != before[1]
