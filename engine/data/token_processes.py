"""Tokenize shards by processes, one for each core: the side that starts them. `token_worker` is the other.

A helper process imports transformers once and forks. Its processes write shards into the folder, and to a pipe a line
for each: its index. The pipe's other lines are "end N", the number of shards, and what went wrong.
"""

import json
import os
import sys
from collections.abc import Collection, Iterator
from multiprocessing.connection import wait
from pathlib import Path

from isoloss.engine.data.token_shards import Job
from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

WORKER = "isoloss.engine.data.token_worker"
JOB = "job.json"


class LostProcessError(UserError):
    """A process ended before its work was done, through no mistake in the rows."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shards_of_processes(job: Job, folder: Path, done: Collection[int], processes: int) -> Iterator[int]:
    """Tokenize the shards that are not done, and yield the index of each as soon as its file is whole.

    done: indices of finished shards, to which the caller adds those that are yielded.
    Raises LostProcessError if a process ends before its work, and OSError if the disk refuses.
    """
    values = {"job": job.to_json(), "done": sorted(done), "processes": processes}
    (folder / JOB).write_text(json.dumps(values, default=str))
    answers, written = os.pipe()
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        helper = Helper(
            [sys.executable, "-P", "-m", WORKER, str(folder), str(written)],
            pass_fds=[written],
            env={**environment.of_other_programs(), **settings},
        )
    except BaseException:
        os.close(answers)
        raise
    finally:
        os.close(written)
    try:
        count = None
        for line in _lines(answers, helper):
            word, _, text = line.partition(" ")
            if word == "end":
                count = int(text)
            elif word == "refused":
                raise OSError(text)
            elif word == "ended":
                raise _lost(job, int(text))
            else:
                yield int(word)
        if (status := helper.wait()) != 0 or count is None or len(done) < count:
            raise _lost(job, status)
    finally:
        helper.kill()
        os.close(answers)


def _lines(answers: int, helper: Helper) -> Iterator[str]:
    """Yield the lines of the pipe until its end, or until the helper has ended by a signal."""
    received = b""
    while True:
        if not wait([answers], 1.0):
            if helper.poll() is not None:  # its processes still hold the pipe
                return
            continue
        piece = os.read(answers, 1 << 16)
        if not piece:
            return
        *lines, received = (received + piece).split(b"\n")
        yield from (line.decode() for line in lines)


def _lost(job: Job, status: int) -> LostProcessError:
    """Return the error for a process that ended. status: its exit status, or minus the number of a signal."""
    why = f"by signal {-status}, as when memory runs out" if status < 0 else f"with status {status}"
    return LostProcessError(
        f"{job.key}: a process that tokenized its rows ended {why}: start again, finished parts are kept; taskset -c 0 "
        "makes it one process, which needs the least memory"
    )
