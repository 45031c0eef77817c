"""What a run writes while it goes on, and what it says, where a disk refuses it for a while."""

import io
import math
import os
import sys
from pathlib import Path

import pytest
from support.faults.faults import DISK_FULL, FullDisk
from support.runs.runs import rows_of
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from isoloss.engine.instruments import files
from isoloss.engine.instruments.files import AppendOnlyFile, JsonLines, replace_text
from isoloss.engine.rl.report import RolloutLog
from isoloss.engine.run.metrics import MetricsLog
from isoloss.parallel import UserError
from isoloss.parallel.runtime.console import say


@pytest.fixture
def disk(monkeypatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_what_was_refused_is_written_later_whole_and_in_order(tmp_path, disk, capsys):
    """Refused in the middle of a row. It is told once, and again when the disk was full a second time."""
    rows = [{"step": step, "text": "a" * step} for step in range(6)]
    file = JsonLines(tmp_path / "rows.jsonl", 0)
    file.write(rows[:1])
    disk.room = 10
    for row in rows[1:3]:
        file.write([row])
    told = f"isoloss: {tmp_path}/rows.jsonl could not be written (No space left on device): kept in memory until it can"
    assert capsys.readouterr().err == f"{told} be\n"
    assert len((tmp_path / "rows.jsonl").read_text().split("\n")) == 2, "a row and a part of one"
    disk.room = math.inf
    file.write(rows[3:4])
    assert rows_of(tmp_path / "rows.jsonl") == rows[:4]
    disk.room = 0
    file.write(rows[4:])
    disk.room = math.inf
    file.retry()
    assert rows_of(tmp_path / "rows.jsonl") == rows
    file.close()
    assert capsys.readouterr().err == f"{told} be\n"


def test_a_file_that_cannot_be_made_is_made_later(tmp_path):
    file = JsonLines(tmp_path / "folder" / "rows.jsonl", 0)
    file.write([{"step": 1}])
    (tmp_path / "folder").mkdir()
    file.write([{"step": 2}])
    assert [row["step"] for row in rows_of(tmp_path / "folder" / "rows.jsonl")] == [1, 2]


def test_the_end_of_a_run_is_the_last_try(tmp_path, disk, capsys):
    disk.room = 0
    one, other = (AppendOnlyFile(tmp_path / name) for name in ("one", "other"))
    for file in (one, other):
        file.append(b"12345")
    disk.room = 5
    capsys.readouterr()
    for file in (one, one, other, other):
        file.close()
    why = "could not be written (No space left on device)"
    assert capsys.readouterr().err == f"isoloss: {tmp_path}/other lacks its last 5 bytes: it {why}\n"
    assert (tmp_path / "one").read_bytes() == b"12345" and not (tmp_path / "other").read_bytes()
    disk.room = math.inf
    with pytest.raises(ValueError, match="closed"):
        one.append(b"6")


def test_memory_is_not_filled_with_it(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(files, "MOST_WAITING", 2**20)
    disk.room = 0
    file = AppendOnlyFile(tmp_path / "rows.jsonl")
    file.append(bytes(2**20))
    with pytest.raises(UserError, match=r"rows\.jsonl could not .* and more than 1 MiB wait for it: make room"):
        file.append(b"1")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_text(path, "first \udc80")
    assert path.read_text() == "first \\udc80"
    write = Path.write_bytes

    def half(path, whole):
        write(path, whole[: len(whole) // 2])
        raise OSError(DISK_FULL, os.strerror(DISK_FULL))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError):
        replace_text(path, "second")
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "first \\udc80"


def test_every_file_of_a_run_goes_on(tmp_path, disk, capsys):
    """metrics.jsonl, eval.jsonl, bad_steps.jsonl and TensorBoard's: full for two of four steps, they lack nothing."""
    with MetricsLog(tmp_path, enabled=True, total_steps=4) as log:
        bad = log.file("bad_steps.jsonl")
        for step in range(1, 5):
            if step != 3:
                disk.room = 0 if step == 2 else math.inf
            log.log(step, {"loss": 1.0 / step})
            log.log_eval(step, {"loss": 2.0 / step})
            log.text("rollouts", "word " * step, step)
            bad.write([{"step": step}])
    for name in ("metrics.jsonl", "eval.jsonl", "bad_steps.jsonl"):
        assert [row["step"] for row in rows_of(tmp_path / name)] == [1, 2, 3, 4], name
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    floats = [(value.tag, value.tensor.float_val[0]) for value in values if value.tensor.float_val]
    texts = [value.tensor.string_val[0] for value in values if value.tensor.string_val]
    of_step = [(("loss/loss", 1.0 / step), ("eval/loss", 2.0 / step)) for step in range(1, 5)]
    assert floats == [(tag, pytest.approx(value)) for pair in of_step for tag, value in pair]
    assert texts == [b"word " * step for step in range(1, 5)]
    told = capsys.readouterr().err
    assert told.count("could not be written") == 4 and "Traceback" not in told and "lacks" not in told


def test_before_a_checkpoint_it_is_tried_again(tmp_path, disk):
    with MetricsLog(tmp_path, enabled=True, total_steps=4) as log:
        disk.room = 0
        log.log(1, {"loss": 1.0})
        assert not (tmp_path / "metrics.jsonl").read_text()
        disk.room = math.inf
        log.retry()
        assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1]


def test_files_that_are_there_from_the_start(tmp_path):
    """For whoever follows them. bad_steps.jsonl is there only if there was one."""
    with MetricsLog(tmp_path, enabled=True, total_steps=4) as log:
        log.file("bad_steps.jsonl", begun=False)
        RolloutLog(log)
        log.retry()
    names = ["eval.jsonl", "eval_rollouts.jsonl", "metrics.jsonl", "rollouts.jsonl", "tensorboard"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_output_that_nobody_takes_ends_nothing(monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(DISK_FULL, os.strerror(DISK_FULL))

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Full())
    say("one", "two")
    say("three", error=True)
    assert (sys.stdout.getvalue(), sys.stderr.getvalue()) == ("one\ntwo\n", "three\n")


POWER_LOSS = b"\0" * 300


@pytest.mark.parametrize(
    "damage",
    (POWER_LOSS, b'{"step": 2, "lo', b"\xff\xfe\x00", b"[" * 100_000, b"[2]", b'{"loss": 1}', b'{"step": "2"}'),
    ids=("NULs", "half a row", "no text", "deep", "a list", "no step", "a step of text"),
)
def test_a_damaged_line_is_left_out_and_the_rest_is_kept_aside(damage, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    first, later, beyond = b'{"step": 1}\n', b'{"step": 3, "a": "\xe2\x80\xa8"}\n', b'{"step": 4}\n{"st'
    path.write_bytes(first + damage + b"\n" + later + beyond)
    JsonLines(path, last_step=3)
    assert path.read_bytes() == first + later
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == damage + b"\n" + later + beyond
    assert capsys.readouterr().err == (
        f"isoloss: {path} has 1 damaged line(s), which are left out; the file from the first one on is kept as "
        f"{aside}\n"
    )
    path.write_bytes(damage + b"\n")
    JsonLines(path, last_step=3)
    assert path.read_bytes() == b"" and (tmp_path / "metrics.jsonl.damaged-2").read_bytes() == damage + b"\n"
    assert aside.read_bytes().startswith(damage)


def test_a_file_without_damage_leaves_nothing_aside(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    JsonLines(path, last_step=1)
    assert path.read_bytes() == b'{"step": 1}\n' and list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().err == ""
