"""The threads of `transfer`: they check sources and write files.

Threads suffice, as every long operation releases the GIL: copying, hashing, reading and writing.
"""

import ctypes
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from isoloss.models.conversion.hashed_file import PIECE_BYTES, HashedFile, write_whole
from isoloss.models.conversion.plan import FilePlan, OutputFile, Source
from isoloss.models.weights.manifest import FileRecord, crc32
from isoloss.parallel.runtime.console import Progress
from isoloss.parallel.runtime.errors import UserError

_MMAP_THRESHOLD = -3  # of mallopt: from this size on, memory that is freed goes back to the system at once


class _Stopped(Exception):
    """Ends a thread whose work is not wanted any more."""


class Work:
    """The work of the threads, and its results.

    records: records of the files written.
    kept: number of their bytes that an earlier run had written.
    """

    def __init__(self, plan: FilePlan, partial: Path):
        self.records: dict[str, FileRecord] = {}
        self.kept = 0
        self._plan, self._partial = plan, partial
        self._lock, self._stop = threading.Lock(), threading.Event()

    def do(self, num_threads: int, label: str) -> None:
        """Do all of the work. Raises the error of the first thread that failed, once all threads have ended."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc keeps what threads free, and cannot use it for the next aligned tensor
            libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
        checked = [source for source in self._plan.sources if source.checksum]
        total = self._plan.nbytes + sum(source.nbytes for source in checked)
        self._shown = Progress(label, "", lambda: total, nbytes=True)
        with self._shown, ThreadPoolExecutor(num_threads) as threads:
            try:
                for done in as_completed([threads.submit(job, of) for job, of in self._jobs()]):
                    done.result()
            except BaseException:
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _jobs(self) -> Iterator[tuple[Callable, Source | OutputFile]]:
        """A source is checked right before the first file that is made of it, so that it is read from the disk once."""
        unchecked = {source.path: source for source in self._plan.sources if source.checksum}
        for file in self._plan.files:
            for path in file.paths:
                if source := unchecked.pop(path, None):
                    yield self._check, source
            yield self._write, file

    def _check(self, source: Source) -> None:
        name = hashlib.sha256(str(source.path).encode()).hexdigest()
        path, record = self._partial / "journal" / "sources" / name, FileRecord(source.nbytes, source.checksum or "")
        if _read_record(path) == record:
            self._progress(source.nbytes, before=True)
        else:
            _check_source(source, self._progress)
            _write_record(path, record)

    def _write(self, file: OutputFile) -> None:
        path, journal = self._partial / "files" / file.name, self._partial / "journal" / "files" / f"{file.name}.json"
        try:
            record = _read_record(journal)
            if record and _is_whole(path, file.nbytes, record):
                self._progress(file.nbytes, before=True)
                with self._lock:
                    self.kept += file.nbytes
            else:
                os.makedirs(path.parent, exist_ok=True)
                with HashedFile(path, self._progress) as output:
                    for block in file.blocks():
                        output.add(block)
                    record = FileRecord(file.nbytes, output.finish())
                size = path.stat().st_size
                assert size == file.nbytes, f"{path}: {size} bytes written where {file.nbytes} were planned"
                _write_record(journal, record)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
        self.records[file.name] = record

    def _progress(self, nbytes: int, *, before: bool = False) -> None:
        """Count bytes as done. before: by an earlier run."""
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            (self._shown.skip if before else self._shown.advance)(nbytes)


def _write_record(path: Path, record: FileRecord) -> None:
    """Note that a file is finished. Not synced: a record that is lost costs the writing of its file, and no more."""
    write_whole(path, json.dumps(asdict(record)).encode())


def _read_record(path: Path) -> FileRecord | None:
    """Return the record of a finished file; None where there is none, or its writing was cut short."""
    try:
        return FileRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def _is_whole(path: Path, nbytes: int, record: FileRecord) -> bool:
    """Return whether the file has `nbytes` bytes and the checksum that an earlier run recorded."""
    sized = record.bytes == nbytes and path.is_file() and path.stat().st_size == nbytes
    return sized and crc32(path) == record.crc32


def _check_source(source: Source, report: Callable[[int], None]) -> None:
    """Compare it with its checksum, ALGORITHM:HEXADECIMAL. Raises UserError where it differs."""
    algorithm, _, expected = (source.checksum or "").partition(":")
    sha256, crc = hashlib.sha256(), 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    with source.path.open("rb", buffering=0) as file:
        try:
            while nbytes := file.readinto(buffer):
                if algorithm == "sha256":
                    sha256.update(buffer[:nbytes])
                else:
                    crc = zlib.crc32(buffer[:nbytes], crc)
                report(nbytes)
        except OSError as error:
            raise UserError(f"{source.path} cannot be read ({error.strerror}); copy it again") from None
    found = sha256.hexdigest() if algorithm == "sha256" else f"{crc:08x}"
    if found != expected:
        raise UserError(f"{source.path} is damaged: its {algorithm} is {found}, not {expected}; {source.mend}")
