"""End a run that makes no progress, and report which rank keeps the others waiting, and in which line.

Every rank has a file into which faulthandler dumps the stacks of its threads after train.timeout without progress. The
dump runs no Python code, so it works for a rank that is stuck in C with the interpreter's lock. One rank reads all
files.
"""

import contextlib
import faulthandler
import functools
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch

from isoloss.parallel.runtime.console import say

SECONDS_FOR_OTHERS = 10.0  # seconds to wait for the stacks of other ranks
ISOLOSS = f"{Path(__file__).parents[2]}{os.sep}"
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
COLLECTIVES = "distributed_c10d.py"
REPORTED = "reported"  # file in the folder of stacks; the rank that creates it reports
UNFINISHED = 4  # unfinished collectives that are reported
Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Frame:
    """A frame of a stack: file, line and function."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file.removeprefix(ISOLOSS)}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Position:
    """The position of a rank.

    collective: collective in which it waits for others; None: it is in none.
    frame: innermost frame of isoloss for a rank in a collective, else the innermost frame of all.
    """

    collective: str | None
    frame: Frame

    def __str__(self) -> str:
        return f"{self.collective} of {self.frame}" if self.collective else str(self.frame)


class Watchdog:
    """Watches this rank. Only one exists at a time in a process, as faulthandler has one timer.

    folder: folder for the stacks of all ranks, visible to all of them; deleted at the end of a run that did not hang.
    timeout: seconds without a `beat` after which the process ends; 0: never.
    """

    def __init__(self, folder: Path, timeout: float, rank: int, world: int):
        self._folder, self._timeout, self._rank, self._world = folder, timeout, rank, world
        self._last = self._armed = 0.0
        self._patient = 0  # open `patient` blocks
        self._ended = threading.Event()

    def begin(self) -> None:
        global _running
        if not self._timeout:
            return
        self._folder.mkdir(exist_ok=True)
        self._file = _file(self._folder, self._rank).open("w")
        process = {"pid": os.getpid(), "host": socket.gethostname(), "main": hex(threading.main_thread().ident or 0)}
        self._file.write(json.dumps(process) + "\n")
        self._file.flush()
        self._start = self._file.tell()
        (self._folder / REPORTED).unlink(missing_ok=True)
        _running = self
        self.beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def end(self) -> None:
        global _running
        if _running is not self:
            return
        _running = None
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._rank == 0 and not (self._folder / REPORTED).exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def beat(self) -> None:
        now = time.monotonic()
        self._last = now
        # Not at every beat, as a timer is a thread. A dump that comes early is removed when the next beat sets the
        # timer.
        if not self._patient and now - self._armed > self._timeout / 10:
            self._arm(now)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        self._patient += 1
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self._patient -= 1
            if not self._ended.is_set():
                self._armed = -self._timeout
                self.beat()

    def _arm(self, now: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file.seek(0, os.SEEK_END) > self._start:
            self._file.truncate(self._start)
            self._file.seek(self._start)
        self._armed = now
        faulthandler.dump_traceback_later(self._timeout, file=self._file)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout / 4)):
            if not self._patient and time.monotonic() - self._last > self._timeout:
                self._give_up()

    def _give_up(self) -> None:
        """Wait for the dumps of all ranks; report them if no other rank does; end this process."""
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while time.monotonic() < deadline and not all(position_of(self._dump(rank)) for rank in range(self._world)):
            time.sleep(0.1)
        try:
            (self._folder / REPORTED).touch(exist_ok=False)
            self._report()
        except FileExistsError:
            time.sleep(SECONDS_FOR_OTHERS / 2)  # torchrun kills all ranks, the reporting one too, when one ends
        finally:
            os._exit(1)

    def _report(self) -> None:
        dumps = [self._dump(rank) for rank in range(self._world)]
        positions = {rank: position for rank, dump in enumerate(dumps) if (position := position_of(dump))}
        silent = {rank: _process_of(dump) for rank, dump in enumerate(dumps) if rank not in positions}
        c10d: Any = torch._C
        trace = json.loads(c10d._distributed_c10d._dump_fr_trace_json(onlyActive=True))
        lines = [*report(positions, silent, self._timeout, self._folder), *unfinished(trace)]
        say(*lines, error=True)

    def _dump(self, rank: int) -> str:
        file = _file(self._folder, rank)
        return file.read_text(errors="replace") if file.exists() else ""


_running: Watchdog | None = None


def beat() -> None:
    """Report progress of this rank: a micro-batch, a token or a step."""
    if _running is not None:
        _running.beat()


def patient() -> contextlib.AbstractContextManager[None]:
    """Return a context manager for work that may take any time, or has its own limit."""
    return contextlib.nullcontext() if _running is None else _running.patient()


def patiently(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a function that may take any time."""

    @functools.wraps(function)
    def calling(*args: Given.args, **options: Given.kwargs) -> Result:
        with patient():
            return function(*args, **options)

    return calling


