"""Plants one-line bugs, one at a time, in a copy of this repository and runs the tests that must notice: make mutants.

    .venv/bin/python tests/mutants/run.py [NAME ...] [--jobs 2] [--pin | --apply]

The catalogue is every *.toml beside this file; test_catalogue.py says what an entry holds. First the named tests run on
the untouched copy, where all must pass: a test that fails anyway notices nothing. The last lines name the mutants that
survived; the status is 1 where there are any, or where a mutant does not apply.

--pin finds the cheapest row that notices each mutant, and writes it into the catalogue as the mutant's only test. It
keeps what it finds in .mutant-pins.jsonl (pinned.py), so --pin --resume goes on where a run was ended, and --apply
writes what was found so far.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pinned

ROOT = Path(__file__).parents[2]
WARM = Path(__file__).with_name("warm.py")
# Imported once; torch starts no threads until it computes. Of isoloss, which is what changes, only the CUDA stubs that
# Megatron-Core needs first: a mutant of a file that this imports gets a process that has imported neither.
PRELOAD = (
    "hypothesis",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "isoloss.parallel",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.ssm.gated_delta_net",
    "transformers.models.mistral4.modeling_mistral4",
    "transformers.models.qwen3_next",
    "tokenizers",
    "xdist.plugin",
    "_hypothesis_pytestplugin",
    "torch.utils.tensorboard",
    "hydra",
)
CHANGING = ("isoloss", "megatron")
TOP = "tools/command/isoloss"
PACKAGES = ("engine", "models", "parallel", "recipes", "tools")
# What `make test` runs, and what only `make test-all` does. No mutant needs a GPU, a real server or a page of docs.
QUICK, ALL = (f"{tier}not slow and not sglang and not docs and not gpu" for tier in ("not full and ", ""))
PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's statuses
SECONDS, SECONDS_UNTOUCHED = 900, 3600  # of one mutant's tests; of all tests on the untouched copy
# Of a row on the untouched copy, as in pyproject.toml; and of one that a mutant may make hang, besides five times what
# it took.
SECONDS_OF_A_ROW, SECONDS_HUNG = 300, 60


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


def read_mutants(path: Path) -> list[Mutant]:
    """Those of one file."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def read_catalogue(root: Path) -> list[Mutant]:
    """Every mutant of tests/mutants/*.toml, by file. Raises ValueError where two have one name."""
    mutants = [mutant for path in sorted((root / "tests/mutants").glob("*.toml")) for mutant in read_mutants(path)]
    for name, times in Counter(mutant.name for mutant in mutants).items():
        if times > 1:
            raise ValueError(f"{name}: {times} mutants have this name")
    return mutants


