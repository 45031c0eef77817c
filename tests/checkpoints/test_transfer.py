"""Files made out of ranges of others: right, in one step, and again after every kind of interruption."""

import fcntl
import io
import json
import os
import re
import signal
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.faults.faults import DISK_BROKEN, DISK_FULL, struck
from support.runs.waiting import until

from isoloss.models.conversion import hashed_file, transfer
from isoloss.models.conversion.hashed_file import HashedFile
from isoloss.models.conversion.plan import FilePlan, OutputFile, Source
from isoloss.models.conversion.transfer import run
from isoloss.models.conversion.workers import Work
from isoloss.models.weights.manifest import files_to_json
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Run:
    """Bytes of a file, in blocks of 1000, that the disk gives one at a time."""

    path: Path
    start: int
    nbytes: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def blocks(self) -> Iterator[torch.Tensor | bytes]:
        data = self.path.read_bytes()[self.start : self.start + self.nbytes]
        for at in range(0, len(data), 1000):
            block = bytearray(data[at : at + 1000])
            yield torch.frombuffer(block, dtype=torch.uint8) if at % 2000 else bytes(block)


@dataclass(frozen=True)
class Slow:
    """Takes half a minute, if it may."""

    nbytes: int
    paths: tuple = ()

    def blocks(self) -> Iterator[bytes]:
        for _ in range(600):
            time.sleep(0.05)
            yield bytes(64 << 10)


def sources(folder: Path, count: int = 2, size: int = 5000) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"source{k}" for k in range(count)]
    for k, path in enumerate(paths):
        path.write_bytes(bytes((17 * i + k) % 251 for i in range(size)))
    return paths


def crc32_of(data: bytes) -> str:
    return f"crc32:{zlib.crc32(data):08x}"


def manifest(records) -> str:
    return json.dumps({"files": files_to_json(records)})


def plan_of(files: dict[str, tuple], known: tuple[Source, ...] = ()) -> FilePlan:
    return FilePlan(
        tuple(OutputFile(name, contents) for name, contents in files.items()), known, ("manifest.json", manifest)
    )


def example(folder: Path, checksums: bool = False, touch: bool = True) -> tuple[FilePlan, dict[str, bytes]]:
    """A plan of three files from two sources, and what they must hold."""
    a, b = sources(folder) if touch else (folder / "source0", folder / "source1")
    files = {
        "one.bin": (b"header", Run(a, 10, 4000), bytes(7)),
        "two.bin": (b, Run(a, 0, 1)),
        "sub/three.bin": (Run(b, 4999, 1),),
    }
    expected = {
        "one.bin": b"header" + a.read_bytes()[10:4010] + bytes(7),
        "two.bin": b.read_bytes() + a.read_bytes()[:1],
        "sub/three.bin": b.read_bytes()[4999:],
    }
    known = tuple(Source.of(path, crc32_of(path.read_bytes()) if checksums else None) for path in (a, b))
    return plan_of(files, known), expected


def check_complete(target: Path, expected: dict[str, bytes]) -> None:
    found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    records = json.loads(found.pop("manifest.json"))["files"]
    assert found == expected
    assert records == {
        name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} for name, data in expected.items()
    }


def test_files_and_manifest(tmp_path, capfd):
    plan, expected = example(tmp_path / "in", checksums=True)
    report = run(plan, tmp_path / "new" / "out")
    check_complete(tmp_path / "new" / "out", expected)
    assert os.listdir(tmp_path / "new") == ["out"]
    assert (report.nbytes, report.kept) == (plan.nbytes, 0) and report.seconds > 0
    assert capfd.readouterr() == ("", "")  # nothing is said of what is short


def test_contents_of_any_size_fill_one_file(tmp_path, monkeypatch):
    """Tensors of any stride and type, larger than a piece and smaller, that the disk takes bit by bit."""
    take = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: take(descriptor, data[:10_000]))
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 200 << 10)
    whole = torch.randn(70, 1234)
    contents = [
        b"123",
        whole,
        whole.T,
        whole.bfloat16()[:, 1::2],
        whole.half().T[::3],
        b"",
        bytes(65536),
        whole[:0],
        b"4",
    ]
    expected = b"".join(
        part
        if isinstance(part, bytes)
        else part.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        for part in contents
    )
    reported: list[int] = []
    with HashedFile(tmp_path / "f", reported.append) as file:
        for part in contents:
            file.add(part)
        assert file.finish() == f"{zlib.crc32(expected):08x}"
    assert (tmp_path / "f").read_bytes() == expected and sum(reported) == len(expected)


