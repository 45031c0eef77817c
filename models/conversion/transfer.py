"""Writing a folder of large files, made of others: in parallel, atomically, and again after a kill.

A plan names every file and what it consists of beforehand; `run` makes it come true:

    .NAME.partial/lock            held by a run
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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from isoloss.models.conversion.hashed_file import write_whole
from isoloss.models.conversion.plan import FilePlan, Source
from isoloss.models.conversion.workers import Work
from isoloss.models.weights.manifest import FileRecord, sync
from isoloss.parallel.runtime.errors import UserError

# Two threads a core: one hashes while the other waits for the disk. More than these are more than a disk needs.
MAX_WORKERS = 16
AGAIN = "what is finished is kept: run the same command again to go on"


@dataclass(frozen=True)
class Report:
    """The result of a transfer. nbytes: size of the target without manifest; kept: bytes written by an earlier run."""

    nbytes: int
    kept: int
    seconds: float


def run(plan: FilePlan, target: str | Path, *, workers: int | None = None, label: str = "writing") -> Report:
    """Make `target`, a folder that does not exist yet.

    workers: threads; default two a core.

    Whatever happens, `target` is absent or complete, and what is finished is kept for the next run, except where a
    source turns out to be damaged.
    Raises UserError where target exists, another run writes it, a source is damaged or changes, or the disk is full or
    fails.
    """
    started = time.perf_counter()
    target, partial = check_target(target)
    identity = _identity(plan)
    _check_sources(plan)
    _check_space(plan, target, partial)
    work = Work(plan, partial)
    try:
        with _locked(partial):
            check_target(target)  # another run may have finished it in the meantime
            of_plan = partial / "plan"
            if not of_plan.is_file() or of_plan.read_text() != identity:
                _clear(partial)
                write_whole(of_plan, identity.encode())
            try:
                work.do(_num_threads(plan, workers), label)
                _check_sources(plan)
            except UserError:
                shutil.rmtree(partial)  # nothing that came from a damaged file is worth keeping
                raise
            _publish(plan, work.records, partial / "files", target)
            shutil.rmtree(partial)
    except OSError as error:
        raise UserError(_disk_trouble(error, plan, target, work.records)) from None
    return Report(plan.nbytes, work.kept, time.perf_counter() - started)


def check_target(target: str | Path) -> tuple[Path, Path]:
    """The target and the folder that it is made in. Raises UserError where the target exists."""
    target = Path(os.path.abspath(target))
    partial = target.with_name(f".{target.name}.partial")
    if os.path.lexists(target):
        if not (partial / "files").exists():  # of a run that was killed right after its rename
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{target} exists already; choose another folder to write to, or delete it")
    return target, partial


def _identity(plan: FilePlan) -> str:
    """A hash that changes with any byte that the plan would write and with any touch of a source before it was made."""
    digest = hashlib.sha256()
    for file in plan.files:
        digest.update(f"\nfile {file.name}\n".encode())
        for part in file.contents:
            digest.update(part if isinstance(part, bytes) else repr(part).encode())
    for source in plan.sources:
        digest.update(f"\n{source}".encode())
    return digest.hexdigest()


def _check_sources(plan: FilePlan) -> None:
    for source in plan.sources:
        if Source.of(source.path, source.checksum, source.mend) != source:
            raise UserError(f"{source.path} changed while it was read; run the same command again")


def _check_space(plan: FilePlan, target: Path, partial: Path) -> None:
    """Raise UserError without enough free space; files of an earlier run are kept or overwritten and need none."""
    written = sum(path.stat().st_size for path in (partial / "files").rglob("*") if path.is_file())
    folder = _existing(target)
    free, needed = shutil.disk_usage(folder).free, plan.nbytes - written
    if needed > free:
        raise UserError(
            f"{target} needs {needed:,} more bytes and {folder} has {free:,} free; make room or choose another disk"
        )


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the lock of a partial folder. The system takes it from a process that ends, however that ends."""
    while (descriptor := _try_lock(partial)) is None:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(partial: Path) -> int | None:
    """None where the run that had it has deleted it meanwhile."""
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{partial} is being written by another process; wait until it is done") from None
    os.close(descriptor)
    return None


def _clear(partial: Path) -> None:
    """Forget an earlier run. The plan goes last: while it is there, so is what belongs to it."""
    for name in ("journal", "files"):
        shutil.rmtree(partial / name, ignore_errors=True)
    (partial / "plan").unlink(missing_ok=True)


def _publish(plan: FilePlan, records: Mapping[str, FileRecord], files: Path, target: Path) -> None:
    """Manifest last, everything on the disk, then the one rename."""
    name, text = plan.manifest
    write_whole(files / name, text({file.name: records[file.name] for file in plan.files}).encode())
    sync(files / name)
    for folder, _, _ in os.walk(files):
        sync(folder)
    os.rename(files, target)
    sync(target.parent)


def _num_threads(plan: FilePlan, asked: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(asked or min(2 * cores, MAX_WORKERS), len(plan.files))


def _disk_trouble(error: OSError, plan: FilePlan, target: Path, records: Mapping[str, FileRecord]) -> str:
    text = f"{error.filename or target}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = plan.nbytes - sum(record.bytes for record in records.values())
        free = shutil.disk_usage(_existing(target)).free
        return f"{text}: the rest needs {needed:,} bytes and {free:,} are free; make room, {AGAIN}"
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return f"{text}; {'check the permissions' if refused else 'check the disk'}; {AGAIN}"


def _existing(target: Path) -> Path:
    return next(folder for folder in target.parents if folder.exists())
