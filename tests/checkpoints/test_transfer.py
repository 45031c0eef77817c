"""Files made out of ranges of others: right, in one step, and again after every kind of interruption."""

import fcntl
import io
import json
import os
import re
import signal
import struct
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.faults import DISK_BROKEN, DISK_FULL, struck
from support.waiting import until

from isoloss.models.conversion import segments, transfer, workers
from isoloss.models.conversion.segments import Cast, Literal, Run, Strided, Zeros
from isoloss.models.conversion.transfer import OutputFile, Plan, Source, run
from isoloss.models.weights.manifest import files_to_json
from isoloss.parallel.errors import UserError


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


def plan_of(files: dict[str, tuple], read=(), **known) -> Plan:
    outputs = tuple(OutputFile(name, segments) for name, segments in files.items())
    return Plan(outputs, tuple(Source(str(path), **known) for path in read), ("manifest.json", manifest))


def example(folder: Path, checksums: bool = False) -> tuple[Plan, dict[str, bytes]]:
    """A plan of three files from two sources, and what they must hold."""
    a, b = sources(folder)
    files = {
        "one.bin": (Literal(b"header"), Run(str(a), 10, 4000), Zeros(7)),
        "two.bin": (Run(str(b), 0, 5000), Run(str(a), 0, 1)),
        "sub/three.bin": (Run(str(b), 4999, 1),),
    }
    expected = {
        "one.bin": b"header" + a.read_bytes()[10:4010] + bytes(7),
        "two.bin": b.read_bytes() + a.read_bytes()[:1],
        "sub/three.bin": b.read_bytes()[4999:],
    }
    plan = plan_of(files)
    known = tuple(Source(str(path), crc32_of(path.read_bytes()) if checksums else None) for path in (a, b))
    return Plan(plan.files, known, plan.manifest), expected


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
    assert capfd.readouterr() == ("", "")  # no progress bar where nobody watches


