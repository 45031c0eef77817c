"""Answers of rows that no reward function scores, as isoloss-audit counts them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs.runs import write_model, write_rows

from isoloss.tools.audit.__main__ import main
from isoloss.tools.audit.answers import THOUGHTS, completions_of

FUNCTIONS = """
def signed(completion, answer):
    return 1.0 if completion.strip().endswith(answer) and answer else -1.0

def fussy(completion, answer):
    return 1.0 if int(completion) == int(answer) else 0.0

def tested(completion, tests):
    return float(completion == tests)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", 2)


@pytest.fixture
def audited(tmp_path, model):
    def audited(rows: list[dict[str, Any]], *words: str) -> tuple[int, dict[str, Any]]:
        path = write_rows(tmp_path / "train.jsonl", rows)
        (tmp_path / "own.py").write_text(FUNCTIONS)
        keys = ["data.max_length=64", "rollout.max_new_tokens=32", "reward.workers=1"]
        words = tuple(word.replace("own.py", str(tmp_path / "own.py")) for word in words)
        out = tmp_path / "audit.json"
        status = main(
            ["grpo", f"model.path={model}", f"data.train={path}", *keys, "--json", str(out), "--rows", "9", *words]
        )
        return status, json.loads(out.read_text())["splits"][0] if out.exists() else {}

    return audited


def asks(answer: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": "What is it?", "answer": answer} | more


@pytest.mark.parametrize(
    ("function", "answers", "unscorable", "raising"),
    [
        ("exact_match", ["7", 7, "a b", [1, 2], {"a": 1}], 2, 2),
        ("math", ["7", "\\frac{1}{2}", "2 + 5 = 7\n#### 7", "x^2", " "], 1, 1),
        ("[exact_match,format]", ["7", "yes"], 0, 0),
        ("own.py:signed", ["7", "yes", ""], 0, 0),
        ("own.py:fussy", ["7", "seven", " 8 "], 1, 1),
        ("format", ["7", "<think>"], 1, 0),
    ],
)
def test_rows_whose_own_answer_gets_no_reward(audited, function, answers, unscorable, raising):
    status, found = audited(
        [asks(answer) for answer in answers], f"reward.function={function}", "--fail-on", "unscorable"
    )
    without = sum(answer == "" for answer in answers)
    assert found["answers"] == {
        "scored": len(answers), "without": without, "unscorable": unscorable, "raising": raising, "lacking": {}
    }  # fmt: skip
    assert status == int(unscorable > 0)


def test_the_reason_is_shown_with_its_rows(audited, capsys):
    audited([asks("7"), asks([1]), asks("8"), asks([22])])
    out = " ".join(capsys.readouterr().out.split())
    assert "2 of 4 get the full reward of 1 from exact_match" in out
    assert "unscorable 2: exact_match: ValueError: the answer is list [1]" in out and "answer: [22]" in out


def test_rows_without_the_column_that_a_reward_asks_for(audited, capsys):
    status, found = audited([asks("7", tests="7"), asks("8"), asks("9")], "reward.function=own.py:tested")
    assert found["answers"]["lacking"] == {"tests": 2} and status == 0
    assert "2 rows lack tests, which a reward function asks for" in " ".join(capsys.readouterr().out.split())


def test_rows_without_an_answer_are_counted(audited):
    status, found = audited([asks("7"), {"prompt": "Why?"}, asks("")], "--fail-on", "no-answer>1")
    assert (found["answers"]["without"], found["answers"]["unscorable"], status) == (2, 0, 1)
    assert found["answers"]["lacking"] == {"answer": 1}


def test_prompts_without_room_for_a_completion(audited, capsys):
    rows = [asks("7"), asks("8", prompt="What " * 40), asks("9", prompt="Who?")]
    _, found = audited(rows)
    assert (found["used"], found["rejected"], found["limit"], found["longest"] > 32) == (2, 1, 32, True)
    assert "data.max_length - rollout.max_new_tokens=32" in " ".join(capsys.readouterr().out.split())
    _, found = audited(rows, "data.overlong=drop")
    assert (found["used"], found["dropped"], found["rejected"]) == (2, 1, 0)


def test_prompts_that_the_run_leaves_out_as_repeated(audited):
    rows = [asks("7"), asks("7"), asks("8")]
    _, found = audited(rows)
    assert (found["read"], found["used"], found["copies"]["exact"]) == (3, 3, 2)
    status, found = audited(rows, "data.duplicates=drop", "--fail-on", "duplicates>1")
    assert (found["read"], found["used"], found["repeated"], found["copies"]["exact"], status) == (3, 2, 1, 1, 1)


def test_answers_are_tried_plain_boxed_and_behind_thoughts():
    assert completions_of("so 7\n#### 7") == [
        thought + body for thought in THOUGHTS for body in ("so 7\n#### 7", "\\boxed{so 7\n#### 7}", "7")
    ]
    assert completions_of(7)[:2] == ["7", "\\boxed{7}"] and len(completions_of(7)) == 6
