"""What long tasks say of how far they are."""

import pytest
from support.runs.runs import write_rows

from isoloss.engine.data.rows import count_rows
from isoloss.engine.instruments import console
from isoloss.engine.instruments.console import Progress, duration


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
