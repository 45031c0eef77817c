"""Data as people have it, from a command line to a trained step, and what a run says about it."""

import csv
import json
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs.foreign_rows import REFUSED, RL, SFT, SLIME, TALKS, VERL, assistant, save, user, write_file
from support.runs.runs import rows_of, write_model, write_rows

from isoloss.engine.config.schema import Config
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl import setup
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.sft import loop
from isoloss.models.families.registry import read_architecture
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch

TRAINED = ("ms-swift ShareGPT", "ms-swift Alpaca", "ms-swift query-response", "LLaMA-Factory Alpaca", "OpenAI weight",
           "GSM8K", "MATH", "TRL prompt-completion, conversational", "TRL language modeling")  # fmt: skip
REWARD = "def score(completion_tokens, answer):\n    return (sum(completion_tokens) + int(answer)) % 4 / 4\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("foreign") / "model", num_layers=1)


def run(recipe: str, folder, model, *overrides: str, out: str = "out") -> int:
    common = ["model.from_scratch=true", "train.steps=1", "data.max_length=128", "checkpoint.export_hf=false"]
    common += [f"model.path={model}", f"output_dir={folder}/{out}", f"data.cache_dir={folder}/cache"]
    return launch.main(recipe, [*common, *overrides])


def test_one_step_on_rows_of_others(model, tmp_path, capsys):
    """Fine-tuning on files of several forms and kinds, then GRPO on verl's Parquet and slime's JSON Lines."""
    (tmp_path / "parts").mkdir()
    for number, name in enumerate(TRAINED[:4]):
        write_rows(tmp_path / "parts" / f"{number}.jsonl", [SFT[name][0]])
    (tmp_path / "rest.json").write_text(json.dumps([SFT[name][0] for name in TRAINED[4:]]))
    files = f"data.train=[{tmp_path}/parts,{tmp_path}/rest.json]"
    assert run("sft", tmp_path / "sft", model, files, f"batch.global_size={len(TRAINED)}") == 0
    said = capsys.readouterr().out.splitlines()
    assert f"data: {len(TRAINED)} rows of {tmp_path}/parts, {tmp_path}/rest.json; no data.eval" in said
    assert "data.train: Alpaca rows: instruction and input, a line each -> user, history -> earlier turns, output -> " \
        "assistant" in said  # fmt: skip
    assert "data.train: MATH" not in said and "data: not read: level, type" in said
    (row,) = rows_of(tmp_path / "sft" / "out" / "metrics.jsonl")
    assert row["sequences"] == len(TRAINED)

    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "verl.parquet")
    write_rows(tmp_path / "slime.jsonl", [SLIME])
    (tmp_path / "score.py").write_text(REWARD)
    prompts = [f"data.train=[{tmp_path}/verl.parquet,{tmp_path}/slime.jsonl]", "rollout.num_generations=2"]
    prompts += ["batch.global_size=2", "rollout.max_new_tokens=4", f"reward.function={tmp_path}/score.py:score"]
    assert run("grpo", tmp_path / "rl", model, *prompts, "data.system=Be brief.") == 0
    rollouts = rows_of(tmp_path / "rl" / "out" / "rollouts.jsonl")
    assert {row["answer"] for row in rollouts} == {"2", "34"} and len(rollouts) == 4


def test_what_a_run_says_about_its_data(model, tmp_path, capsys):
    write_rows(tmp_path / "a.jsonl", [{"q": "1 + 1?", "a": "2", "tag": 1}, {"q": "2 + 2?", "a": "4", "tag": 2}])
    with open(tmp_path / "b.csv", "w", newline="") as file:
        csv.writer(file).writerows([["q", "a", "tag"], ["3 + 3?", "6", "3"]])
    columns = "data.columns={question: q, answer: a}"
    files = [f"data.train={tmp_path}/a.jsonl", f"data.eval={tmp_path}/b.csv"]
    assert run("sft", tmp_path, model, *files, columns, "data.system=Be brief.", "data.show_rows=1") == 0
    said = capsys.readouterr().out.splitlines()
    for key in ("data.train", "data.eval"):
        assert f"{key}: data.columns: q -> question, a -> answer" in said
        assert f"{key}: question/answer rows: question -> user, answer -> assistant" in said
    assert "data: not read: tag" in said
    shown = ["  <|im_start|>system", "  Be brief.<|im_end|>", "  <|im_start|>user", "  1 + 1?<|im_end|>"]
    assert said[said.index(shown[0]) :][: len(shown)] == shown
    kept = [{"messages": [{"role": "system", "content": "Be long."}, user("1?"), assistant("2")]}]
    write_rows(tmp_path / "c.jsonl", kept * 2)
    assert run("sft", tmp_path, model, f"data.train={tmp_path}/c.jsonl", "data.system=Be brief.", out="kept") == 0
    said = capsys.readouterr().out
    assert "data.train: 2 rows have a system message of their own, and keep it in place of data.system\n" in said


