"""What long tasks say of how far they are."""

import pytest
from support.runs.runs import write_rows

from isoloss.engine.data.rows import count_rows
from isoloss.models.weights import manifest
from isoloss.parallel.runtime import console
from isoloss.parallel.runtime.console import Progress, duration


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    return now


def test_a_long_task_tells_how_far_it_is(clock, capsys):
    counted = []
    progress = Progress("tokenizing", "rows of data.train", lambda: counted.append(1) or 300_000)
    for _ in range(40):
        clock[0] += 0.5
        for _ in range(1000):
            progress.advance()
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing 9,001 of 300,000 rows of data.train  1,800 a second  ETA 0:02:42",
        "tokenizing 29,001 of 300,000 rows of data.train  1,933 a second  ETA 0:02:20",
    ]
    assert counted == [1]


def test_what_was_done_before_has_taken_no_time(clock, capsys):
    progress = Progress("tokenizing", "rows", lambda: 1000, done=900)
    clock[0] += 10.0
    progress.advance(50)
    assert capsys.readouterr().err == "tokenizing 950 of 1,000 rows  5 a second  ETA 0:00:10\n"


def test_a_slow_task_has_a_speed(clock, capsys):
    progress = Progress("planning", "pipeline stages", lambda: 8)
    clock[0] += 40.0
    progress.advance(2)
    assert capsys.readouterr().err == "planning 2 of 8 pipeline stages  0.05 a second  ETA 0:02:00\n"


def test_bytes_have_a_unit_and_what_is_skipped_has_taken_no_time(clock, capsys):
    progress = Progress("loading", "of weights", lambda: 4_500_000_000, nbytes=True)
    progress.skip(1_500_000_000)
    clock[0] += 10.0
    progress.advance(500_000_000)
    small = Progress("moving", "", lambda: 50_000_000, nbytes=True)
    clock[0] += 5.0
    small.advance(10_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "loading 2.00 of 4.50 GB of weights  0.05 GB a second  ETA 0:00:50",
        "moving 10.00 of 50.00 MB  2.00 MB a second  ETA 0:00:20",
    ]


@pytest.mark.parametrize("shown", [True, False])
def test_a_check_of_files_tells_how_far_it_is(tmp_path, monkeypatch, capsys, shown):
    (tmp_path / "a").write_bytes(bytes(3_000_000))
    (tmp_path / "b").write_bytes(bytes(9_000_000))
    files = {name: manifest.FileRecord((tmp_path / name).stat().st_size, "") for name in ("a", "b")}
    files = {name: manifest.FileRecord(each.bytes, manifest.crc32(tmp_path / name)) for name, each in files.items()}
    written = manifest.Manifest("trained", "llama", 131, manifest.Style.STACKED, ("float32",), 12, files)
    ticks = iter(range(0, 600, 6))
    monkeypatch.setattr(console, "monotonic", lambda: next(ticks))
    manifest.check_checksums(tmp_path, written, shown=shown)
    lines = [f"checking {done} of 12.00 MB of {tmp_path}" for done in ("3.00", "7.19", "11.39")] if shown else []
    found = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0] for line in found] == lines[::2]


@pytest.mark.parametrize(("seconds", "enabled"), [(4.9, True), (60.0, False)])
def test_a_short_task_and_another_rank_say_nothing(clock, capsys, seconds, enabled):
    progress = Progress("tokenizing", "rows", lambda: 1 // 0, enabled)
    clock[0] += seconds
    progress.advance()
    assert capsys.readouterr().err == ""


def test_duration():
    assert [duration(seconds) for seconds in (0.4, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]


def test_rows_are_counted_as_they_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}] * 3)
    with open(path, "a") as file:
        file.write('\n  \n{"text": "b"}')
    pq.write_table(pa.table({"text": ["a"] * 5}), tmp_path / "b.parquet")
    assert count_rows([str(path), str(tmp_path / "b.parquet")]) == 4 + 5
