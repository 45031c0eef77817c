"""A run that no longer moves ends, and tells which rank keeps the others waiting, and in which line.

Every rank has a file, into which faulthandler writes where its threads are once it has not moved for train.timeout.
That needs no code of Python to run, so a rank that is stuck in C with the interpreter's lock writes too. One rank then
reads what all wrote.
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

from isoloss.engine.instruments.console import say

SECONDS_FOR_OTHERS = 10.0  # how long the stacks of the other ranks are waited for
ISOLOSS = f"{Path(__file__).parents[2]}{os.sep}"
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
COLLECTIVES = "distributed_c10d.py"
UNFINISHED = 4  # of them are told
Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file.removeprefix(ISOLOSS)}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    collective: that it waits for others in; None: it does not wait for them.
    frame: the line of isoloss that entered it, or of whatever code the rank runs.
    """

    collective: str | None
    frame: Frame

    def __str__(self) -> str:
        return f"{self.collective} of {self.frame}" if self.collective else str(self.frame)


class Watchdog:
    """Of this rank. One at a time in a process, as faulthandler has one timer.

    folder: for the stacks of all ranks, visible to all of them; at the end of a run that moved it goes.
    timeout: seconds without a `beat`; 0: for ever.
    """

    def __init__(self, folder: Path, timeout: float, rank: int, world: int):
        self._folder, self._timeout, self._rank, self._world = folder, timeout, rank, world
        self._last = self._armed = 0.0
        self._patient = 0  # how many things that may take any time are under way
        self._ended = threading.Event()

    def begin(self) -> None:
        global _running
        if not self._timeout:
            return
        self._folder.mkdir(exist_ok=True)
        self._file = _file(self._folder, self._rank).open("w")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "main": hex(threading.main_thread().ident or 0)}
        self._file.write(json.dumps(who) + "\n")
        self._file.flush()
        self._start = self._file.tell()
        (self._folder / "told").unlink(missing_ok=True)
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
        if self._rank == 0 and not (self._folder / "told").exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def beat(self) -> None:
        now = time.monotonic()
        self._last = now
        # Not at every beat: a timer is a thread. It may go off early, and is then set again by the next beat.
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
        """The first rank that has what the others wrote tells it; the others leave it the time to."""
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while time.monotonic() < deadline and not all(place_of(self._written(rank)) for rank in range(self._world)):
            time.sleep(0.1)
        try:
            (self._folder / "told").touch(exist_ok=False)
            self._tell()
        except FileExistsError:
            time.sleep(SECONDS_FOR_OTHERS / 2)
        finally:
            os._exit(1)

    def _tell(self) -> None:
        texts = [self._written(rank) for rank in range(self._world)]
        found = {rank: place for rank, text in enumerate(texts) if (place := place_of(text))}
        silent = {rank: _process_of(text) for rank, text in enumerate(texts) if rank not in found}
        c10d: Any = torch._C
        trace = json.loads(c10d._distributed_c10d._dump_fr_trace_json(onlyActive=True))
        lines = [*report(found, silent, self._timeout, self._folder), *unfinished(trace)]
        say(*lines, error=True)

    def _written(self, rank: int) -> str:
        file = _file(self._folder, rank)
        return file.read_text(errors="replace") if file.exists() else ""


_running: Watchdog | None = None


def beat() -> None:
    """This rank has moved: it has a micro-batch, a token, a step more."""
    if _running is not None:
        _running.beat()


def patient() -> contextlib.AbstractContextManager[None]:
    """What is done in here may take any time, or has a limit of its own."""
    return contextlib.nullcontext() if _running is None else _running.patient()


def patiently(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, which may take any time."""

    @functools.wraps(function)
    def calling(*args: Given.args, **options: Given.kwargs) -> Result:
        with patient():
            return function(*args, **options)

    return calling


def place_of(dump: str) -> Place | None:
    """What the last dump of a rank's file says of it; None where there is none."""
    head, timed_out, stacks = dump.rpartition("\nTimeout (")
    if not timed_out:
        return None
    _, *parts = THREAD.split(stacks)
    threads = {int(ident, 16): _frames(text) for ident, text in zip(parts[::2], parts[1::2])}
    main = threads.pop(int(json.loads(head.splitlines()[0])["main"], 16), [])
    if not main:
        return None
    waiting = [main]
    if "autograd" in main[0].file:  # backward of a device runs in a thread of its own
        waiting += [
            frames
            for frames in threads.values()
            if not any(f.file.endswith("engine/checkpoint/saver.py") for f in frames)
        ]
    for frames in waiting:
        if collective := _collective(frames):
            return Place(collective, _own(frames))
    return Place(None, main[0])


def report(places: Mapping[int, Place], silent: Mapping[int, str], timeout: float, folder: Path) -> Sequence[str]:
    """Lines that say who keeps whom waiting.

    silent: what is known of the ranks that wrote nothing.
    """
    lines = [f"rank {rank} does not answer{state}" for rank, state in silent.items()]
    at: dict[Place, list[int]] = {}
    for rank, place in places.items():
        at.setdefault(place, []).append(rank)
    # Who does not wait for others, then those who wait in the smallest company.
    for place, ranks in sorted(at.items(), key=lambda item: (item[0].collective is not None, len(item[1]))):
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines.append(f"{who}: {'waiting for the others in ' if place.collective else 'at '}{place}")
    return [
        f"isoloss: error: nothing has moved for train.timeout={timeout:g} seconds: {lines[0]}; the stacks of all ranks "
        f"are in {folder}; start again with checkpoint.resume=true, or raise train.timeout if it only takes long",
        *(f"isoloss: {line}" for line in lines[1:]),
    ]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _frames(text: str) -> list[Frame]:
    """From the innermost."""
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in FRAME.finditer(text)]


def _collective(frames: Sequence[Frame]) -> str | None:
    """The function of torch.distributed that these frames are in."""
    inner = [f for f in frames if f.file.endswith(COLLECTIVES)]
    return inner[-1].name if inner and f"{os.sep}torch{os.sep}" in frames[0].file else None


def _own(frames: Sequence[Frame]) -> Frame:
    def is_ours(file: str) -> bool:  # a checkout may hold the environment, too
        return file.startswith(ISOLOSS) and "site-packages" not in file.removeprefix(ISOLOSS)

    return next((frame for frame in frames if is_ours(frame.file)), frames[-1])


def _process_of(dump: str) -> str:
    """What the system knows of a process of this machine that wrote nothing."""
    who = json.loads(dump.splitlines()[0]) if dump else {}
    if who.get("host") != socket.gethostname():
        return ""
    try:
        return f" (its process {who['pid']} is {psutil.Process(who['pid']).status()})"
    except psutil.NoSuchProcess:
        return f" (its process {who['pid']} is gone)"


def unfinished(trace: Mapping[str, Any]) -> Iterator[str]:
    """The first collectives that this rank's device has not finished, by torch's flight recorder: the host only
    enqueues them, and waits somewhere else."""
    entries = [entry for entry in trace.get("entries", []) if entry["profiling_name"].startswith("nccl:")]
    for entry in [entry for entry in entries if entry["state"] != "completed"][:UNFINISHED]:
        what = f"{entry['profiling_name']} number {entry['collective_seq_id']} of {entry['input_sizes']}"
        yield f"isoloss: the device of the rank that tells this has not finished {what} in {entry['process_group'][1]}"
