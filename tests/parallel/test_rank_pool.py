"""The pool of ranks: whose result is whose, which processes stay, and what becomes of a worker that is gone."""

import os
import re
import signal
import time

import pytest
import torch
from support.ranks import groups
from support.runs import training

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig
from isoloss.tools.prove.parity import freeze
from isoloss.tools.prove.rank_pool import MAX_THREADS, WorkerError, WorkerPool


def test_a_rank_outlives_its_distributed_optimizers(pool, inputs):
    """Each holds eighteen process groups with three threads each, in a cycle that Python cannot collect."""
    config = Config(ModelConfig(f"{inputs}/model", from_scratch=True), batch=BatchConfig(max_tokens=64))
    tokens = torch.arange(1, 40)
    frozen = freeze([Sample(tokens, tokens > 3)])
    assert config.distributed_optimizer and MAX_THREADS < 3 * 18 * 3
    before = pool.run(1, os.getpid)
    for _ in range(3):
        pool.run(1, training.steps, config, frozen, 1)
    assert pool.run(1, os.getpid) == before


class Interrupted(Exception):
    pass


def test_a_run_that_is_cut_short_does_not_answer_the_next():
    def interrupt(*_):
        raise Interrupted

    usual = signal.signal(signal.SIGALRM, interrupt)  # as pytest's time limit does, which is off for so long
    limit = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with WorkerPool(1) as pool:
            pool.run(1, os.getpid)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                pool.run(1, time.sleep, 3)  # its answer, if it came, would be taken for the next one
            assert pool.run(1, os.path.basename, "a/b") == ["b"]
    finally:
        signal.signal(signal.SIGALRM, usual)
        signal.setitimer(signal.ITIMER_REAL, *limit)


def test_results_are_in_the_order_of_the_ranks(pool):
    """Whoever ends first."""
    assert pool.run(3, groups.last_rank_first) == [0, 1, 2]


def test_a_worker_whose_child_outlives_it_is_replaced():
    """The child holds what the worker had open, and nothing that others need ends for that."""
    with WorkerPool(2) as pool:
        (child, server), _ = pool.run(2, groups.leave_a_child)
        try:
            os.kill(pool._workers[0].process.pid, signal.SIGKILL)
            pool._workers[0].process.join()
            assert pool.run(2, os.getppid) == [server, server]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_was_killed_is_replaced():
    with WorkerPool(2) as pool:
        before = pool.run(2, os.getpid)
        os.kill(before[1], signal.SIGKILL)
        pool._workers[1].process.join()
        after = pool.run(2, os.getpid)
    assert after[0] == before[0] and after[1] != before[1]


def test_a_world_that_hangs_tells_where_each_rank_is():
    """Rank 0 waits for the others in a collective, which is C; rank 1 sleeps; rank 2 is stopped."""
    with WorkerPool(3, silence=1.0, caller=lambda: "in my test") as pool:
        with pytest.raises(WorkerError) as raised:
            pool.run(3, groups.meet_without, 1)
        headline, waits, sleeps, stopped = re.split(r"^rank \d of 3:\n", str(raised.value), flags=re.M)
        assert (
            headline == "support.ranks.groups.meet_without hangs: no rank answered or worked for 1 seconds in my test\n"
        )
        assert " in barrier\n" in waits and " in meet_without\n" in waits
        assert " in barrier\n" not in sleeps and " in meet_without\n" in sleeps
        assert stopped == "it is stopped or gone\n"
        assert pool.run(3, groups.last_rank_first) == [0, 1, 2]


def test_a_computation_may_take_longer_than_silence():
    """On one rank, and then in a process that it started; the other waits."""
    with WorkerPool(2, silence=0.5) as pool:
        assert pool.run(2, groups.work_on_one_rank, 1.0) == [0, 1]
