"""The worker of `transfer`: does the jobs that it is sent, on the standard library alone (`worker_start`)."""

import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from isoloss.models.conversion.segments import PIECE_BYTES, Buffer, Run, Segment, SourceError, Sources

# Files are written past the page cache where that is possible: it costs half as much of a processor, and the disk
# works while other workers hash. Elsewhere the system is asked now and then to begin, so that not all is left to fsync.
OUTPUT_BYTES, BLOCK_BYTES = 8 << 20, 4096
AHEAD_BYTES = 16 << 20


class Output:
    """A file that is written once, from its start to its end, and hashed on the way.

    report: is told of every run of bytes written.
    """

    def __init__(self, path: str, report: Callable[[int], None]):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self._descriptor = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such thing
                raise
            self._direct = 0
            self._descriptor = os.open(path, flags, 0o666)
        self._buffer = _aligned_buffer()
        self._filled = 0
        self._crc32 = 0
        self._report = report

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def copy(self, sources: Sources, run: Run) -> None:
        """Add a run of at most PIECE_BYTES, read to where it is written from."""
        done = 0
        while done < run.nbytes:
            piece = self._buffer[self._filled :][: run.nbytes - done]
            sources.read_into(piece, run.path, run.offset + done)
            self._added(piece)
            done += len(piece)

    def add(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            piece = self._buffer[self._filled :][: len(rest)]
            piece[:] = rest[: len(piece)]
            self._added(piece)
            rest = rest[len(piece) :]

    def finish(self) -> str:
        """Have everything on the disk; returns the CRC-32."""
        whole_blocks = self._filled // BLOCK_BYTES * BLOCK_BYTES
        self._write(self._buffer[:whole_blocks])
        self._leave_direct()
        self._write(self._buffer[whole_blocks : self._filled])
        os.fsync(self._descriptor)
        self._report(self._filled)
        return f"{self._crc32:08x}"

    def _added(self, piece: memoryview) -> None:
        self._crc32 = zlib.crc32(piece, self._crc32)
        self._filled += len(piece)
        if self._filled == OUTPUT_BYTES:
            self._write(self._buffer)
            self._report(self._filled)
            self._filled = 0

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()  # a file system with blocks of another size
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _leave_direct(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~self._direct)
            self._direct = 0


@functools.cache
def _aligned_buffer() -> memoryview:
    """The one that all files of a worker are written from; a mapping starts at a page."""
    return memoryview(mmap.mmap(-1, OUTPUT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@dataclass(frozen=True)
class WriteFile:
    """Write a file and, once it is safe on the disk, its record. A file that has a record is kept if it still fits."""

    path: str
    record: str
    segments: tuple[Segment, ...]

    def do(self, sources: Sources, report: Callable[[int], None]) -> tuple[int, str, bool]:
        """Size, CRC-32, and whether the file was there already. report: is told of every run of bytes done."""
        nbytes = sum(segment.nbytes for segment in self.segments)
        kept = self._kept(sources, nbytes, report)
        if kept:
            return nbytes, kept, True
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with Output(self.path, report) as output:
            for segment in _read_ahead(self.segments, sources):
                if isinstance(segment, Run):
                    output.copy(sources, segment)
                else:
                    for piece in segment.read(sources):
                        output.add(piece)
            crc32 = output.finish()
        size = os.stat(self.path).st_size
        assert size == nbytes, f"{self.path}: {size} bytes written where {nbytes} were planned"
        _write_record(self.record, nbytes, crc32)
        return nbytes, crc32, False

    def _kept(self, sources: Sources, nbytes: int, report: Callable[[int], None]) -> str | None:
        """The CRC-32 of what an earlier run wrote, or None where that is not whole."""
        record = read_record(self.record)
        if record is None or record["bytes"] != nbytes or file_size(self.path) != nbytes:
            return None
        found = _checksum("crc32", sources, self.path, nbytes, lambda _: None)
        if found != record["checksum"]:
            return None
        report(nbytes)
        return found


@dataclass(frozen=True)
class CheckFile:
    """Compare a source with the checksum that its publisher gave it.

    checksum: ALGORITHM:HEXADECIMAL, with the algorithm sha256 or crc32. mend: what to do where it differs.
    """

    path: str
    record: str
    nbytes: int
    checksum: str
    mend: str

    def do(self, sources: Sources, report: Callable[[int], None]) -> tuple[int, str, bool]:
        record = read_record(self.record)
        kept = record is not None and record["checksum"] == self.checksum
        if kept:
            report(self.nbytes)
        else:
            algorithm, _, expected = self.checksum.partition(":")
            found = _checksum(algorithm, sources, self.path, self.nbytes, report)
            if found != expected:
                raise SourceError(f"{self.path} is damaged: its {algorithm} is {found}, not {expected}; {self.mend}")
            _write_record(self.record, self.nbytes, self.checksum)
        return self.nbytes, self.checksum, kept


def _read_ahead(segments: Iterable[Segment], sources: Sources) -> Iterator[Segment]:
    """The same bytes in segments of at most PIECE_BYTES where they are runs, each announced to the system well before
    it is read, so that the disk reads while this process does something else."""
    waiting: deque[Segment] = deque()
    announced = 0
    for segment in segments:
        for piece in segment.cut(PIECE_BYTES) if isinstance(segment, Run) else (segment,):
            if isinstance(piece, Run):
                sources.announce(piece.path, piece.offset, piece.nbytes)
            waiting.append(piece)
            announced += piece.nbytes
            while announced > AHEAD_BYTES:
                announced -= waiting[0].nbytes
                yield waiting.popleft()
    yield from waiting


def read_record(path: str) -> dict | None:
    """What is known of a finished file, or None: there is no record, or its writing was cut short."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def file_size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def write_whole(path: str, data: bytes) -> None:
    """Write a small file and its folder. Not synced."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _write_record(path: str, nbytes: int, checksum: str) -> None:
    # Not synced: a record that is lost costs the writing of its file, and no more.
    write_whole(path, json.dumps({"bytes": nbytes, "checksum": checksum}).encode())


def _checksum(algorithm: str, sources: Sources, path: str, nbytes: int, report: Callable[[int], None]) -> str:
    sha256, crc32 = hashlib.sha256(), 0
    for piece in sources.pieces(path, 0, nbytes):
        if algorithm == "sha256":
            sha256.update(piece)
        else:
            crc32 = zlib.crc32(piece, crc32)
        report(len(piece))
    return sha256.hexdigest() if algorithm == "sha256" else f"{crc32:08x}"


def serve(connection: Connection) -> None:
    """A worker's life: do the jobs that come, until the parent hangs up.

    Answers: ("bytes", n) on the way; then ("done", size, checksum, kept), ("failed", errno, text), ("source", message)
    or ("crash", traceback).
    """

    def report(nbytes: int) -> None:
        connection.send(("bytes", nbytes))

    sources = Sources()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple = ("done", *job.do(sources, report))
        except OSError as error:
            answer = ("failed", error.errno, f"{error.filename or job.path}: {error.strerror}")
        except SourceError as error:
            answer = ("source", str(error))
        except Exception:
            answer = ("crash", traceback.format_exc())
        connection.send(answer)
