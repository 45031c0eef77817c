"""isoloss samples: which completions of a file written by hand are shown, in which order, and its mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isoloss.tools import samples
from isoloss.tools.samples import Selection


def completion(step: int, name: str, reward: float | None, **more: Any) -> dict[str, Any]:
    about = {"step": step, "id": name, "prompt": "2 + 2 =", "completion": f"It is {name}", "answer": "4"}
    return {**about, "reward": reward, "finish": "stop", "tokens": 3, "kept": True, **more}


ROWS = [
    completion(1, "a.jsonl:1/0/0", 5.0),
    completion(1, "a.jsonl:1/0/1", None, error="f: ValueError: no", kept=False),
    completion(2, "a.jsonl:17/1/0", 0.5, tokens=9, finish="length"),
    completion(2, "a.jsonl:17/1/1", 1.0, parts={"math": 1.0, "brief": None}),
    completion(2, "a.jsonl:1/2/0", 0.0, prompt=[{"role": "user", "content": "Paris?"}, {"role": "assistant"}]),
    completion(2, "a.jsonl:1/2/1", 0.5, completion="\x1b[31mred\nlast"),
    completion(2, "a.jsonl:1/2/2", None, error="f: took too long", tokens=2),
]


@pytest.fixture
def run(tmp_path) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rollouts.jsonl").write_text(text + '{"step": 3, "id')  # a row that is being written
    (tmp_path / "eval_rollouts.jsonl").write_text(json.dumps(completion(0, "b.jsonl:1/eval/0", 0.25)) + "\n")
    return tmp_path


def said(capsys, run: Path, *words: str) -> str:
    assert samples.main([str(run), *words]) == 0
    return capsys.readouterr().out


def ids(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in line.split() if ".jsonl:" in word and "reward" in line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "17/1/1 17/1/0 1/2/1 1/2/0 1/2/2"),  # the newest step; equal rewards in the order of the file
        ("--count 3", "17/1/1 17/1/0 1/2/2"),
        ("--count 2", "17/1/1 1/2/2"),
        ("--count 1", "17/1/1"),
        ("--step 1", "1/0/0 1/0/1"),
        ("--step all --count 2", "1/0/0 1/2/2"),
        ("--step all --id a.jsonl:1 --by step", "1/0/0 1/0/1 1/2/0 1/2/1 1/2/2"),  # not 17
        ("--step all --id a.jsonl:17/1", "17/1/1 17/1/0"),
        ("--id a.jsonl --by length", "17/1/0 17/1/1 1/2/0 1/2/1 1/2/2"),
        ("--finish length", "17/1/0"),
        ("--step all --errors --by step", "1/0/1 1/2/2"),
        ("--contains Paris", "1/2/0"),
        ("--contains red", "1/2/1"),
    ],
)
def test_what_is_shown(words, expected, run, capsys):
    assert ids(said(capsys, run, *words.split())) == [f"a.jsonl:{name}" for name in expected.split()]


def test_the_lines_of_completions(run, capsys):
    text = said(capsys, run, "--count", "4")
    assert text.startswith("5 completions of step 2, mean reward 0.500, 1 without a reward\n")
    assert "reward 1.000  a.jsonl:17/1/1  step 2  math 1  brief none  3 tokens  stop\n" in text
    assert "... 1 more, --count 0 shows all ..." in text
    assert "no reward  a.jsonl:1/2/2  step 2  2 tokens  stop\n  answer: 4\n  error: f: took too long\n" in text
    text = said(capsys, run, "--step", "all")
    assert text.startswith("7 completions of steps 1 to 2, mean reward 1.400, 2 without a reward\n")
    text = said(capsys, run, "--contains", "Paris")
    assert "  > user: Paris?\n  > assistant: \n" in text
    text = said(capsys, run, "--id", "a.jsonl:1/2/1")
    assert "  > 2 + 2 =\n  \\x1b[31mred\n  last\n" in text
    assert "dropped" in said(capsys, run, "--step", "1", "--errors")
    assert "b.jsonl:1/eval/0" in said(capsys, run, "--eval")


def test_memory_does_not_grow_with_the_rows():
    selection = Selection(4)
    for number in range(1000):
        selection.add(number % 97, completion(1, f"a.jsonl:{number}/0/0", 1.0))
    assert len(selection.high) == len(selection.low) == 4 and selection.rows == 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{run}/nowhere"], "nowhere/rollouts.jsonl does not exist"),
        (["{run}", "--step", "first"], "--step first must be a number, last or all"),
        (["{run}", "--count", "-1"], "--count -1 must be at least 0"),
        (["{run}", "--contains", "nobody said"], "none of the newest step fits; take some away, or see all steps"),
        (["{run}", "--step", "9"], "no completion fits these options"),
    ],
)
def test_a_mistake_is_one_line(words, says, run, capsys):
    assert samples.main([word.format(run=run) for word in words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("isoloss: error: ") and error.count("\n") == 1 and says in error


def test_it_needs_no_torch_and_may_be_cut_by_a_pager(run):
    code = "import sys; from isoloss.tools.samples import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.returncode == 0 and "a.jsonl:17/1/1" in done.stdout
    piped = f"{sys.executable} -m isoloss.tools.samples {run} --count 0 | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
