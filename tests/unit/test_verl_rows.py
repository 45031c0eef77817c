"""verl's Parquet files as they are: DAPO-Math-17k and AIME-2024. Their columns and types are written down by hand."""

import uuid
from importlib.resources import files

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isoloss.engine.config.schema import Config, DataConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.prompts import load_prompts
from isoloss.engine.rl.reward.answer import Texts
from isoloss.engine.rl.reward.math_answers import math
from isoloss.engine.rl.reward.signatures import Attempt, Parameter, RewardFunction, recognise
from isoloss.engine.rl.setup import load_data
from isoloss.engine.rl.trajectory import Completion
from isoloss.models.families.registry import read_architecture
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes.launch import compose_config

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
COMMON = {
    "data_source": pa.string(),
    "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
    "ability": pa.string(),
    "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
}
TRAIN = pa.schema(COMMON | {"extra_info": pa.struct({"index": pa.string()})})
EVAL = pa.schema(
    COMMON | {"extra_info": pa.struct({"index": pa.int64(), "raw_problem": pa.string(), "split": pa.null()})}
)
SUMS = [("What is $30 + 4$?", "34"), ("What is $3 - 10$?", "-7"), ("What is $100 + 13$?", "113")]


def row(question: str, answer: str, extra_info: dict) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": TEXT.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": extra_info,
    }


@pytest.fixture
def data(tmp_path) -> DataConfig:
    """Each question four times, as both files repeat theirs, one after the other."""
    train = [row(*each, {"index": str(uuid.UUID(int=n))}) for n, each in enumerate(SUMS * 4)]
    held_out = [row(*each, {"index": n, "raw_problem": each[0], "split": None}) for n, each in enumerate(SUMS[:2] * 4)]
    for name, schema, rows in (("dapo-math-17k", TRAIN, train), ("aime-2024", EVAL, held_out)):
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / f"{name}.parquet")
    return DataConfig((str(tmp_path / "dapo-math-17k.parquet"),), (str(tmp_path / "aime-2024.parquet"),))


def load(data: DataConfig, split="train", **options):
    return load_prompts(data, split, load_tokenizer(TINY, 2048), max_prompt_tokens=1024, **options)


def test_columns_as_they_are(data):
    tokenizer = load_tokenizer(TINY, 2048)
    for split, count in (("train", 12), ("eval", 8)):
        prompts = load(data, split).prompts
        assert [prompt.answer for prompt in prompts][:2] == ["34", "-7"] and len(prompts) == count
        for prompt, (question, _) in zip(prompts, (SUMS if split == "train" else SUMS[:2]) * 4):
            chat = [{"role": "user", "content": TEXT.format(question)}]
            assert list(prompt.tokens) == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert (prompt.source, prompt.extra["ability"]) == ("math_dapo", "MATH")
    assert load(data).prompts[5].extra["extra_info"] == {"index": "00000000-0000-0000-0000-000000000005"}
    assert load(data, "eval").prompts[1].extra["extra_info"]["raw_problem"] == SUMS[1][0]


@pytest.mark.parametrize(
    ("last_line", "reward"),
    [("Answer: 34", 1), ("Answer: $34$", 1), ("**Answer:** 34.", 1), ("Answer: \\boxed{34}", 1), ("Answer: 35", 0),
     ("Answer: -34", 0), ("I do not know.", 0)],
)  # fmt: skip
def test_the_reward_of_an_answer_as_the_prompt_asks_for_it(data, last_line, reward):
    """The built-in `math`, whatever numbers stand before the last line."""
    answer = load(data).prompts[0].answer
    assert math(f"First, $30 = 3 \\cdot 10$. Adding $4$ is simple.\n\n{last_line}", answer) == reward


def test_a_reward_function_of_verl(data):
    """compute_score is given what verl gives it."""
    prompts = load(data).prompts
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    parameters = tuple(Parameter(name, "POSITIONAL_OR_KEYWORD", name != "extra_info") for name in names)
    convention = recognise("f", parameters, prompts)
    attempt = Attempt(prompts[1], Completion("id", (1,), (0.0,), (0,), "stop"), Texts(*["Answer: -7"] * 3))
    (call,) = RewardFunction(0, "f", "f", 1.0, convention, parameters).calls([attempt])
    assert convention == "verl" and call.arguments == {
        "data_source": "math_dapo",
        "solution_str": "Answer: -7",
        "ground_truth": "-7",
        "extra_info": {"index": "00000000-0000-0000-0000-000000000001"},
    }


def test_a_question_once(data, tmp_path):
    """Alike are rows with one prompt and one answer, whatever other columns say; the first of them stays."""
    once = load(data, duplicates="drop")
    assert [prompt.id for prompt in once.prompts] == [f"dapo-math-17k.parquet:{n}" for n in (1, 2, 3)]
    assert once.repeated == 9 and load(data).repeated == 0
    (name,) = data.train
    others = [
        row(SUMS[0][0], "35", {"index": "a"}),  # another answer
        row("What is $1$?", "34", {"index": "b"}),  # another prompt
        row(SUMS[0][0], "35", {"index": "c"}),
    ]
    pq.write_table(pa.Table.from_pylist(others, TRAIN), tmp_path / "more.parquet")
    both = load(DataConfig((name, str(tmp_path / "more.parquet"))), duplicates="drop")
    assert [prompt.answer for prompt in both.prompts] == ["34", "-7", "113", "35", "34"] and both.repeated == 10


def test_only_the_prompts_to_train_on_are_taken_once(data):
    """Evaluations keep what is repeated: the mean over 32 completions of a problem is one over 32 rows."""
    given = [f"model.path={TINY}", f"data.train=[{data.train[0]}]", f"data.eval=[{data.eval[0]}]"]
    given += ["reward.function=math", "rollout.max_new_tokens=64", "data.max_length=512"]
    config = compose_config("grpo", RLConfig, [*given, "data.duplicates=drop"])[0]
    loaded = load_data(config, read_architecture(TINY))
    assert loaded.eval is not None and (len(loaded.train.prompts), len(loaded.eval.prompts)) == (3, 8)
    config = compose_config("grpo", RLConfig, given)[0]
    assert len(load_data(config, read_architecture(TINY)).train.prompts) == 12


def test_fine_tuning_has_no_such_key():
    with pytest.raises(UserError, match=r"data.duplicates is a key of grpo and dapo, not of this recipe"):
        compose_config("sft", Config, [f"model.path={TINY}", "data.train=[x.jsonl]", "data.duplicates=drop"])