def test_another_mapping_is_tokenized_anew(model, tmp_path, capsys):
    """What data.columns and data.system say is part of the cache's name."""
    write_rows(tmp_path / "a.jsonl", [{"q": "1 + 1?", "a": "2", "b": "two"}])
    options = ["data.show_rows=1", f"data.train={tmp_path}/a.jsonl"]
    mappings = (("a", "S", "[[2<|im_end|>]]"), ("b", "S", "[[two<|im_end|>]]"), ("b", "T", "T<|im_end|>"))
    for number, (columns, system, last) in enumerate(mappings):
        columns = f"data.columns={{question: q, answer: {columns}}}"
        assert run("sft", tmp_path, model, *options, columns, f"data.system={system}", out=f"{number}") == 0
        assert f"  {last}\n" in capsys.readouterr().out


# What people have, as they name it: its rows, and what the first one has learned.
TO_LEARN = [
    ("sharegpt.jsonl", 1, "It is mild.<|im_end|>"),
    ("alpaca.jsonl", 1, "<response><|im_end|>"),
    ("alpaca.json", 1, "<response><|im_end|>"),
    ("query.jsonl", 1, "<response1><|im_end|><response2><|im_end|>"),
    ("human.jsonl", 1, "r1<|im_end|>r2<|im_end|>"),
    ("question.jsonl", 1, "2 - 1 = <<2-1=1>>1\n#### 1<|im_end|>"),
    ("problem.jsonl", 1, "It is $\\boxed{2}$.<|im_end|>"),
    ("openai.jsonl", 1, "4<|im_end|>"),  # its first answer has a weight of 0
    ("messages.jsonl", 1, "It is blue.<|im_end|>"),
    ("prompt.jsonl", 1, " blue.<|im_end|>"),
    ("prompts.jsonl", 1, "It is blue.<|im_end|>"),
    ("text.jsonl", 1, " sky is blue.<|im_end|>"),  # nothing stands before the first token
    ("array.json", 8, "0!<|im_end|>"),
    ("table.csv", 8, "0!<|im_end|>"),
    ("table.tsv", 8, "0!<|im_end|>"),
    ("lines.ndjson", 8, "0!<|im_end|>"),
    ("packed.jsonl.gz", 8, "0!<|im_end|>"),
    ("packed.jsonl.zst", 8, "0!<|im_end|>"),
    ("table.parquet", 8, "0!<|im_end|>"),
    ("file.arrow", 8, "0!<|im_end|>"),
    ("file.feather", 8, "0!<|im_end|>"),
    ("saved", 8, "0!<|im_end|>"),
    ("dict:train", 8, "0!<|im_end|>"),
    ("folder", 8, "0!<|im_end|>"),
    ("fold*/*.jsonl", 8, "0!<|im_end|>"),
]
# The last turn that the model is to answer, and the answer that a reward is given.
TO_ANSWER = [
    ("question.jsonl", "Janet has 2 eggs and sells 1.", "2 - 1 = <<2-1=1>>1\n#### 1"),
    ("problem.jsonl", "What is $1+1$?", "It is $\\boxed{2}$."),
    ("alpaca.jsonl", "<query-inst>\n<query-input>", None),
    ("query.jsonl", "<query2>", None),
    ("trl.jsonl", "What color is the sky?", "blue"),
    ("swift.jsonl", "1 + 1?", "2"),
    ("verl.parquet", VERL["prompt"][0]["content"], "2"),
    ("slime.jsonl", "What is $30 + 4$?", "34"),
]
NOT_TRAINED = [
    ("preference.jsonl", "preference.jsonl:1: `chosen` would not be seen by the model: isoloss has no training on"),
    ("openai/gsm8k", "data.train: openai/gsm8k is no file, and to read it from the Hugging Face hub needs the"),
]
FORMS = {
    "sharegpt": "LLaMA-Factory ShareGPT", "alpaca": "ms-swift Alpaca", "question": "GSM8K", "problem": "MATH",
    "query": "ms-swift query-response", "human": "ms-swift ShareGPT", "openai": "OpenAI weight",
    "messages": "TRL language modeling, conversational", "prompt": "TRL prompt-completion",
    "prompts": "TRL prompt-completion, conversational", "text": "TRL language modeling",
}  # fmt: skip


