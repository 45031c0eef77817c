"""The shipped tasks: what their files promise, and that the tool that made them makes them again."""

import json
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.rows import unread_rows
from isoloss.engine.rl.prompts import load_prompts
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.weight_map import num_parameters
from isoloss.tools.dev import make_tasks

ASSETS = Path(str(files("isoloss.recipes") / "assets"))
TASKS = sorted(make_tasks.TASKS)


def solve(question: str) -> tuple[str, str]:
    """(the answer, what the mistake makes of it), by other means than the tool's."""
    words = question.rstrip("?").split()
    if words[0] == "Sort":
        right = "".join(sorted(words[-1]))
        return right, right[:2] + right[3] + right[2]
    a, b = int(words[2]), int(words[4])
    return str(a + b), f"{a // 10 + b // 10}{(a + b) % 10}".lstrip("0") or "0"


def read(task: str, name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / task / f"{name}.jsonl").read_text().splitlines()]


def questions(rows: list[dict]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


@pytest.mark.parametrize("task", TASKS)
def test_shipped_files_are_what_the_tool_makes(task, tmp_path):
    make_tasks.main(["--task", task, "--out", str(tmp_path)])
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (ASSETS / task).iterdir()}
    assert all(len(data) < 1_000_000 for data in made.values())


@pytest.mark.parametrize("task", TASKS)
def test_the_readme_has_the_numbers_of_the_tool(task):
    made, text = make_tasks.TASKS[task], (ASSETS / task / "README.md").read_text()
    assert f"{made.sft_rows:,} demonstrations" in text and f"{made.mistake_rate:.0%} of" in text
    assert f"{made.rl_rows:,} problems" in text and f"{make_tasks.EVAL_ROWS} problems" in text
    assert f"{len(make_tasks.WORDS)} words" in text and f"--task {task} " in text
    assert f"{num_parameters(read_architecture(ASSETS / task)):,} parameters" in text


@pytest.mark.parametrize("task", TASKS)
def test_answers_and_splits(task):
    sft, rl, held_out = (read(task, name) for name in ("sft", "rl", "eval"))
    assert (len(sft), len(rl), len(held_out)) == (10_240, 4_096, 512)
    assert all(row["data_source"] == task for row in rl + held_out)
    assert all(row["answer"] == solve(question)[0] for row, question in zip(rl, questions(rl)))
    assert all(row["answer"] == solve(question)[0] for row, question in zip(held_out, questions(held_out)))
    seen = set(questions(held_out))
    assert len(seen) == 512 and not seen & set(questions(sft)) and not seen & set(questions(rl))


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_are_as_careless_as_promised(task):
    rate = make_tasks.TASKS[task].mistake_rate
    rows = read(task, "sft")
    hard = [row for row, question in zip(rows, questions(rows)) if len(set(solve(question))) == 2]
    assert len(hard) / len(rows) == pytest.approx({"sort": 1.0, "carry": 0.8}[task], abs=0.02)
    mistakes = 0
    for row, question in zip(rows, questions(rows)):
        right, mistaken = solve(question)
        assert row["completion"] in (right, mistaken)
        mistakes += row["completion"] != right
    assert abs(mistakes / len(hard) - rate) < 3 * math.sqrt(rate * (1 - rate) / len(hard))


@pytest.mark.parametrize("task", TASKS)
def test_tokenizer_and_model(task):
    folder = ASSETS / task
    config = json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(str(folder), config["vocab_size"])
    assert (config["pad_token_id"], config["eos_token_id"]) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert read_architecture(folder).vocab_size == 320
    for text in ("naïve café ☕ 数据\t\x00 end", "user assistant", *questions(read(task, "eval"))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    words = re.compile("Sort| the| letters|What| is|.")
    # Letters and digits are one token each: the answer is spelt, and so are the letters of the question.
    for row, question in zip(read(task, "eval"), questions(read(task, "eval"))):
        assert len(tokenizer.encode(row["answer"])) == len(row["answer"])
        assert len(tokenizer.encode(question)) == len(re.findall(words, question))


@pytest.mark.parametrize("task", TASKS)
def test_both_phases_read_the_question_alike(task, tmp_path):
    """The prompt of reinforcement learning is the beginning of the demonstration, and the targets are the rest."""
    tokenizer = load_tokenizer(str(ASSETS / task), 320)
    rows = [row.read() for row in unread_rows([str(ASSETS / task / "sft.jsonl")], "data.train")][:200]
    path = tmp_path / "prompts.jsonl"
    data = DataConfig(train=(str(path),))
    path.write_text("".join(json.dumps({"prompt": row.values["prompt"]}) + "\n" for row in rows))
    for row, prompt in zip(rows, load_prompts(data, "train", tokenizer, max_prompt_tokens=32).prompts):
        tokens_T, mask_T = tokenize_row(row, tokenizer)
        head = len(prompt.tokens)
        assert tuple(tokens_T[:head]) == prompt.tokens
        targets = [token for token, target in zip(tokens_T, mask_T) if target]
        assert mask_T[:head] == [False] * head
        assert tokens_T[head : head + len(targets)] == targets
        assert tokenizer.decode(targets) == row.values["completion"] + "<|im_end|>"
