"""The worker of `transfer`: writes whole files out of byte ranges of other files.

It is run as a script, by its path, and needs the standard library alone (so it is one file): a worker takes ten
megabytes instead of the hundreds of torch, and starts at once. What a file consists of are its segments, one after the
other. A segment of another module may come along as well: unpickling imports that module, whatever it costs.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

PIECE_BYTES = 4 << 20
# Handed to the disk early, so that the disk works while the next bytes are read and hashed, and not only in fsync.
FLUSH_BYTES = 32 << 20
MAX_OPEN_SOURCES = 64
Buffer = bytes | memoryview


class SourceError(Exception):
    """A source that is not what the plan was made from. The message names the file and the mend."""


class Sources:
    """Open source files and the one buffer that they are read into: a piece is good until the next one is read."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def pieces(self, path: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes [offset, offset + nbytes) of a file. Every piece but the last holds PIECE_BYTES."""
        while nbytes:
            piece = self._buffer[: min(nbytes, PIECE_BYTES)]
            self.read_into(piece, path, offset)
            yield piece
            offset, nbytes = offset + len(piece), nbytes - len(piece)

    def read_into(self, buffer: memoryview, path: str, offset: int) -> None:
        descriptor = self._descriptor(path)
        filled = 0
        while filled < len(buffer):
            try:
                got = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise SourceError(
                    f"{path} cannot be read at byte {offset + filled} ({error.strerror}); copy it again"
                ) from None
            if not got:
                raise SourceError(f"{path} ends at byte {offset + filled}, before what it should hold; copy it again")
            filled += got

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) == MAX_OPEN_SOURCES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


class Segment(Protocol):
    """A run of bytes of an output file. Frozen, picklable; its repr tells it apart from every other one."""

    @property
    def nbytes(self) -> int: ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it is read from."""
        ...

    def read(self, sources: Sources) -> Iterator[Buffer]:
        """The bytes in pieces; a piece may be overwritten as soon as the next one is asked for."""
        ...


class _OfNoFile:
    __slots__ = ()
    paths: tuple[str, ...] = ()


class _OfFile:
    __slots__ = ()
    path: str

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)


@dataclass(frozen=True, slots=True)
class Run(_OfFile):
    """`nbytes` bytes of a file, as they are."""

    path: str
    offset: int
    nbytes: int

    def read(self, sources: Sources) -> Iterator[Buffer]:
        return sources.pieces(self.path, self.offset, self.nbytes)


@dataclass(frozen=True, slots=True)
class Literal(_OfNoFile):
    """Bytes that the plan holds itself."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, sources: Sources) -> Iterator[Buffer]:
        yield self.data


@dataclass(frozen=True, slots=True)
class Zeros(_OfNoFile):
    nbytes: int

    def read(self, sources: Sources) -> Iterator[Buffer]:
        piece = bytes(min(self.nbytes, PIECE_BYTES))
        for start in range(0, self.nbytes, PIECE_BYTES):
            yield piece[: self.nbytes - start]


@dataclass(frozen=True, slots=True)
class Strided(_OfFile):
    """A view of a file, row by row: elements of `itemsize` bytes, the first of them at `offset`.

    shape, strides: of the view, in elements, one or two dims; strides are not negative. Holds the whole range of the
    file that the view spans in memory.
    """

    path: str
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import numpy  # no other segment needs it

        span = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides))
        whole = memoryview(bytearray(span * self.itemsize))
        sources.read_into(whole, self.path, self.offset)
        dtype, strides = numpy.dtype(f"u{self.itemsize}"), tuple(stride * self.itemsize for stride in self.strides)
        view: numpy.ndarray = numpy.ndarray(self.shape, dtype, whole, strides=strides)
        # So few rows at a time that the cache lines of a column are still there when its neighbour is read.
        for start in range(0, self.shape[0], 64):
            yield numpy.ascontiguousarray(view[start : start + 64]).reshape(-1).view(numpy.uint8).data


@dataclass(frozen=True, slots=True)
class Cast:
    """Another segment in another floating-point type. source, target: names of torch dtypes.

    tensor: the name to tell where a number does not fit the new type.
    """

    inner: Run | Strided
    source: str
    target: str
    tensor: str

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes // _ITEMSIZE[self.source] * _ITEMSIZE[self.target]

    @property
    def paths(self) -> tuple[str, ...]:
        return self.inner.paths

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import torch  # no other segment needs it

        torch.set_num_threads(1)  # the workers use the cores
        source, target = getattr(torch, self.source), getattr(torch, self.target)
        for piece in self.inner.read(sources):
            before = torch.frombuffer(piece, dtype=source)
            after = before.to(target)
            if torch.isinf(after).sum() != torch.isinf(before).sum():
                text = f"{self.tensor} in {self.inner.path} holds numbers too large for {self.target}"
                raise SourceError(f"{text}; choose another --dtype")
            yield after.view(torch.uint8).numpy().data


