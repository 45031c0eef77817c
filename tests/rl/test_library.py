"""Reinforcement learning as a call of a program: rewards, losses and rows of its own."""

import inspect

import pytest
from support.runs import library
from support.runs.runs import write_model, write_rows

REWARD = """
def reward(completion, answer):
    return float(len(completion) % 5 + len(answer))
"""


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory) -> dict:
    folder, work = tmp_path_factory.mktemp("prompts"), tmp_path_factory.mktemp("library")
    write_model(folder / "model", num_layers=2)
    write_rows(folder / "train.jsonl", [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(5, 13)])
    (work / "reward.py").write_text(REWARD)
    return pool.run(1, library.rl_runs, folder, work)[0]


def test_functions_and_rows_of_a_program_give_the_numbers_of_files(run):
    """Bit for bit: metrics of every step, and id, text and reward of every completion."""
    assert len(run["files"][0]) == 2 and len(run["files"][1]) == 32
    assert len({row["reward_mean"] for row in run["files"][0]}) == 2
    assert run["memory"] == run["files"]


def test_a_reward_of_this_process_is_named_and_keeps_its_state(run):
    assert run["named"] == ["support.runs.library:rl_runs.<locals>.reward"] and run["scored"] == 32


def test_a_reward_that_fails_costs_its_completion_the_reward(run):
    lines, first = inspect.getsourcelines(library.rl_runs)
    (number,) = [first + n for n, text in enumerate(lines) if "return 1 / " in text]
    assert 0 < len(run["partly"]) < 32
    for completion, error in run["partly"]:
        assert len(completion) % 2 == 0
        assert "ZeroDivisionError" in error and error.endswith(f"library.py:{number})")


def test_a_reward_that_always_fails_ends_the_run_with_its_line(run):
    assert f"RuntimeError: no judge ({library.__file__}:{run['line']})" in run["all"]
