"""What a run wrote, read while it goes on: a last row that is not whole, a damaged one, numbers that JSON lacks."""

import json
import math

import pytest

from isoloss.engine.run.records import RunRecords, read_rows
from isoloss.parallel import UserError


@pytest.fixture
def run(tmp_path) -> RunRecords:
    return RunRecords(tmp_path)


def test_the_numbers_of_a_step_are_numbers(run):
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": "nan", "grad_norm": "inf", "lr": 0.5}\n')
    (row,) = run.metrics()
    assert math.isnan(row["loss"]) and (row["step"], row["grad_norm"], row["lr"]) == (1, math.inf, 0.5)


def test_the_text_of_a_completion_stays_as_it_is(run):
    """Of the ends of a line that Unicode has, only the line feed ends a row."""
    texts = ["nan", "a\u2028b\u0085c\rd"]
    rows = [{"step": 1, "completion": text} for text in texts]
    written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        (run.folder / name).write_bytes(written.encode())
    assert [row["completion"] for row in run.rollouts()] == [row["completion"] for row in run.eval_rollouts()] == texts


@pytest.mark.parametrize("end", ['{"step": 2', "", '{"step": 2}'])
def test_a_row_that_is_being_written_is_left_out(run, end):
    (run.folder / "eval.jsonl").write_text('{"step": 1}\n' + end)
    assert list(run.evaluations()) == [{"step": 1}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"step": 2', "eval.jsonl:2: not JSON"),
        (b"\0\0\0", "eval.jsonl:2: not JSON"),
        (b"\xff", "eval.jsonl:2: not JSON"),
        (b'{"step": NaN}', "eval.jsonl:2: not JSON .NaN is no number of JSON"),
        (b"[1]", "eval.jsonl:2: not a row, but list"),
    ],
)
def test_a_damaged_row_is_named_by_its_line(run, line, says):
    (run.folder / "eval.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=says):
        list(run.evaluations())


def test_what_is_not_there_is_named(run):
    with pytest.raises(UserError, match=r"metrics.jsonl does not exist: give the output_dir of a run"):
        list(run.metrics())
    (run.folder / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read"):
        list(read_rows(run.folder / "metrics.jsonl"))


def test_configuration_and_provenance(run):
    (run.folder / "config.yaml").write_text("optim:\n  lr: 0.5\n")
    (run.folder / "run.json").write_text('{"world_size": 2}\n')
    assert (run.config(), run.provenance()) == ({"optim": {"lr": 0.5}}, {"world_size": 2})
    (run.folder / "config.yaml").write_text("a: [1\nb")
    (run.folder / "run.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read: .*; copy the file again"):
        run.config()
    with pytest.raises(UserError, match=r"run.json: must hold names and values, not list"):
        run.provenance()