def test_an_existing_target_is_refused_and_left_alone(tmp_path):
    plan, _ = example(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"out exists already; choose another folder"):
        run(plan, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"] and not os.listdir(tmp_path / "out")


def test_too_little_room_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"out needs 1,152,921,504,606,846,976 more bytes and .* has [\d,]+ free"):
        run(plan_of({"f": (Slow(1 << 60),)}), tmp_path / "a" / "out")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("algorithm", ["crc32", "sha256"])
def test_a_damaged_source_is_named_and_leaves_nothing(tmp_path, algorithm):
    path, other = sources(tmp_path / "in", size=3 << 20)
    data = bytearray(path.read_bytes())
    good = {"crc32": f"{zlib.crc32(data):08x}", "sha256": sha256(data).hexdigest()}[algorithm]
    files = {"one": (other,), "two": (path,)}
    run(plan_of(files, (Source.of(path, f"{algorithm}:{good}"),)), tmp_path / "in" / "good")
    data[2500] ^= 1
    path.write_bytes(data)
    match = rf"in/source0 is damaged: its {algorithm} is \w+, not {good}; copy it again"
    with pytest.raises(UserError, match=match):
        run(plan_of(files, (Source.of(path, f"{algorithm}:{good}"),)), tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    """On a disk that fails: it opens, and reading it is an error."""
    path = tmp_path / "source"
    path.write_bytes(b"123")
    known = (Source.of(path, "crc32:00000000"),)
    failing = mock.patch.object(Path, "open", lambda *_, **__: Failing())
    with failing, pytest.raises(UserError, match=r"source cannot be read \(Input/output error\); copy it again"):
        run(plan_of({"f": (path,)}, known), tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


class Failing(io.BytesIO):
    def readinto(self, buffer) -> int:
        raise OSError(DISK_BROKEN, os.strerror(DISK_BROKEN))


def test_a_source_that_is_too_short_is_named(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"12345")
    plan = plan_of({"f": (path,)}, (Source.of(path),))
    path.write_bytes(b"1234")
    with pytest.raises(UserError, match=r"source changed while it was read; run the same command again"):
        run(plan, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_source_that_changes_is_refused(tmp_path, monkeypatch, when):
    plan, _ = example(tmp_path / "in")
    do = Work.do

    def touched(*args):
        do(*args)
        os.utime(tmp_path / "in" / "source0")

    if when == "before":
        os.utime(tmp_path / "in" / "source0")
    else:
        monkeypatch.setattr(Work, "do", touched)
    with pytest.raises(UserError, match="source0 changed while it was read"):
        run(plan, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_another_run_of_the_same_target_is_refused(tmp_path):
    plan, expected = example(tmp_path / "in")
    (tmp_path / ".out.partial").mkdir()
    with (tmp_path / ".out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"\.out\.partial is being written by another process"):
            run(plan, tmp_path / "out")
    run(plan, tmp_path / "out")
    check_complete(tmp_path / "out", expected)


def strike(
    plan: FilePlan, target: Path, at: int | None, fault: str | int = "kill", workers: int = 1
) -> tuple[str, int]:
    return struck(partial(run, plan, target, workers=workers), at, fault)


def interrupted(plan: FilePlan, target: Path) -> None:
    """Leave what a run leaves that ends right before the rename."""
    failing = mock.patch.object(os, "rename", side_effect=OSError(DISK_BROKEN, "gone"))
    with failing, pytest.raises(UserError, match="gone; check the disk; what is finished is kept"):
        run(plan, target)


def test_finished_files_are_kept_unless_they_changed(tmp_path):
    plan, expected = example(tmp_path / "in")
    target, files = tmp_path / "out", tmp_path / ".out.partial" / "files"
    interrupted(plan, target)
    data = bytearray((files / "two.bin").read_bytes())
    data[77] ^= 8
    (files / "two.bin").write_bytes(data)
    untouched = (files / "one.bin").stat()
    report = run(plan, target)
    assert report.kept == len(expected["one.bin"]) + len(expected["sub/three.bin"])
    assert (target / "one.bin").stat().st_ino == untouched.st_ino
    assert (target / "one.bin").stat().st_mtime_ns == untouched.st_mtime_ns
    check_complete(target, expected)
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("change", ["plan", "source"])
def test_another_plan_starts_anew(tmp_path, change):
    plan, expected = example(tmp_path / "in")
    interrupted(plan, tmp_path / "out")
    (tmp_path / ".out.partial" / "files" / "stray").write_text("of the old plan")
    if change == "plan":
        plan = FilePlan(plan.files[:2], plan.sources, plan.manifest)
        del expected["sub/three.bin"]
    else:
        os.utime(tmp_path / "in" / "source0")
        plan, _ = example(tmp_path / "in", touch=False)
    assert run(plan, tmp_path / "out").kept == 0
    check_complete(tmp_path / "out", expected)


def test_killed_at_any_operation_the_target_is_absent_or_complete_and_the_next_run_finishes(tmp_path):
    plan, expected = example(tmp_path / "in", checksums=True)
    ended, count = strike(plan, tmp_path / "whole", None, workers=2)
    assert ended == "done" and count >= 50
    seen, killed = set(), 0
    for point in range(count):
        target = tmp_path / f"out{point}"
        ended, _ = strike(plan, target, point, workers=2)
        assert ended in ("killed", "done")  # two threads may need an operation less than they did before
        killed += ended == "killed"
        seen.add(target.exists())
        if not target.exists():
            assert strike(plan, target, None, workers=2)[0] == "done"
        else:
            with pytest.raises(UserError, match="exists already"):
                run(plan, target)
        check_complete(target, expected)
        assert not (tmp_path / f".out{point}.partial").exists()
    assert seen == {True, False} and killed >= 50


def test_killed_again_and_again_it_still_gets_there(tmp_path):
    plan, expected = example(tmp_path / "in")
    target = tmp_path / "out"
    for point in range(5, 500):
        assert strike(plan, target, point)[0] == "killed"
        if target.exists():
            break
    check_complete(target, expected)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            DISK_FULL,
            r"two\.bin: No space left on device: the rest needs 5,002 bytes and [\d,]+ are free; make room,",
        ),
        (DISK_BROKEN, r"two\.bin: Input/output error; check the disk;"),
    ],
)
def test_a_disk_that_fails_at_any_operation_ends_the_run_in_one_line(tmp_path, fault, text):
    plan, expected = example(tmp_path / "in")
    _, count = strike(plan, tmp_path / "whole", None)
    said = []
    for point in range(count):
        target = tmp_path / f"out{point}"
        said.append(strike(plan, target, point, fault)[0])
        if not target.exists():
            assert strike(plan, target, None)[0] == "done"
            check_complete(target, expected)
    assert not [line for line in said if "\n" in line]
    again = "what is finished is kept: run the same command again to go on"
    assert any(re.search(f"{text} {again}", line) for line in said)


def test_nothing_holds_the_lock_of_a_run_that_was_killed(tmp_path):
    """Not even a thread that waits for a disk."""
    os.mkfifo(tmp_path / "never")  # opening it blocks the thread, as nobody writes
    plan = plan_of({"f": (tmp_path / "never",)})
    pid = os.fork()
    if not pid:
        run(plan, tmp_path / "out", workers=1)
        os._exit(0)
    begun = tmp_path / ".out.partial" / "files" / "f"
    until(begun.exists, "the thread had begun to write")
    with pytest.raises(UserError, match=r"is being written by another process"):
        run(plan, tmp_path / "out")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with (tmp_path / ".out.partial" / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (tmp_path / "out").exists()


def test_the_first_failure_ends_the_others(tmp_path):
    """Or a mistake that is found at once would be told after hours."""
    (path,) = sources(tmp_path / "in", 1)
    slow = Slow(600 << 16)
    plan = plan_of({"one": (slow,), "two": (path,), "three": (slow,)}, (Source.of(path, "crc32:00000000"),))
    started = time.monotonic()
    with pytest.raises(UserError, match="source0 is damaged"):
        run(plan, tmp_path / "out", workers=2)
    assert time.monotonic() - started < 15
    assert os.listdir(tmp_path) == ["in"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Else a power failure leaves the name of a folder whose files are not there."""
    order, rename, sync = [], os.rename, transfer.sync
    monkeypatch.setattr(transfer, "sync", lambda path: (order.append(Path(path).name), sync(path)))
    monkeypatch.setattr(os, "rename", lambda *paths: (order.append("rename"), rename(*paths)))
    plan, _ = example(tmp_path / "in")
    run(plan, tmp_path / "out")
    assert order == ["manifest.json", "files", "sub", "rename", tmp_path.name]