def position_of(dump: str) -> Position | None:
    """Return where a rank stands by the last dump in its file; None if there is none."""
    head, timed_out, stacks = dump.rpartition("\nTimeout (")
    if not timed_out:
        return None
    _, *parts = THREAD.split(stacks)
    threads = {int(ident, 16): _frames(text) for ident, text in zip(parts[::2], parts[1::2])}
    main = threads.pop(int(json.loads(head.splitlines()[0])["main"], 16), [])
    if not main:
        return None
    waiting = [main]
    if "autograd" in main[0].file:  # the backward of a device runs in another thread
        waiting += [
            frames
            for frames in threads.values()
            if not any(f.file.endswith("engine/checkpoint/saver.py") for f in frames)
        ]
    for frames in waiting:
        if collective := _collective(frames):
            return Position(collective, _own(frames))
    return Position(None, main[0])


def report(positions: Mapping[int, Position], silent: Mapping[int, str], timeout: float, folder: Path) -> Sequence[str]:
    """Return lines about the ranks that wait and the ranks that they wait for.

    silent: state of the process of each rank without a dump.
    """
    lines = [f"rank {rank} does not answer{state}" for rank, state in silent.items()]
    ranks_at: dict[Position, list[int]] = {}
    for rank, position in positions.items():
        ranks_at.setdefault(position, []).append(rank)
    # Ranks outside of collectives first, then the smallest groups: they are the likely cause.
    for position, ranks in sorted(ranks_at.items(), key=lambda item: (item[0].collective is not None, len(item[1]))):
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines.append(f"{names}: {'waiting for the others in ' if position.collective else 'at '}{position}")
    return [
        f"isoloss: error: nothing has moved for train.timeout={timeout:g} seconds: {lines[0]}; the stacks of all ranks "
        f"are in {folder}; start again with checkpoint.resume=true, or raise train.timeout if it only takes long",
        *(f"isoloss: {line}" for line in lines[1:]),
    ]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _frames(text: str) -> list[Frame]:
    """Parse the frames of a thread, innermost first."""
    return [Frame(match["file"], int(match["line"]), match["name"]) for match in FRAME.finditer(text)]


def _collective(frames: Sequence[Frame]) -> str | None:
    """Return the function of torch.distributed that these frames are in, if any."""
    inner = [f for f in frames if f.file.endswith(COLLECTIVES)]
    return inner[-1].name if inner and f"{os.sep}torch{os.sep}" in frames[0].file else None


def _own(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of isoloss, or if there is none the outermost frame."""

    def is_own(file: str) -> bool:  # the environment may be inside the checkout
        return file.startswith(ISOLOSS) and "site-packages" not in file.removeprefix(ISOLOSS)

    return next((frame for frame in frames if is_own(frame.file)), frames[-1])


def _process_of(dump: str) -> str:
    """Return the state of the process of a rank without a dump; "" for one on another machine."""
    process = json.loads(dump.splitlines()[0]) if dump else {}
    if process.get("host") != socket.gethostname():
        return ""
    try:
        return f" (its process {process['pid']} is {psutil.Process(process['pid']).status()})"
    except psutil.NoSuchProcess:
        return f" (its process {process['pid']} is gone)"


def unfinished(trace: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the first collectives that this rank's device has not finished. trace: torch's flight
    recorder."""
    # The host only enqueues collectives and waits elsewhere, so its stack does not show them.
    entries = [entry for entry in trace.get("entries", []) if entry["profiling_name"].startswith("nccl:")]
    for entry in [entry for entry in entries if entry["state"] != "completed"][:UNFINISHED]:
        what = f"{entry['profiling_name']} number {entry['collective_seq_id']} of {entry['input_sizes']}"
        yield f"isoloss: the device of the rank that tells this has not finished {what} in {entry['process_group'][1]}"