_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class WriteFile:
    """Write a file and, once it is safe on the disk, its record. A file that has a record is kept if it still fits."""

    path: str
    record: str
    segments: tuple[Segment, ...]

    def do(self, sources: Sources, report: Callable[[int], None]) -> tuple[int, str, bool]:
        """Size, sha256, and whether the file was there already. report: is told of every run of bytes done."""
        nbytes = sum(segment.nbytes for segment in self.segments)
        kept = self._kept(sources, nbytes, report)
        if kept:
            return nbytes, kept, True
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            pieces = (piece for segment in self.segments for piece in segment.read(sources))
            digest = _write(descriptor, pieces, report)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        size = os.stat(self.path).st_size
        assert size == nbytes, f"{self.path}: {size} bytes written where {nbytes} were planned"
        _write_record(self.record, nbytes, digest)
        return nbytes, digest, False

    def _kept(self, sources: Sources, nbytes: int, report: Callable[[int], None]) -> str | None:
        """The sha256 of what an earlier run wrote, or None where that is not whole."""
        record = read_record(self.record)
        if record is None or record["bytes"] != nbytes or file_size(self.path) != nbytes:
            return None
        found = _sha256(sources, self.path, nbytes, lambda _: None)
        if found != record["sha256"]:
            return None
        report(nbytes)
        return found


@dataclass(frozen=True)
class CheckFile:
    """Compare a source with the checksum that its publisher gave it. mend: what to do where it differs."""

    path: str
    record: str
    nbytes: int
    sha256: str
    mend: str

    def do(self, sources: Sources, report: Callable[[int], None]) -> tuple[int, str, bool]:
        record = read_record(self.record)
        kept = record is not None and record["sha256"] == self.sha256
        if kept:
            report(self.nbytes)
        else:
            found = _sha256(sources, self.path, self.nbytes, report)
            if found != self.sha256:
                raise SourceError(f"{self.path} is damaged: its sha256 is {found}, not {self.sha256}; {self.mend}")
            _write_record(self.record, self.nbytes, found)
        return self.nbytes, self.sha256, kept


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
        _write(descriptor, [data], lambda _: None)
    finally:
        os.close(descriptor)


def _write_record(path: str, nbytes: int, sha256: str) -> None:
    # Not synced: a record that is lost costs the writing of its file, and no more.
    write_whole(path, json.dumps({"bytes": nbytes, "sha256": sha256}).encode())


def _write(descriptor: int, pieces: Iterable[Buffer], report: Callable[[int], None]) -> str:
    """Write all pieces; returns their sha256."""
    digest = hashlib.sha256()
    written = flushed = 0
    for piece in pieces:
        digest.update(piece)
        rest = memoryview(piece)
        while rest:
            done = os.write(descriptor, rest)
            rest, written = rest[done:], written + done
        if written - flushed >= FLUSH_BYTES:
            if hasattr(os, "posix_fadvise"):  # on Linux this starts the writing of the range, without waiting for it
                os.posix_fadvise(descriptor, flushed, written - flushed, os.POSIX_FADV_DONTNEED)
            report(written - flushed)
            flushed = written
    report(written - flushed)
    return digest.hexdigest()


def _sha256(sources: Sources, path: str, nbytes: int, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for piece in sources.pieces(path, 0, nbytes):
        digest.update(piece)
        report(len(piece))
    return digest.hexdigest()


def serve(connection: Connection, parent: int) -> None:
    """A worker's life: do the jobs that come, until the parent hangs up or is gone.

    Answers: ("bytes", n) on the way; then ("done", size, sha256, kept), ("failed", errno, text), ("source", message)
    or ("crash", traceback).
    """

    def report(nbytes: int) -> None:
        if os.getppid() != parent:  # killed: its successor may start at any time
            os._exit(1)
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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # Jobs are pickled under this module's full name; importing it that way would import all of the package with it.
    sys.modules["isoloss.models.transfer_worker"] = sys.modules["__main__"]
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent may be gone
        sys.path[:] = connection.recv()
        serve(connection, int(sys.argv[2]))


if __name__ == "__main__":
    main()
