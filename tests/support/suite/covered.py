"""Coverage of the ranks of pools. A pool kills them, at its end and wherever one of them fails, before they could write
what they saw: while coverage is measured, they are asked to end first."""

import sys
from unittest import mock

from isoloss.tools.prove.rank_pool import RankWorker, WorkerPool

SECONDS = 5.0  # to write; a rank that hangs in a collective never does
kill = WorkerPool._stop_worker


def measure_ranks() -> None:
    """Of every pool that this process makes from now on; nothing where coverage is not measured."""
    if "coverage" in sys.modules:
        mock.patch.object(WorkerPool, "_stop_worker", staticmethod(end_worker)).start()


def end_worker(worker: RankWorker) -> None:
    worker.process.terminate()
    worker.process.join(SECONDS)
    kill(worker)
