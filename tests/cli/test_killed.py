"""A rank that is killed ends its job, and what reads the job's output comes to the end of it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from support.runs.runs import typed
from support.runs.waiting import LONG, until


def test_the_output_of_a_job_ends_with_a_rank_that_is_killed_after_a_checkpoint(arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "0"]
    options = typed(*arguments, "train.steps=1000000", "checkpoint.every=1")
    job = subprocess.Popen(
        [*command, "-m", "isoloss.recipes.sft", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # so that what is left can be found
    )
    try:
        saved = lambda: list(Path("out").glob("checkpoints/step_*"))
        until(saved, "a checkpoint was there", lambda: job.poll() is None)
        (rank,) = psutil.Process(job.pid).children()
        assert rank.children(recursive=True) == []
        os.kill(rank.pid, signal.SIGKILL)
        said, _ = job.communicate(timeout=LONG)  # to the end of the pipe
        assert job.returncode == 1 and b"SIGKILL" in said
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(job.pid, signal.SIGKILL)