def test_a_terminal_sees_progress(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    path = tmp_path / "source"
    path.write_bytes(bytes(50_000_000))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(plan_of({"f": (Run(str(path), 0, 50_000_000),)}), tmp_path / "out", label="moving")
    assert re.search(r"moving: 100%.*50\.0M/50\.0M \[\d+:\d+<\d+:\d+, +[\d.]+[MG]B/s\]", terminal.getvalue())


def test_large_ranges_cross_pieces(tmp_path):
    size = 3 * segments.PIECE_BYTES + 12345
    data = os.urandom(1000) * (size // 1000 + 1)
    (tmp_path / "source").write_bytes(data)
    path = str(tmp_path / "source")
    run(plan_of({"f": (Run(path, 3, size - 3), Zeros(size), Run(path, 0, 5))}), tmp_path / "out", workers=1)
    assert (tmp_path / "out" / "f").read_bytes() == data[3:size] + bytes(size) + data[:5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [slice(0, None, 2), slice(1, None, 2), slice(None)])
def test_strided_is_the_transposed_view(tmp_path, dtype, columns):
    tensor = torch.randn(70, 134).to(dtype)
    view = tensor.T[columns]
    path, itemsize = tmp_path / "source", tensor.itemsize
    path.write_bytes(b"123" + tensor.view(torch.uint8).numpy().tobytes())
    offset = 3 + view.storage_offset() * itemsize
    segment = Strided(str(path), offset, itemsize, tuple(view.shape), view.stride())
    assert segment.nbytes == view.nbytes
    run(plan_of({"f": (segment,)}), tmp_path / "out")
    assert (tmp_path / "out" / "f").read_bytes() == view.contiguous().view(torch.uint8).numpy().tobytes()


def test_cast(tmp_path):
    path = tmp_path / "source"
    tensor = torch.randn(3 * segments.PIECE_BYTES // 4 + 5)
    tensor[:2] = torch.tensor([torch.inf, torch.nan])
    path.write_bytes(tensor.numpy().tobytes())
    inner = Run(str(path), 0, tensor.nbytes)
    segment = Cast(inner, "float32", "bfloat16", "w")
    assert segment.nbytes == tensor.nbytes // 2
    run(plan_of({"f": (segment,)}), tmp_path / "out")
    found = (tmp_path / "out" / "f").read_bytes()
    assert found == tensor.bfloat16().view(torch.uint8).numpy().tobytes()
    path.write_bytes(struct.pack("f", 70000.0))
    too_large = Cast(Run(str(path), 0, 4), "float32", "float16", "w")
    with pytest.raises(UserError, match=r"w in .*source holds numbers too large for float16; choose another --dtype"):
        run(plan_of({"f": (too_large,)}), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_workers_are_small(tmp_path):
    """A worker that imported torch would take over a hundred megabytes."""
    (tmp_path / "probe.py").write_text(PROBE)
    sys.path.insert(0, str(tmp_path))
    try:
        import probe

        run(plan_of({"f": (probe.Anonymous(),)}), tmp_path / "out")
    finally:
        sys.path.remove(str(tmp_path))
    kilobytes = int((tmp_path / "out" / "f").read_text().split()[1])
    assert 1000 < kilobytes < 30_000


PROBE = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Anonymous:
    nbytes: int = 64
    paths: tuple = ()
    def read(self, sources):
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith("RssAnon")]
        yield line.ljust(64).encode()
"""


def test_an_existing_target_is_refused_and_left_alone(tmp_path):
    plan, _ = example(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"out exists already; choose another folder"):
        run(plan, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"] and not os.listdir(tmp_path / "out")


def test_too_little_room_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"out needs 1,152,921,504,606,846,976 more bytes and .* has [\d,]+ free"):
        run(plan_of({"f": (Zeros(1 << 60),)}), tmp_path / "a" / "out")
    assert not os.listdir(tmp_path)


def test_a_damaged_source_is_named_and_leaves_nothing(tmp_path):
    plan, _ = example(tmp_path / "in", checksums=True)
    path = tmp_path / "in" / "source1"
    data = bytearray(path.read_bytes())
    data[2500] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"in/source1 is damaged: its crc32 is \w+, not \w+; copy it again"):
        run(plan, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_is_too_short_is_named(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"12345")
    with pytest.raises(UserError, match=r"source ends at byte 5, before what it should hold; copy it again"):
        run(plan_of({"f": (Run(str(path), 0, 6),)}), tmp_path / "out")


def test_a_source_that_changes_is_refused(tmp_path, monkeypatch):
    plan, _ = example(tmp_path / "in")
    work = transfer._work

    def touched(*args):
        result = work(*args)
        os.utime(tmp_path / "in" / "source0")
        return result

    monkeypatch.setattr(transfer, "_work", touched)
    with pytest.raises(UserError, match="a source changed while it was read"):
        run(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_run_of_the_same_target_is_refused(tmp_path, monkeypatch):
    plan, expected = example(tmp_path / "in")
    monkeypatch.setattr(transfer, "LOCK_SECONDS", 0.2)
    (tmp_path / ".out.partial").mkdir()
    with (tmp_path / ".out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"\.out\.partial is being written by another process"):
            run(plan, tmp_path / "out")
    run(plan, tmp_path / "out")
    check_complete(tmp_path / "out", expected)


def strike(plan: Plan, target: Path, at: int | None, fault: str | int = "kill", workers: int = 1) -> tuple[str, int]:
    return struck(partial(run, plan, target, workers=workers), at, fault)


def interrupted(plan: Plan, target: Path) -> None:
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
        plan = Plan(plan.files[:2], plan.sources, plan.manifest)
        del expected["sub/three.bin"]
    else:
        os.utime(tmp_path / "in" / "source0")
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
        assert ended in ("killed", "done")  # two workers may need an operation less than they did before
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


def test_a_killed_worker_is_told_in_one_line_and_the_next_run_goes_on(tmp_path, monkeypatch):
    plan, expected = example(tmp_path / "in")
    answers = workers.Workers.answers

    def struck_down(self, jobs, progress):
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        return answers(self, jobs, progress)

    with monkeypatch.context() as patch:
        patch.setattr(workers.Workers, "answers", struck_down)
        with pytest.raises(UserError, match=r"a worker was killed by signal 9 .* fewer workers; what is finished"):
            run(plan, tmp_path / "out")
    run(plan, tmp_path / "out")
    check_complete(tmp_path / "out", expected)


def test_workers_end_with_their_parent(tmp_path):
    """Killed alone, the parent leaves no worker, not even one that waits for a disk: its lock is free."""
    os.mkfifo(tmp_path / "never")  # opening it blocks the worker, as nobody writes
    plan = plan_of({"f": (Run(str(tmp_path / "never"), 0, 10),)})
    pid = os.fork()
    if not pid:
        run(plan, tmp_path / "out", workers=1)
        os._exit(0)
    lock = tmp_path / ".out.partial" / "lock"
    until(lock.exists, "the parent had taken the lock")
    time.sleep(0.5)  # so that the worker waits for its disk
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    def free() -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    with lock.open() as file:
        until(free, "the worker had let go of the lock")
    assert not (tmp_path / "out").exists()


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Else a power failure leaves the name of a folder whose files are not there."""
    order, rename, sync = [], os.rename, transfer.sync
    monkeypatch.setattr(transfer, "sync", lambda path: (order.append(Path(path).name), sync(path)))
    monkeypatch.setattr(os, "rename", lambda *paths: (order.append("rename"), rename(*paths)))
    plan, _ = example(tmp_path / "in")
    run(plan, tmp_path / "out")
    assert order == ["manifest.json", "files", "sub", "rename", tmp_path.name]
