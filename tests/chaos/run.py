"""Starts real runs, disturbs them at enumerated and at random moments, and checks them after each time: make chaos.

    cd tests; ../.venv/bin/python -m chaos.run [--seed 0] [--kinds sft grpo servers ahead sglang tests] [--minutes 18]

A kind of run is run once undisturbed, and once with everything that `chaos.disturbances` does to it, in an order that
the seed decides. Both must end alike. The last lines are a table, and what failed; the status is 1 where something did.
A real SGLang server takes part where `make test-sglang` has installed one. Beside them run the tests that go through
every operation of a save, every phase of a step, and hundreds of faults.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos import checks, disturbances, kinds
from chaos.disturbances import Row
from chaos.job import TESTS, Job, Kind
from support.faults.small_disk import small_disk
from support.servers.server_commands import SGLANG_PYTHON

KINDS: dict[str, Callable[[Path], Kind]] = {
    "sft": kinds.sft,
    "grpo": kinds.grpo,
    "servers": kinds.servers,
    "ahead": kinds.ahead,
    "sglang": kinds.sglang,
}
FAULTS = (
    "checkpoints/test_disk_faults.py", "checkpoints/test_hostile_checkpoints.py", "checkpoints/test_resume.py",
    "cli/test_elastic.py", "cli/test_hang.py", "cli/test_silent_trouble.py", "rl/test_reward.py",
    "rl/test_rl_phases.py", "sglang/test_campaign.py", "sglang/test_lies.py", "sglang/test_survival.py",
    "unit/test_bad_rows.py", "unit/test_hostile_files.py",
)  # fmt: skip
# But for those of `test_resume` that go from layout to layout, of which nothing is disturbed.
PYTEST = (
    "-m", "pytest", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-m", "not sglang",
    "-k", "not resume_is_exact and not another_layout",
)  # fmt: skip
ALL = [name for name in (*KINDS, "tests") if name != "sglang" or SGLANG_PYTHON.exists()]
# Steps that a disturbance takes at most, on the average: until its moment comes, and to see that the run goes on.
STEPS_EACH = 2
KEEP = 2
SECONDS_TO_END = 60.0  # of a run, once nothing more is done to it


@dataclass(frozen=True)
class Outcome:
    """ended: what the run came to, or what was wrong."""

    kind: str
    name: str
    which: str
    ended: str
    seconds: float
    failed: bool


class Running:
    """What has been started and is to be ended if we are."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.over = threading.Event()

    def end(self) -> None:
        self.over.set()
        for job in self.jobs:
            job.end()


def tests(folder: Path, running: Running) -> list[Outcome]:
    """The tests of faults, in processes of their own; what they say is printed where one fails."""
    started, said = time.monotonic(), folder / "said"
    command = [sys.executable, *PYTEST, *(str(TESTS / name) for name in FAULTS)]
    with said.open("w") as output, subprocess.Popen(command, cwd=TESTS.parent, stdout=output, stderr=output) as process:
        while process.poll() is None:
            if running.over.wait(0.2):
                process.terminate()
    lines = said.read_text(errors="replace").splitlines()
    if process.returncode:
        print(*lines[-100:], sep="\n", flush=True)
    last = next(
        (line for line in reversed(lines) if " passed" in line or " failed" in line), f"status {process.returncode}"
    )
    return [Outcome("tests of faults", "", "", last, time.monotonic() - started, bool(process.returncode))]


