"""A run that goes on for long takes no more memory, files or threads than in its first minutes: make soak.

    cd tests; ../.venv/bin/python -m chaos.soak [--minutes 60] [--kinds sft grpo servers] [--folder DIR]

A real run, one kind after the other, that saves and evaluates after every step. The first quarter is its warm-up. After
it the resident memory of each trainer must not grow by a MiB a minute, by a line fitted to samples, and the median of
its open files and threads must not be more in the last quarter: a save has some for a moment. The status is 1 where one
did.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from chaos import kinds
from chaos.job import Job
from support.runs.waiting import until

KINDS = {"sft": kinds.sft, "grpo": kinds.grpo, "servers": kinds.servers}
EVERY = 2.0  # seconds between samples
MOST_GROWTH = 1.0  # MiB a minute
MIB = 1 << 20


@dataclass(frozen=True)
class Usage:
    """Of one process. minute: since the first sample."""

    minute: float
    mib: float
    files: int
    threads: int


def usage(process: psutil.Process, minute: float) -> Usage:
    return Usage(minute, process.memory_info().rss / MIB, process.num_fds(), process.num_threads())


def growth(samples: Sequence[Usage]) -> float:
    """MiB a minute, of the line that fits best."""
    return float(np.polyfit([each.minute for each in samples], [each.mib for each in samples], 1)[0])


def problems(samples: Sequence[Usage]) -> list[str]:
    """What grew after the warm-up."""
    settled = samples[len(samples) // 4 :]
    first, last = settled[: len(settled) // 2], settled[-max(1, len(settled) // 4) :]
    found = []
    if (mib := growth(settled)) >= MOST_GROWTH:
        found.append(f"memory grew by {mib:.2f} MiB a minute")
    for name in ("files", "threads"):
        before, after = (np.median([getattr(each, name) for each in part]) for part in (first, last))
        if after > before:
            found.append(f"{name} grew from {before:g} to {after:g}")
    return found


def soak(kind: str, minutes: float, folder: Path) -> bool:
    """Whether nothing grew; tells a line for each trainer."""
    job = Job(KINDS[kind](kinds.write_inputs(folder / "inputs")), folder / kind, 10_000_000, keep=2)
    try:
        job.start()
        until(lambda: job.done() >= 2, "two steps were done", lambda: job.alive)
        samples: dict[psutil.Process, list[Usage]] = {rank: [] for rank in job.ranks()}
        started = time.monotonic()
        while (minute := (time.monotonic() - started) / 60) < minutes:
            for rank, of_rank in samples.items():
                of_rank.append(usage(rank, minute))
            time.sleep(EVERY)
        steps = job.done()
        job.trainers()[0].send_signal(signal.SIGTERM)  # torchrun, if it is there: it would start its ranks again
        job.wait()
        job.gone()
    finally:
        job.end()
    grew = False
    for number, of_rank in enumerate(samples.values()):
        settled, wrong = of_rank[len(of_rank) // 4 :], problems(of_rank)
        grew |= bool(wrong)
        print(
            f"{job.kind.name}, trainer {number}: {minutes:g} minutes, {steps} steps, {of_rank[-1].mib:.0f} MiB, "
            f"{growth(settled):+.3f} MiB a minute, {of_rank[-1].files} files, {of_rank[-1].threads} threads: "
            f"{'; '.join(wrong) or 'flat'}",
            flush=True,
        )
    return not grew


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["grpo"])
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="isoloss-soak-") as temporary:
        folder = options.folder or Path(temporary)
        flat = []
        for kind in options.kinds:
            (folder / f"soak-{kind}").mkdir(parents=True)
            flat.append(soak(kind, options.minutes, folder / f"soak-{kind}"))
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
