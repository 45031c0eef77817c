"""Plants one-line bugs, one at a time, in a copy of this repository and runs the tests that must notice: make mutants.

    .venv/bin/python tests/mutants/run.py [NAME ...] [--jobs 2]

The catalogue is every *.toml beside this file; test_catalogue.py says what an entry holds. First the named tests run on
the untouched copy, where all must pass: a test that fails anyway notices nothing. The last lines name the mutants that
survived; the status is 1 where there are any, or where a mutant does not apply.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARM = Path(__file__).with_name("warm.py")
# Imported once. Nothing of isoloss, for that is what changes, nor Megatron-Core, which needs its CUDA stubs first;
# torch starts no threads until it computes.
PRELOAD = ("pytest", "hypothesis", "torch.distributed", "transformers.models.auto.modeling_auto")
PACKAGES = ("engine", "models", "parallel", "recipes", "tools")
# What `make test` runs, and what only `make test-all` does. No mutant needs a GPU, a real server or a page of docs.
QUICK, ALL = (f"{tier}not slow and not sglang and not docs and not gpu" for tier in ("not full and ", ""))
PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's statuses
SECONDS, SECONDS_UNTOUCHED = 900, 3600  # of one mutant's tests; of all tests on the untouched copy


@dataclass(frozen=True)
class Mutant:
    """One bug. file: where, from the repository's root. before: its lines, which occur once. after: what stands there
    instead. suffers: what a user would. tests: pytest's names, of which one at least must fail."""

    name: str
    file: str
    before: str
    after: str
    suffers: str
    tests: tuple[str, ...]

    def fault(self, root: Path) -> str | None:
        """Why it cannot be planted, or None."""
        path = root / self.file
        found = path.read_text().count(self.before) if path.is_file() else 0
        if found != 1:
            return f"{self.name}: its line occurs {found} times in {self.file}, not once: write it anew or delete it"
        if self.before == self.after:
            return f"{self.name}: it changes nothing"
        for test in self.tests:
            path, *names = test.split("::")
            text = (root / path).read_text() if (root / path).is_file() else ""
            if not text or any(f"def {name.split('[')[0]}(" not in text for name in names):
                return f"{self.name}: there is no {test}"
        return None if self.tests else f"{self.name}: it names no tests"


