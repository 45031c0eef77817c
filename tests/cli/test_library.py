"""Whole runs of supervised fine-tuning as calls of a program."""

import pytest
from support.runs import library


@pytest.fixture(scope="module")
def run(pool, inputs, tmp_path_factory) -> dict:
    return pool.run(1, library.sft_runs, inputs, tmp_path_factory.mktemp("library"))[0]


@pytest.mark.parametrize("other", ["memory", "loss", "resumed"])
def test_a_run_of_a_program_has_the_numbers_of_a_run_from_files(run, other):
    """Bit for bit; also one that a callback ended, and that was resumed from the same rows."""
    assert [len(rows) for rows in run["files"]] == [library.STEPS, 3] and run["files"][0][0]["loss"] > 1
    assert run[other] == run["files"]


def test_a_callback_ends_a_run_as_its_last_step_does(run):
    assert run["stopped"] == (True, 2, [0, 2])


def test_python_collects_no_garbage_between_the_steps_of_a_run(run):
    assert run["collects"] == [False, False, True]


def test_other_rows_than_those_of_the_checkpoint_are_refused(run):
    assert "the content of data.train is not what" in run["other rows"]


def test_rows_and_files_of_them_are_refused(run):
    assert "rows of train are given: leave out the one or the other" in run["both"] and "data.train=[" in run["both"]


@pytest.fixture(scope="module")
def reports(pool, inputs, tmp_path_factory) -> list[dict]:
    return pool.run(2, library.callbacks_of_a_rank, inputs, tmp_path_factory.mktemp("callbacks"))


def test_callbacks_of_all_ranks_get_what_the_files_hold(reports):
    """And the answer of one rank ends the run on all."""
    for report in reports:
        kinds = [(kind, step) for kind, step, _ in report["run"]]
        assert kinds == [
            ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("evaluation", 3), ("save", 3)
        ]  # fmt: skip
        steps = [{"step": step, **values} for kind, step, values in report["run"] if kind == "step"]
        evaluations = [{"step": step, **values} for kind, step, values in report["run"] if kind == "evaluation"]
        assert (steps, evaluations) == (report["metrics"], report["evaluations"]) and report["stopped"]
        assert report["run"][-1] == ("save", 3, True)  # its checkpoint is whole by then


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(reports):
    here, there = reports[1]["fails"], reports[0]["fails"]
    assert here.startswith("on_step_end failed after step 1: KeyError: 'gone' (") and "library.py:" in here
    assert there == f"{here}, on rank 1"


def test_a_callback_that_returns_a_number_is_refused(reports):
    assert reports[0]["number"].startswith("on_step_end returned ")
    assert reports[0]["number"].endswith("return True to end the run, else False or nothing")
