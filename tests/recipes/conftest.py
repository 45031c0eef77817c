"""Models and rows so small that a run of the whole recipe takes seconds."""

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from isoloss.engine.config import Config
from isoloss.recipes import launch, sft

TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Sequence[dict | str]) -> Path:
    """A JSON Lines file; a row that is a string is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A folder with `model` (config.json and tokenizer, no weights) and `rows.jsonl` (12 short conversations)."""
    folder = tmp_path_factory.mktemp("inputs")
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, model)
    (model / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | SMALL))
    rows = [conversation(f"What is {n} plus {n}?", f"{n} plus {n} is {n + n}." + " Yes." * (n % 5)) for n in range(12)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


@pytest.fixture
def arguments(inputs, tmp_path, monkeypatch) -> list[str]:
    """Overrides for a run of two steps in the empty folder `tmp_path/work`, which becomes the
    working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return [
        f"model.path={inputs}/model",
        "model.from_scratch=true",
        f"data.train={inputs}/rows.jsonl",
        "data.eval=[]",
        "data.max_length=128",
        "batch.global_size=4",
        "batch.max_tokens=256",
        "train.steps=2",
        "output_dir=out",
    ]


@pytest.fixture(scope="session")
def sorter(tmp_path_factory) -> Path:
    """A folder with `hf`, a model that sorts three letters of a to f as a careless demonstrator taught it, and with the
    120 problems that there are, as `rl.jsonl` and `eval.jsonl`."""
    folder, chance = tmp_path_factory.mktemp("sorter"), random.Random(0)
    problems = ["".join(letters) for letters in itertools.permutations("abcdef", 3)]

    def row(problem: str, **more: str) -> dict:
        return {"prompt": [{"role": "user", "content": f"Sort the letters: {problem}"}], **more}

    def careless(problem: str) -> str:
        first, second, third = sorted(problem)
        return first + (third + second if chance.random() < 0.65 else second + third)

    demonstrations = [row(problem, completion=careless(problem)) for _ in range(16) for problem in problems]
    data = write_rows(folder / "sft.jsonl", demonstrations)
    for name in ("rl.jsonl", "eval.jsonl"):
        write_rows(folder / name, [row(problem, answer="".join(sorted(problem))) for problem in problems])
    short = ["train.steps=150", "batch.global_size=32", "optim.lr=3e-3", "optim.warmup_steps=5"]
    argv = ["preset=sort", f"data.train={data}", *short, f"output_dir={folder}/sft"]
    assert launch.main("sft", Config, sft.run, argv) == 0
    return (folder / "sft" / "hf").rename(folder / "hf").parent