@pytest.fixture(scope="module")
def had(tmp_path_factory):
    folder = tmp_path_factory.mktemp("had")
    for name, form in FORMS.items():
        row = {key: value for key, value in SFT[form][0].items() if key != "tools"}
        if name == "sharegpt":
            row["conversations"] = [turn for turn in row["conversations"] if turn["from"] in ("human", "gpt")]
        write_rows(folder / f"{name}.jsonl", [row])
    for name, form in (("trl", "TRL with a solution"), ("swift", "ms-swift GRPO"), ("slime", "slime")):
        write_rows(folder / f"{name}.jsonl", [RL[form][0]])
    pq.write_table(pa.Table.from_pylist([VERL]), folder / "verl.parquet")
    write_rows(folder / "preference.jsonl", [REFUSED["preference"][0]])
    (folder / "alpaca.json").write_text(json.dumps([SFT["ms-swift Alpaca"][0]]))
    for name in ("array.json", "lines.ndjson", "packed.jsonl.gz", "packed.jsonl.zst", "table.parquet", "file.arrow",
                 "file.feather"):  # fmt: skip
        write_file(folder, name, TALKS)
    for name in ("table.csv", "table.tsv"):  # whose cells of messages are JSON
        write_file(folder, name, [{"messages": json.dumps(row["messages"])} for row in TALKS])
    save(folder / "saved", TALKS)
    save(folder / "dict" / "train", TALKS)
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (folder / "folder").mkdir()
    write_file(folder / "folder", "a.jsonl", TALKS)
    return folder


@pytest.fixture
def load(had, model, tmp_path, monkeypatch):
    """load(recipe, name): the data of a run that is given the name in the folder of it."""
    monkeypatch.chdir(had)
    monkeypatch.setitem(sys.modules, "datasets", None)

    def load(recipe: str, name: str):
        overrides = [f"model.path={model}", f"data.train=[{name}]", f"data.cache_dir={tmp_path}", "data.eval=[]"]
        overrides += ["data.max_length=128"]
        overrides += ["reward.function=math", "rollout.max_new_tokens=8"] if recipe == "grpo" else []
        kind: Any = RLConfig if recipe == "grpo" else Config
        of_recipe: Any = setup.load_data if recipe == "grpo" else loop.load_data
        return of_recipe(launch.compose_config(recipe, kind, overrides)[0], read_architecture(model)).train

    return load


@pytest.mark.parametrize(("name", "count", "learned"), TO_LEARN)
def test_what_people_have_to_learn(name, count, learned, load, model):
    rows = load("sft", name)
    assert len(rows) == count
    targets = rows[0].tokens_T[rows[0].mask_T].tolist()
    assert load_tokenizer(str(model), 2048).decode(targets) == learned


@pytest.mark.parametrize(("name", "turn", "answer"), TO_ANSWER)
def test_what_people_have_to_answer(name, turn, answer, load, model):
    (prompt,) = load("grpo", name).prompts
    text = load_tokenizer(str(model), 2048).decode(prompt.tokens)
    assert text.endswith(f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.answer == answer


@pytest.mark.parametrize(("name", "error"), NOT_TRAINED)
def test_what_people_have_and_is_not_trained(name, error, load):
    with pytest.raises(UserError) as refused:
        load("sft", name)
    assert str(refused.value).startswith(error) and "\n" not in str(refused.value)


def test_a_model_that_is_on_the_hub(capsys):
    assert launch.main("sft", ["model.path=Qwen/Qwen3-8B", "data.train=x.jsonl"]) == 2
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B" in capsys.readouterr().err
