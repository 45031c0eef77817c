"""Tokenize shards in forked processes; started by `token_processes` as a program of its own.

Forked after the tokenizer is loaded, the processes share its memory. Each reads all rows and tokenizes the shards that
it claims, so that no rows travel between processes.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Collection
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.rows import one_line
from isoloss.engine.data.token_processes import JOB
from isoloss.engine.data.token_shards import Job, rows_by_shard, shard_path, tokenize_shard


def main(folder: Path, answers: int) -> int:
    """Do the job of the folder. answers: descriptor of the pipe. Return the exit status."""
    values = json.loads((folder / JOB).read_text())
    job = Job.from_json(values["job"])
    tokenizer = load_tokenizer(job.tokenizer_dir, job.vocab_size)
    context = multiprocessing.get_context("fork")
    claimed = context.Value("q", -1)
    arguments = (job, folder, set(values["done"]), tokenizer, claimed, answers)
    running = [context.Process(target=tokenize_claimed, args=arguments) for _ in range(values["processes"])]
    for process in running:
        process.start()
    while running:
        wait([process.sentinel for process in running])
        for process in [each for each in running if not each.is_alive()]:
            running.remove(process)
            if process.exitcode:
                for other in running:  # none outlives the report
                    other.kill()
                    other.join()
                os.write(answers, f"ended {process.exitcode}\n".encode())
                return 1
    return 0


def tokenize_claimed(job: Job, folder: Path, done: Collection[int], tokenizer: Any, claimed: Any, answers: int) -> None:
    """Tokenize shards until none is left. claimed: the newest shard that a process has taken, shared by all."""

    def claim() -> int:
        with claimed.get_lock():
            claimed.value += 1
            while claimed.value in done:
                claimed.value += 1
            return claimed.value

    mine, count = claim(), 0
    try:
        for index, rows in rows_by_shard(job):
            count = index + 1
            if index == mine:
                tokenize_shard(rows, job, tokenizer, shard_path(folder, index))
                os.write(answers, f"{index}\n".encode())
                mine = claim()
    except OSError as error:
        os.write(answers, f"refused {one_line(error)}\n".encode())
        return
    os.write(answers, f"end {count}\n".encode())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