def disturb(
    kind: Kind, rows: Sequence[Row], seed: int, folder: Path, seconds: float, running: Running
) -> list[Outcome]:
    """One run with these disturbances, in an order of chance, of which the last are left out when time is up. Its
    outcomes; the last is the end of the run."""
    deadline = time.monotonic() + seconds
    chance = Random(f"{seed} {kind.name}")
    planned = [row for row in rows for _ in range(row.times)]
    chance.shuffle(planned)
    steps = STEPS_EACH * len(planned) + 8
    whole, job = (Job(kind, folder / name, steps, KEEP) for name in ("undisturbed", "disturbed"))
    running.jobs += whole, job
    outcomes: list[Outcome] = []

    def note(name: str, which: str, act: Callable[[], str | None], ended: Callable[[], str]) -> None:
        started, detail, problem, more = time.monotonic(), "", "", ""
        try:
            detail = act() or ""
        except Exception as error:
            problem = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
            more = f"\n{traceback.format_exc()}{job.said()[-4000:] if job.starts else ''}"
        found = Outcome(kind.name, name, which, problem or ended(), time.monotonic() - started, bool(problem))
        words = ", ".join(filter(None, (f"{kind.name}: {name}", which, detail)))
        print(f"{words}: {found.ended} ({found.seconds:.0f} s){more}", flush=True)  # at once: others print beside
        outcomes.append(found)

    def goes_on() -> bool:
        return not outcomes[-1].failed and not running.over.is_set()

    def undisturbed() -> None:
        try:
            whole.start()
            status = whole.wait_long()
            assert status == 0, f"status {status}: {whole.said()[-2000:]}"
            whole.gone()
        finally:
            whole.end()  # the next run serves at the same ports

    def one(row: Row) -> str | None:
        job.leash(4)
        detail = row.do(job, chance)
        checks.so_far(job, whole)
        return detail

    def rest() -> None:
        if not job.alive:
            job.start()
        job.leash(None)
        status = job.wait_long()
        assert status == 0, f"status {status}"
        job.gone()
        checks.at_the_end(job, whole)

    with contextlib.ExitStack() as stack:
        if any(row.do is disturbances.full for row in planned):
            stack.enter_context(small_disk(job.out))
        stack.callback(job.end)
        note("undisturbed", "", undisturbed, lambda: f"done: weights {checks.weights(whole.out)}")
        for done, row in enumerate(planned):
            if time.monotonic() > deadline - SECONDS_TO_END:
                left = len(planned) - done
                outcomes.append(Outcome(kind.name, "left out", "", f"{left} rows, for time", 0.0, False))
                break
            if goes_on():
                came_to = lambda: f"{'goes on' if job.alive else 'ended'} after step {job.done()}"
                note(row.name, row.which, lambda row=row: one(row), came_to)
        if goes_on():
            came_out = "equal" if kind.exact else "whole"
            note("to its end", "", rest, lambda: f"{came_out}, {job.starts} starts: weights {checks.weights(job.out)}")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each kind of run and what was done to it."""
    lines = [f"{'run':18}  {'what was done':28}  times  seconds  how it ended"]
    for kind, name in dict.fromkeys((each.kind, each.name) for each in outcomes):
        found = [each for each in outcomes if (each.kind, each.name) == (kind, name)]
        failed = [each for each in found if each.failed]
        on = sum(each.ended.startswith("goes on") for each in found)
        usual = found[0].ended if len({each.ended for each in found}) == 1 else f"{on} went on, {len(found) - on} ended"
        ended = f"FAILED: {failed[0].ended}" if failed else usual
        lines.append(f"{kind:18}  {name:28}  {len(found):5}  {sum(each.seconds for each in found):7.0f}  {ended}")
    return lines


def chosen(row: Row, words: Sequence[str]) -> bool:
    return any(word in f"{row.name} {row.which}" for word in words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Disturb real runs and check what becomes of them.")
    parser.add_argument("--seed", type=int, default=0, help="decides order, moments and victims (0)")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, "tests"), default=ALL, help="of runs (all)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="runs of each kind, with seeds that follow each other (1)"
    )
    parser.add_argument("--minutes", type=float, default=18, help="of a round, after which rows are left out (18)")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time; most of their time they wait (3)")
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a row must hold (all rows)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (a temporary folder)")
    arguments = parser.parse_args(argv)
    outcomes, running = list[Outcome](), Running()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            inputs = kinds.write_inputs(folder / f"seed-{seed}" / "inputs")
            ends = time.monotonic() + 60 * arguments.minutes

            def one(name: str, seed: int = seed, inputs: Path = inputs, ends: float = ends) -> list[Outcome]:
                own = folder / f"seed-{seed}" / name
                own.mkdir()
                if name == "tests":
                    return tests(own, running)
                rows = [row for row in disturbances.rows(name) if chosen(row, arguments.only)]
                # Those that begin later have what is left.
                found = disturb(KINDS[name](inputs), rows, seed, own, ends - time.monotonic(), running)
                for each in found:
                    if each.failed:
                        what = f"{each.name} {each.which}".strip()
                        print(f"FAILED: {what}: {each.ended}; again: --seed {seed} --kinds {name}", flush=True)
                return found

            with ThreadPoolExecutor(arguments.jobs) as beside:
                try:
                    # The tests first, of which the longest wait most.
                    names = sorted(arguments.kinds, key=lambda name: name != "tests")
                    outcomes += [outcome for found in beside.map(one, names) for outcome in found]
                except BaseException:
                    running.end()
                    raise
    print(*table(outcomes), sep="\n")
    failed = sum(each.failed for each in outcomes)
    print(f"{len(outcomes)} done, {failed} failed, {sum(each.seconds for each in outcomes):.0f} seconds")
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    sys.exit(main())
