"""Writing a folder of large files out of byte ranges of others: in parallel, atomically, and again after a kill.

A plan names every byte beforehand; `run` makes it come true:

    .NAME.partial/lock            held by a run and by each of its workers
    .NAME.partial/plan            hash of the plan and of the identity of its sources
    .NAME.partial/journal/...     a record for each finished file: size and checksum
    .NAME.partial/files/...       the files; renamed to NAME at the end, in one step

A run that finds the same plan there keeps the files that are finished, and writes the others.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from isoloss.models.conversion.segments import Literal, Segment
from isoloss.models.conversion.worker import CheckFile, WriteFile, write_whole
from isoloss.models.conversion.workers import Workers
from isoloss.models.weights.manifest import FileRecord, sync
from isoloss.parallel.errors import UserError

LOCK_SECONDS = 10.0
# Two workers a core: one hashes while the other waits for the disk. More than these are more than a disk needs.
MAX_WORKERS = 16
AGAIN = "what is finished is kept: run the same command again to go on"


@dataclass(frozen=True)
class OutputFile:
    """name: relative to the target, with "/". segments: what it consists of, one after the other."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class Source:
    """A file that is read.

    checksum: what its publisher gave, as sha256:HEX or crc32:HEX, to be checked; mend: what to do where it differs.
    """

    path: str
    checksum: str | None = None
    mend: str = "copy it again"


@dataclass(frozen=True)
class Plan:
    """files: written by the workers, in about this order. sources: every file that they are read from.

    manifest: name of the last file, and its text from the records of all others.
    """

    files: tuple[OutputFile, ...]
    sources: tuple[Source, ...]
    manifest: tuple[str, Callable[[Mapping[str, FileRecord]], str]]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class Report:
    """nbytes: of the target without its manifest; kept: how many of them an earlier run had written."""

    nbytes: int
    kept: int
    seconds: float


def run(plan: Plan, target: str | Path, *, workers: int | None = None, label: str = "writing") -> Report:
    """Make `target`, a folder that does not exist yet. workers: processes; default two a core.

    Whatever happens, `target` is absent or complete, and what is finished is kept for the next run, except where a
    source turns out to be damaged.
    Raises UserError where target exists, another run writes it, a source is damaged or changes, the disk is full or
    fails, or a worker is killed.
    """
    started = time.perf_counter()
    target, partial = check_target(target)
    identity = _identity(plan)
    _check_space(plan, target, partial)
    try:
        with _locked(partial) as lock:
            check_target(target)  # another run may have finished it in the meantime
            if _read_text(partial / "plan") != identity:
                _clear(partial)
                write_whole(str(partial / "plan"), identity.encode())
            records, kept = _work(plan, partial, lock, _worker_count(plan, workers), label)
            if _identity(plan) != identity:
                shutil.rmtree(partial)
                raise UserError("a source changed while it was read; run the same command again")
            _publish(plan, records, partial / "files", target)
            shutil.rmtree(partial)
    except OSError as error:
        raise UserError(_machine_trouble(error.errno or 0, f"{error.filename or target}: {error.strerror}")) from None
    return Report(plan.nbytes, kept, time.perf_counter() - started)


def check_target(target: str | Path) -> tuple[Path, Path]:
    """The target and the folder that it is made in. Raises UserError where the target exists."""
    target = Path(os.path.abspath(target))
    partial = target.with_name(f".{target.name}.partial")
    if os.path.lexists(target):
        if not (partial / "files").exists():  # of a run that was killed right after its rename
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{target} exists already; choose another folder to write to, or delete it")
    return target, partial


