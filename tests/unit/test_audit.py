"""isoloss-audit: its figures against counts by hand and against the run's own loader, and what its status says."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs.runs import TINY, write_model, write_rows

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset
from isoloss.parallel import UserError
from isoloss.tools.audit.__main__ import main
from isoloss.tools.audit.figures import grouped, histogram, percentile
from isoloss.tools.audit.findings import Condition, Finding, conditions_of, failed, names_of


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", 2)


def chat(asked: str, answer: str, **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer} | more
    return {"messages": [{"role": "user", "content": asked}, said]}


def row_tokens(row: dict[str, Any], prompt: bool = False) -> int:
    """The number of tokens by transformers alone."""
    tokenizer = load_tokenizer(str(TINY), 2048)
    messages = row["messages"][:1] if prompt else row["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


LONG = chat("Count to a hundred.", " ".join(map(str, range(1, 100))))
ASKS_LONG = chat(" ".join(map(str, range(1, 100))), "Yes.")
TRAIN = [
    chat("What is the capital of France, the country of wine and of cheese?", "Paris, on the river Seine."),
    chat("What is 2 plus 2?", "It is 4."),
    chat("What is 2 plus 2?", "It is 4."),
    chat("What is the capital of France, the country of wine and of cheese?", "Paris, on the river Seine!"),
    LONG,
    ASKS_LONG,
    {"messages": [{"role": "user", "content": "Nobody answers."}]},
    {"prompt": "Nothing", "completion": ""},
    {"question": "a", "id": 1},
    {"text": "A text alone."},
]
EVAL = [TRAIN[1], chat("Who are you?", "I am a model.")]
MOST = 60


def audited(tmp_path: Path, model: Path, *words: str, train=TRAIN, held_out=EVAL) -> tuple[int, dict[str, Any]]:
    """The status, and what --json has."""
    files = [f"data.train={write_rows(tmp_path / 'train.jsonl', train)}"]
    files += [f"data.eval={write_rows(tmp_path / 'eval.jsonl', held_out)}"] if held_out else []
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    out = tmp_path / "audit.json"
    status = main(["sft", f"model.path={model}", *files, f"data.max_length={MOST}", cache, "--json", str(out), *words])
    return status, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize(
    ("overlong", "used", "cut", "dropped", "rejected", "no_targets"),
    [("truncate", 6, 1, 0, 4, 3), ("drop", 5, 0, 2, 3, 2), ("error", 5, 0, 0, 5, 2)],
)
def test_rows_are_what_a_count_by_hand_says(
    tmp_path, model, capsys, overlong, used, cut, dropped, rejected, no_targets
):
    status, found = audited(tmp_path, model, f"data.overlong={overlong}")
    train, held_out = found["splits"]
    rows = {name: train[name] for name in ("read", "used", "cut", "dropped", "rejected", "no_targets", "all_targets")}
    assert status == 0
    assert rows == {
        "read": 10, "used": used, "cut": cut, "dropped": dropped, "rejected": rejected, "no_targets": no_targets,
        "all_targets": 1,
    }  # fmt: skip
    assert (held_out["read"], held_out["used"], held_out["rejected"]) == (2, 2, 0)
    whole = [row_tokens(row) for row in TRAIN[:4]]
    text = len(load_tokenizer(str(TINY), 2048)("A text alone.")["input_ids"]) + 1
    prompts = [row_tokens(row, prompt=True) for row in TRAIN[:4]]
    after_turn = 1  # the line break behind the end of a turn
    assert train["tokens"] == sum(whole) + text + MOST * cut
    targets = sum(whole) - sum(prompts) - 4 * after_turn + text - 1
    assert train["targets"] == targets + cut * (MOST - row_tokens(LONG, prompt=True))
    assert train["longest"] == max(row_tokens(LONG), row_tokens(ASKS_LONG))
    assert train["cut_tokens"] == cut * (row_tokens(LONG) - MOST)
    assert sum(rows for _, rows in train["histogram"]) == 7
    out = capsys.readouterr().out
    assert f"10 read, {used} used" in out and "the run would end there: data.max_rejects=0" in out


@pytest.mark.parametrize("overlong", ["truncate", "drop", "error"])
def test_the_run_itself_loads_what_the_audit_counts(tmp_path, model, overlong):
    _, found = audited(tmp_path, model, f"data.overlong={overlong}", held_out=())
    train = found["splits"][0]
    data = DataConfig((str(tmp_path / "train.jsonl"),), max_length=MOST, overlong=overlong, max_rejects=9)
    run = load_dataset(data, "train", str(model), vocab_size=2048, cache_dir=tmp_path / "other")
    names = {"rows": "used", "dropped": "dropped", "truncated": "cut", "tokens": "tokens", "targets": "targets"}
    assert {name: getattr(run.stats, name) for name in names} == {name: train[key] for name, key in names.items()}
    assert len(run.rejects) == train["rejected"]
    assert sum(reason["rows"] for reason in train["reasons"]) == train["rejected"]


def test_rows_of_other_projects_are_told_as_the_run_tells_them(tmp_path, model, capsys):
    """Of two forms; the same words in the page of reinforcement learning, where the reply is no part of a prompt."""
    answered = {"instruction": "What is 2 plus 2?", "output": "4"}
    shared = {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]}
    status, found = audited(tmp_path, model, train=[answered, shared, answered], held_out=())
    said = " ".join(capsys.readouterr().out.split())
    assert status == 0 and sum(found["splits"][0]["forms"].values()) == 3
    assert "ShareGPT rows: conversations -> messages (human -> user" in said
    assert "Alpaca rows: instruction and input, a line each -> user" in said and "output -> assistant" in said
    rows = write_rows(tmp_path / "asked.jsonl", [{"question": "2 plus 2?", "answer": "4"}])
    assert main(["grpo", f"model.path={model}", f"data.train={rows}", "rollout.max_new_tokens=8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "forms question/answer rows: question -> user tokens" in said


def test_copies_are_found_in_a_split_and_between_them(tmp_path, model, capsys):
    path = str(tmp_path / "train.jsonl")
    copies = audited(tmp_path, model, "data.overlong=drop")[1]["splits"]
    assert copies[0]["copies"] == {
        "exact": 1,
        "near": 1,
        "examples": [
            {"row": f"{path}:3", "other": f"{path}:2", "near": False},
            {"row": f"{path}:4", "other": f"{path}:1", "near": True},
        ],
    }
    assert copies[0]["in_train"] is None and copies[1]["copies"]["exact"] == 0
    assert (copies[1]["in_train"]["exact"], copies[1]["in_train"]["near"]) == (1, 0)
    assert f"{path}:4 nearly repeats {path}:1" in " ".join(capsys.readouterr().out.split())


def test_rows_that_are_equal_once_they_are_cut_are_copies(tmp_path, model):
    other = chat("Count to a hundred.", LONG["messages"][1]["content"] + " and so on")
    _, found = audited(tmp_path, model, "data.overlong=truncate", train=[TRAIN[1], LONG, other], held_out=())
    assert found["splits"][0]["copies"]["exact"] == 1


def test_reasons_are_grouped_without_their_numbers_and_words():
    rows = [("a:1", "`x[3]` has 7 tokens"), ("a:2", "not JSON"), ("a:3", "`y[12]` has 1,024 tokens")]
    first, second = grouped(rows)
    assert (first.text, first.rows, first.places) == ("`x[3]` has 7 tokens", 2, ["a:1", "a:3"])
    assert (second.text, second.rows) == ("not JSON", 1)


@pytest.mark.parametrize(("limit", "inside"), [(50, True), (101, False), (400, False)])
def test_the_histogram_counts_every_row_once(limit, inside):
    lengths = np.arange(1, 101)
    classes = histogram(lengths, limit)
    ends = [0, *(end for end, _ in classes)]
    assert classes == [(b, sum(a < n <= b for n in range(1, 101))) for a, b in pairwise(ends)]
    assert ends[-1] == 100 and (limit in ends) == inside
    assert [percentile(lengths, percent) for percent in (50, 90, 99, 100)] == [50, 90, 99, 100]


def test_steps_and_micro_batches(tmp_path, model):
    """Nine rows of equal length, four a step, two a micro-batch: two micro-batches, filled but for what a third row
    would need."""
    rows = [chat("Say it.", "It.")] * 9
    budget = 2 * row_tokens(rows[0]) + 3
    words = ("batch.global_size=4", f"batch.max_tokens={budget}", "train.epochs=2")
    _, found = audited(tmp_path, model, *words, train=rows, held_out=())
    assert found["steps"] == {
        "rows": 4, "total": 5, "epoch": 2.25, "epochs": 5 / 2.25, "micro_batches": [2, 2],
        "filled": pytest.approx((budget - 3) / budget),
    }  # fmt: skip
    assert (
        audited(tmp_path, model, f"batch.max_tokens={row_tokens(rows[0]) - 1}", train=rows, held_out=())[1]["splits"][
            0
        ]["over_budget"]
        == 9
    )


THINKS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


@pytest.mark.parametrize("opens", [False, True])
def test_whether_generation_begins_as_training_does(tmp_path, opens, capsys):
    model = write_model(tmp_path / "model", 2)
    if opens:
        (model / "chat_template.jinja").write_text(THINKS + OPENS)
    rows = [chat("Hi", "Yes"), chat("Ho", "No"), {"prompt": "a", "completion": "b"}]
    _, found = audited(tmp_path, model, train=rows, held_out=())
    facts = found["template"]
    assert facts["checked"] == 2 and len(facts["differing"]) == 2 * opens
    assert facts["generated"].endswith("<think>\n") == opens and "<think>" not in facts["trained"]
    assert facts["ends"] == ["<|im_end|>"]
    out = " ".join(capsys.readouterr().out.split())
    assert f"as in generation in {2 - 2 * opens} of the first 2 conversations" in out
    assert audited(tmp_path, model, "--fail-on", "prompt-differs", train=rows, held_out=())[0] == int(opens)


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("rejected", [Condition("rejected")]),
        ("rejected, duplicates>0.01", [Condition("rejected"), Condition("duplicates", 0.01, True)]),
        ("truncated>5%,dropped>3", [Condition("truncated", 0.05, True), Condition("dropped", 3)]),
    ],
)
def test_conditions_as_they_are_written(text, conditions):
    assert conditions_of(text, names_of(False, False)) == conditions


@pytest.mark.parametrize(
    "text", ["reject", "rejected>", "rejected>-1", "rejected>=1", "rejected>1.0", "dropped>100%", "unscorable", ""]
)
def test_a_condition_that_is_none_is_refused_with_the_names(text):
    with pytest.raises(UserError, match=r"^--fail-on: ") as refused:
        conditions_of(text, names_of(False, True))
    assert "never hold" in str(refused.value) or "train-in-eval" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "rows", "fails"),
    [("dropped", 0, False), ("dropped", 1, True), ("dropped>1", 1, False), ("dropped>1", 2, True),
     ("dropped>0.01", 1, False), ("dropped>0.01", 2, True), ("dropped>1%", 2, True)],
)  # fmt: skip
def test_a_condition_holds_for_more_rows_than_it_names(text, rows, fails):
    lines = failed(conditions_of(text, names_of(False, False)), [Finding("dropped", rows, 100)])
    assert len(lines) == fails and all(f"{rows} of 100" in line for line in lines)


@pytest.mark.parametrize(
    ("fail_on", "status"),
    [("rejected", 1), ("rejected>3", 0), ("dropped", 1), ("truncated", 0), ("duplicates", 1), ("near-duplicates", 1),
     ("train-in-eval", 1), ("train-in-eval>0.5", 0), ("no-targets", 1), ("all-targets", 1), ("over-budget", 0),
     ("empty-turns", 0)],
)  # fmt: skip
def test_the_status_is_1_if_a_finding_of_fail_on_holds(tmp_path, model, fail_on, status, capsys):
    assert audited(tmp_path, model, "data.overlong=drop", "--fail-on", fail_on)[0] == status
    assert (f"--fail-on {fail_on.split('>')[0]}" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ppo"], "there is no recipe 'ppo'"),
        (["--fail-on", "train-in-eval"], "is no finding of this configuration"),
        (["--json", "nowhere/a.json"], "--json=nowhere/a.json must be a file in a folder that exists"),
        (["--rows", "-1"], "--rows -1 must be at least 0"),
        (["data.max_length=60", "--row", "train.jsonl:99"], "has no such row"),
        (["data.max_length=60", "--row", "other.jsonl:1"], "is no FILE:LINE of the data"),
        (["data.maxlength=3"], "did you mean 'data.max_length'"),
        (["data.max_length=9999"], "max_position_embeddings=256"),
        (["data.max_length=3", "data.overlong=drop"], "data.train: none of 2 rows is left"),
    ],
)
def test_a_mistake_is_one_line_with_status_2(tmp_path, model, words, says, capsys):
    path = write_rows(tmp_path / "train.jsonl", TRAIN[:2])
    keys = [f"model.path={model}", f"data.train={path}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main([*words[:1], *keys, *words[1:]] if words == ["ppo"] else [*keys, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("isoloss: error: ") and error.count("\n") == 1 and says in error