@dataclass(frozen=True)
class Record:
    """What became of rows. collected: in the order in which they run. seconds: CPU and wall seconds of those that
    passed, the least where a row ran twice. failures: those that failed, or began and never ended. reached: by row, the
    probes that it passed (fresh.py)."""

    collected: list[str]
    seconds: dict[str, list[float]]
    failures: list[str]
    reached: dict[str, list[str]]

    @property
    def failed(self) -> str | None:
        """The first of `failures`."""
        return self.failures[0] if self.failures else None

    @classmethod
    def read(cls, path: Path) -> "Record":
        collected: list[str] = []
        seconds: dict[str, list[float]] = {}
        failures: list[str] = []
        reached: dict[str, list[str]] = {}
        running = None
        for line in map(json.loads, path.read_text().splitlines()):
            if "collected" in line:
                collected = line["collected"]
            elif "begins" in line:
                running = line["begins"]
            else:
                row, running = line["row"], None
                reached[row] = line["reached"]
                if line["outcome"] == "passed":
                    seconds[row] = min(line["seconds"], seconds.get(row, line["seconds"]))
                elif row not in seconds:
                    failures.append(row)
        return cls(collected, seconds, [*failures, *([running] if running else [])], reached)


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
        for file in ("__init__.py", "__main__.py"):
            (folder / ".links/isoloss" / file).symlink_to(folder / TOP / file)
        venv.create(folder / ".venv", symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
        packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site / "copy.pth").write_text("\n".join([str(folder / ".links"), *packages]) + "\n")
        self._preload = preload
        self._changed: set[str] = set()  # files that are not those of the repository
        self._warm = self._start(preload)
        self._imported = set(json.loads(self._answer(self._warm)))
        self._less_warm: subprocess.Popen | None = None  # without what changes; started where a mutant needs it

    def _start(self, preload: Sequence[str]) -> subprocess.Popen:
        return subprocess.Popen(
            [str(self.folder / ".venv/bin/python"), "-W", "ignore", str(WARM), *preload],
            cwd=self.folder,
            # Without the PYTHONPATH of whoever calls: an isoloss there would be tested instead of the copy.
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _answer(warm: subprocess.Popen) -> str:
        if not (answer := warm.stdout.readline()):
            raise RuntimeError(f"{WARM} ended; see above")
        return answer

    def planted(self, *mutants: Mutant) -> contextlib.AbstractContextManager[None]:
        """The mutants are there meanwhile; of two that change one line, or a neighbour of it, the first."""
        texts: dict[str, str] = {}
        for mutant in mutants:
            text = texts.get(mutant.file) or (self.folder / mutant.file).read_text()
            if text.count(mutant.before) == 1:
                texts[mutant.file] = text.replace(mutant.before, mutant.after)
        return self.changed(texts)

    @contextlib.contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Files have other texts meanwhile."""
        before = {name: (self.folder / name).read_text() for name in texts}
        self._changed = set(texts)
        try:
            for name, text in texts.items():
                self._write(name, text)
            yield
        finally:
            for name, text in before.items():
                self._write(name, text)
            self._changed = set()

    def test(
        self, tests: Sequence[str], tier: str, seconds: int = SECONDS, options: Sequence[str] = ("-x",), **more: object
    ) -> tuple[int, str, "Record"]:
        """pytest's status on `tests`, which end within `seconds`, its last lines, and what became of each row.

        more: for the `Recorder` of warm.py.
        """
        output, record = self.folder / ".output", self.folder / ".record"
        output.unlink(missing_ok=True)
        record.write_text("")
        arguments = ["-q", "-n", "0", *options, "-m", tier, *tests]
        asked = {"arguments": arguments, "output": str(output), "seconds": seconds, "record": str(record), **more}
        warm = self._warm
        if not self._imported.isdisjoint(self._changed):
            if self._less_warm is None:
                self._less_warm = self._start([name for name in self._preload if not name.startswith(CHANGING)])
                self._answer(self._less_warm)
            warm = self._less_warm
        print(json.dumps(asked), file=warm.stdin, flush=True)
        answer = self._answer(warm)
        rows = Record.read(record)
        if (status := json.loads(answer)) is None:
            return FAILED, f"no end in {seconds} s", rows
        return status, "\n".join(output.read_text(errors="replace").rstrip().splitlines()[-15:]), rows

    def close(self) -> None:
        for warm in filter(None, (self._warm, self._less_warm)):
            warm.stdin.close()
            warm.wait()

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


def judge(copy: Copy, mutant: Mutant) -> tuple[str, str]:
    """What became of the mutant ("killed", "killed in full": by tests that make test leaves out, "SURVIVED", "BROKEN"),
    and the line that tells how."""
    with copy.planted(mutant):
        for tier, verdict in ((QUICK, "killed"), (ALL, "killed in full")):
            status, told, _ = copy.test(mutant.tests, tier)
            if status == FAILED:
                return verdict, noticed(told)
            if status not in (PASSED, NO_TESTS):
                return "BROKEN", told
    return "SURVIVED", mutant.suffers


def find_pin(copy: Copy, mutant: Mutant, rows: Sequence[pinned.Row]) -> pinned.Pin:
    """The first of `rows` that notices the mutant, where it runs alone too."""
    begun, left = time.monotonic(), list(rows)
    with copy.planted(mutant):
        while left:
            status, told, record = run_rows(copy, left)
            if status not in (PASSED, FAILED, NO_TESTS):
                return pinned.Pin.of(mutant, "BROKEN", None, told, begun)
            if record.failed is None:
                break
            place = [row.name for row in left].index(record.failed)
            failed, left = left[place], left[place + 1 :]
            # What failed after others may owe it to what they left behind.
            if place == 0 or run_rows(copy, [failed])[0] == FAILED:
                return pinned.Pin.of(mutant, "pinned", failed.name, noticed(told), begun)
    return pinned.Pin.of(mutant, "SURVIVED", None, mutant.suffers, begun)


def run_rows(copy: Copy, rows: Sequence[pinned.Row], tier: str = ALL) -> tuple[int, str, Record]:
    """A mutant may make a row hang; each gets several times what it took before."""
    tests = sorted({row.name.partition("[")[0] for row in rows})
    limits = {row.name: SECONDS_HUNG + 5 * row.wall for row in rows}
    return copy.test(tests, tier, max(SECONDS, int(5 * sum(row.wall for row in rows))), rows=limits)


class Copies:
    """Copies of the repository, each of which does one piece of work at a time."""

    def __init__(self, root: Path, jobs: int, preload: Sequence[str]) -> None:
        self._jobs, self._root, self._preload = jobs, root, preload

    def __enter__(self) -> "Copies":
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self._threads = ThreadPoolExecutor(self._jobs)
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        folders = [Path(self._folder.name).resolve() / str(job) for job in range(self._jobs)]
        for copy in self._threads.map(lambda folder: Copy(self._root, folder, self._preload), folders):
            self._free.put(copy)
        return self

    def map(self, work: Callable[[Copy, Any], Any], things: Iterable[Any]) -> Iterator[Any]:
        """work(a copy, thing) for each, in the order of `things`."""

        def take(thing):
            copy = self._free.get()
            try:
                return work(copy, thing)
            finally:
                self._free.put(copy)

        return self._threads.map(take, things)

    def __exit__(self, *exc) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._free.empty():
            self._free.get().close()
        self._folder.cleanup()


def collected(copies: Copies, tests: Sequence[str], tier: str) -> list[str]:
    """The rows of `tests` that the tier runs. Raises ValueError where they cannot be collected."""

    def collect(copy: Copy, tests: Sequence[str]) -> tuple[int, str, Record]:
        return copy.test(tests, tier, options=("--collect-only",))

    ((status, told, record),) = copies.map(collect, [tests])
    if status not in (PASSED, NO_TESTS):
        raise ValueError(f"the tests must be collected before a mutant is planted:\n{told}")
    return record.collected


def rows_of(copies: Copies, tests: Sequence[str]) -> dict[str, list[str]]:
    """The rows of each test that make test-all runs. Raises ValueError where a test has none: nothing would notice
    its mutants."""
    rows = collected(copies, tests, ALL)
    found = {test: [row for row in rows if row == test or row.startswith((f"{test}[", f"{test}::"))] for test in tests}
    if without := [test for test, rows in found.items() if not rows]:
        raise ValueError(f"make test-all runs no row of {', '.join(without)}: mutants that name it would survive")
    return found


def judge_all(mutants: Sequence[Mutant], copies: Copies, jobs: int) -> Iterator[tuple[Mutant, str, str]]:
    """(mutant, verdict, line) of each, as they end. Raises ValueError where a named test fails on the untouched
    copy."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    rows_of(copies, tests)
    shares = [share for job in range(jobs) if (share := tests[job::jobs])]
    for status, told, _ in copies.map(lambda copy, share: copy.test(share, ALL, SECONDS_UNTOUCHED), shares):
        if status != PASSED:
            raise ValueError(f"the tests must pass before a mutant is planted:\n{told}")
    verdicts = copies.map(judge, mutants)
    for mutant, (verdict, line) in zip(mutants, verdicts):
        yield mutant, verdict, line


def pin_all(mutants: Sequence[Mutant], copies: Copies, found: pinned.Found) -> Iterator[pinned.Pin]:
    """The pin of each mutant that `found` has none of, as they end; they are added to it, and so are the seconds of
    rows that pass on the untouched copy.

    The rows of `make test` are measured, and tried by what they cost. The others are tried after them, as they come.
    """
    mutants = [mutant for mutant in mutants if not found.has(mutant)]
    rows = rows_of(copies, sorted({test for mutant in mutants for test in mutant.tests}))
    for mutant in mutants:
        if len(names := {row for test in mutant.tests for row in rows[test]}) == 1:
            pin = pinned.Pin.of(mutant, "pinned", names.pop(), "its only row, not tried", time.monotonic())
            found.add_pin(pin)
            yield pin
    mutants = [mutant for mutant in mutants if not found.has(mutant)]
    quick = set(collected(copies, sorted({test for mutant in mutants for test in mutant.tests}), QUICK))
    unmeasured: dict[str, list[str]] = {}
    for row in sorted(quick - found.seconds.keys()):
        unmeasured.setdefault(row.partition("::")[0], []).append(row)

    def measure(copy: Copy, names: Sequence[str]) -> tuple[int, str, Record]:
        tests = sorted({name.partition("[")[0] for name in names})
        limits = dict.fromkeys(names, SECONDS_OF_A_ROW)
        return copy.test(tests, ALL, SECONDS_UNTOUCHED, options=(), rows=limits, again=True)

    for status, told, record in copies.map(measure, unmeasured.values()):
        if status not in (PASSED, FAILED):
            raise ValueError(f"the tests must run before a mutant is planted:\n{told}")
        found.add_seconds(record.seconds)
        cpu = sum(cpu for cpu, _ in record.seconds.values())
        print(f"measured {len(record.seconds):4} rows, {cpu:6.1f} CPU s", flush=True)
    for row in sorted(failing := quick - found.seconds.keys()):
        print(f"fails on the untouched copy, and is set aside: {row}", flush=True)

    def pin(copy: Copy, mutant: Mutant) -> pinned.Pin:
        names = {row for test in mutant.tests for row in rows[test]} - failing
        pin = find_pin(copy, mutant, found.by_seconds(names))
        found.add_pin(pin)
        return pin

    yield from copies.map(pin, mutants)


def main(argv: Sequence[str] | None = None, root: Path = ROOT, preload: Sequence[str] = PRELOAD) -> int:
    parser = argparse.ArgumentParser(description="Plant one-line bugs and run the tests that must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants only")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a copy (2)")
    parser.add_argument("--pin", action="store_true", help="find the cheapest row that notices, and name it alone")
    parser.add_argument("--resume", action="store_true", help="with --pin: keep what an earlier run found")
    parser.add_argument("--apply", action="store_true", help="write what --pin has found so far, and run nothing")
    arguments = parser.parse_args(argv)
    mutants = read_catalogue(root)
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in mutants if not arguments.names or mutant.name in arguments.names]
    if faults := list(filter(None, (mutant.fault(root) for mutant in mutants))):
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    if arguments.pin or arguments.apply:
        return pin(mutants, root, arguments, preload)
    found: dict[str, list[Mutant]] = {"killed": [], "killed in full": [], "SURVIVED": [], "BROKEN": []}
    try:
        with Copies(root, arguments.jobs, preload) as copies:
            for mutant, verdict, line in judge_all(mutants, copies, arguments.jobs):
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


def pin(mutants: Sequence[Mutant], root: Path, arguments: argparse.Namespace, preload: Sequence[str]) -> int:
    """--pin and --apply."""
    found = pinned.Found(root / pinned.FILE, fresh=arguments.pin and not arguments.resume)
    if arguments.pin:
        try:
            with Copies(root, arguments.jobs, preload) as copies:
                for pin in pin_all(mutants, copies, found):
                    print(pin, flush=True)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    pins = {mutant.name: pin.row for mutant in mutants if (pin := found.pin_of(mutant)) and pin.row}
    for path in sorted((root / "tests/mutants").glob("*.toml")):
        text = path.read_text()
        if (edited := pinned.name_rows(text, pins)) != text:
            path.write_text(edited)
    print(f"{len(pins)} of {len(mutants)} pinned")
    return int(len(pins) < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