def read_catalogue(root: Path) -> list[Mutant]:
    """Every mutant of tests/mutants/*.toml, by file. Raises ValueError where two have one name."""
    entries = [
        entry
        for path in sorted((root / "tests/mutants").glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]
    mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    for name, times in Counter(mutant.name for mutant in mutants).items():
        if times > 1:
            raise ValueError(f"{name}: {times} mutants have this name")
    return mutants


class Copy:
    """A copy of the repository with an interpreter that imports isoloss from it, and all else from this one's."""

    def __init__(self, root: Path, folder: Path, preload: Sequence[str]) -> None:
        self.folder = folder
        self._clock = count(1)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        (folder / ".links/isoloss").mkdir(parents=True)
        for package in PACKAGES:
            (folder / ".links/isoloss" / package).symlink_to(folder / package)
        venv.create(folder / ".venv", symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
        (site / "copy.pth").write_text(f"{folder / '.links'}\n{sysconfig.get_path('purelib')}\n")
        self._warm = subprocess.Popen(
            [str(folder / ".venv/bin/python"), str(WARM), *preload],
            cwd=folder,
            # Without the PYTHONPATH of whoever calls: an isoloss there would be tested instead of the copy.
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def plant(self, mutant: Mutant) -> None:
        self._write(mutant.file, (self.folder / mutant.file).read_text().replace(mutant.before, mutant.after))

    def remove(self, mutant: Mutant, root: Path) -> None:
        self._write(mutant.file, (root / mutant.file).read_text())

    def test(self, tests: Sequence[str], tier: str, seconds: int = SECONDS) -> tuple[int, str]:
        """pytest's status on `tests`, which end within `seconds`, and its last lines."""
        output = self.folder / ".output"
        output.unlink(missing_ok=True)
        arguments = ["-q", "-x", "-n", "0", "-m", tier, *tests]
        asked = json.dumps({"arguments": arguments, "output": str(output), "seconds": seconds})
        print(asked, file=self._warm.stdin, flush=True)
        answer = self._warm.stdout.readline()
        if not answer:
            raise RuntimeError(f"{WARM} ended; see above")
        if (status := json.loads(answer)) is None:
            return FAILED, f"no end in {seconds} s"
        return status, "\n".join(output.read_text(errors="replace").rstrip().splitlines()[-15:])

    def close(self) -> None:
        self._warm.stdin.close()
        self._warm.wait()

    def _write(self, name: str, text: str) -> None:
        """No two versions share a second: by second and size Python tells whether a compiled file is today's."""
        path = self.folder / name
        path.write_text(text)
        second = path.stat().st_mtime + 10 * next(self._clock)
        os.utime(path, (second, second))


def noticed(told: str) -> str:
    """Of pytest's last lines the one that names a test that failed, or could not be set up."""
    named = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[-1] if named else told.splitlines()[-1]


def judge(copy: Copy, mutant: Mutant, root: Path) -> tuple[str, str]:
    """What became of the mutant ("killed", "killed in full": by tests that make test leaves out, "SURVIVED", "BROKEN"),
    and the line that tells how."""
    copy.plant(mutant)
    try:
        for tier, verdict in ((QUICK, "killed"), (ALL, "killed in full")):
            status, told = copy.test(mutant.tests, tier)
            if status == FAILED:
                return verdict, noticed(told)
            if status not in (PASSED, NO_TESTS):
                return "BROKEN", told
    finally:
        copy.remove(mutant, root)
    return "SURVIVED", mutant.suffers


def judge_all(
    mutants: Sequence[Mutant], root: Path, jobs: int, preload: Sequence[str]
) -> Iterator[tuple[Mutant, str, str]]:
    """(mutant, verdict, line) of each, as they end, `jobs` at a time. Raises ValueError where a named test fails on the
    untouched copy."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(root, Path(folder).resolve() / str(job), preload))

        def take(work):
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        try:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            shares = [share for job in range(jobs) if (share := tests[job::jobs])]

            def untouched(tests: list[str]) -> tuple[int, str]:
                return take(lambda copy: copy.test(tests, ALL, SECONDS_UNTOUCHED))

            for status, told in threads.map(untouched, shares):
                if status != PASSED:
                    raise ValueError(f"the tests must pass before a mutant is planted:\n{told}")
            verdicts = threads.map(lambda mutant: take(lambda copy: judge(copy, mutant, root)), mutants)
            for mutant, (verdict, line) in zip(mutants, verdicts):
                yield mutant, verdict, line
        finally:
            threads.shutdown(cancel_futures=True)
            while not copies.empty():
                copies.get().close()


def main(argv: Sequence[str] | None = None, root: Path = ROOT, preload: Sequence[str] = PRELOAD) -> int:
    parser = argparse.ArgumentParser(description="Plant one-line bugs and run the tests that must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants only")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a copy (2)")
    arguments = parser.parse_args(argv)
    mutants = read_catalogue(root)
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in mutants if not arguments.names or mutant.name in arguments.names]
    if faults := list(filter(None, (mutant.fault(root) for mutant in mutants))):
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    found: dict[str, list[Mutant]] = {"killed": [], "killed in full": [], "SURVIVED": [], "BROKEN": []}
    try:
        for mutant, verdict, line in judge_all(mutants, root, arguments.jobs, preload):
            found[verdict].append(mutant)
            print(f"{verdict:14}  {mutant.file:40}  {mutant.name:40}  {line}", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    quick, full = len(found["killed"]), len(found["killed in full"])
    print(f"{quick + full} of {len(mutants)} killed, {quick} of them by make test, {full} by make test-all only")
    for verdict in ("SURVIVED", "BROKEN"):
        for mutant in found[verdict]:
            print(f"{verdict}: {mutant.name} ({mutant.file}): {mutant.suffers}")
    return int(quick + full < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