def _identity(plan: Plan) -> str:
    """A hash that changes with any byte that the plan would write and with any touch of a source."""
    digest = hashlib.sha256()
    for file in plan.files:
        digest.update(f"\nfile {file.name}\n".encode())
        for segment in file.segments:
            digest.update(segment.data if isinstance(segment, Literal) else repr(segment).encode())
    for source in plan.sources:
        status = os.stat(source.path)
        digest.update(f"\n{source} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _check_space(plan: Plan, target: Path, partial: Path) -> None:
    """What an earlier run wrote is kept or overwritten, so it needs no new room."""
    written = sum(path.stat().st_size for path in (partial / "files").rglob("*") if path.is_file())
    existing = next(folder for folder in target.parents if folder.exists())
    free, needed = shutil.disk_usage(existing).free, plan.nbytes - written
    if needed > free:
        raise UserError(
            f"{target} needs {needed:,} more bytes and {existing} has {free:,} free; make room or choose another disk"
        )


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[int]:
    """Hold the lock of a partial folder; yields its descriptor. The workers inherit it, so that it lasts as long as
    the last of them, whatever becomes of this process."""
    deadline = time.monotonic() + LOCK_SECONDS  # the workers of a run that was killed need a moment to see it
    while (descriptor := _try_lock(partial)) is None:
        if time.monotonic() > deadline:
            raise UserError(f"{partial} is being written by another process; wait until it is done")
        time.sleep(0.1)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(partial: Path) -> int | None:
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else a run that ended has deleted it
            return descriptor
    os.close(descriptor)
    return None


def _clear(partial: Path) -> None:
    """Forget an earlier run. The plan goes last: while it is there, so is what belongs to it."""
    for name in ("journal", "files"):
        shutil.rmtree(partial / name, ignore_errors=True)
    (partial / "plan").unlink(missing_ok=True)


def _work(plan: Plan, partial: Path, lock: int, num_workers: int, label: str) -> tuple[dict[str, FileRecord], int]:
    """Have all jobs done; returns the records of the files, and how many bytes were there already."""
    jobs = list(_jobs(plan, partial))
    total = plan.nbytes + sum(job.nbytes for _, job in jobs if isinstance(job, CheckFile))
    records: dict[str, FileRecord] = {}
    kept_bytes = 0
    bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
    with bar, Workers(num_workers, lock, AGAIN) as workers:
        for file, answer in workers.answers(jobs, bar.update):
            if answer[0] == "done":
                _, nbytes, checksum, kept = answer
                if file is not None:
                    records[file.name] = FileRecord(nbytes, checksum)
                    kept_bytes += nbytes * kept
            elif answer[0] == "source":
                workers.kill()
                shutil.rmtree(partial)  # nothing that came from a damaged file is worth keeping
                raise UserError(answer[1])
            elif answer[0] == "failed":
                _, number, text = answer
                if number in (errno.ENOSPC, errno.EDQUOT):
                    raise UserError(_disk_full(plan, partial, records, text))
                raise UserError(_machine_trouble(number, text))
            else:
                raise RuntimeError(answer[1])
    return records, kept_bytes


def _jobs(plan: Plan, partial: Path) -> Iterator[tuple[OutputFile | None, WriteFile | CheckFile]]:
    """What the workers do, in order, with the file that each job is about. A source is checked right before the first
    file that is made of it, so that it is read from the disk once."""
    unchecked = {source.path: source for source in plan.sources if source.checksum}
    for file in plan.files:
        for path in dict.fromkeys(path for segment in file.segments for path in segment.paths):
            if source := unchecked.pop(path, None):
                record = partial / "journal" / "sources" / hashlib.sha256(path.encode()).hexdigest()
                yield None, CheckFile(path, str(record), os.stat(path).st_size, source.checksum or "", source.mend)
        yield file, WriteFile(_file_path(partial, file), _record_path(partial, file), file.segments)


def _publish(plan: Plan, records: Mapping[str, FileRecord], files: Path, target: Path) -> None:
    """Manifest last, everything on the disk, then the one rename."""
    name, text = plan.manifest
    write_whole(str(files / name), text({file.name: records[file.name] for file in plan.files}).encode())
    sync(files / name)
    for folder, _, _ in os.walk(files):
        sync(folder)
    os.rename(files, target)
    sync(target.parent)


def _worker_count(plan: Plan, asked: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(asked or min(2 * cores, MAX_WORKERS), len(plan.files))


def _disk_full(plan: Plan, partial: Path, records: Mapping[str, FileRecord], text: str) -> str:
    needed = plan.nbytes - sum(record.bytes for record in records.values())
    free = shutil.disk_usage(partial).free
    return f"{text}: the rest needs {needed:,} bytes and {free:,} are free; make room, {AGAIN}"


def _machine_trouble(number: int, text: str) -> str:
    mend = "check the permissions" if number in (errno.EACCES, errno.EPERM, errno.EROFS) else "check the disk"
    return f"{text}; {mend}; {AGAIN}"


def _file_path(partial: Path, file: OutputFile) -> str:
    return str(partial / "files" / file.name)


def _record_path(partial: Path, file: OutputFile) -> str:
    return str(partial / "journal" / "files" / f"{file.name}.json")


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None
