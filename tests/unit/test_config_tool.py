"""`isoloss config diff`: which keys differ, whatever is compared."""

import subprocess
import sys
from pathlib import Path

import pytest

from isoloss.engine.config import config_file
from isoloss.recipes import launch
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.config import __main__ as config


@pytest.fixture
def runs(tmp_path, monkeypatch) -> None:
    """Folders of runs: one of fine-tuning, one of reinforcement learning; and a file of two keys."""
    monkeypatch.chdir(tmp_path)
    for recipe in ("sft", "grpo"):
        Path(recipe).mkdir()
        values = compose_config(recipe, RECIPES[recipe].config, [])[1]
        Path(recipe, "config.yaml").write_text(config_file.dump(values | {"output_dir": recipe}))
    Path("my.yaml").write_text(
        "preset: tiny\noptim: {lr: 1e-4, betas: [0.8, 0.9]}\ndata: {template_kwargs: {a: no_b}, eval: x}\n"
    )


def diff(capsys, *words: str) -> tuple[int, list[list[str]]]:
    status = config.main(["diff", *words])
    return status, [line.split() for line in capsys.readouterr().out.splitlines()]


def test_what_differs(runs, capsys):
    assert diff(capsys, "sft", "sft/config.yaml") == (0, [["no", "key", "differs"]])
    assert diff(capsys, "preset=tiny", "my.yaml") == (
        1,
        [
            ["key", "of", "sft", "preset=tiny", "my.yaml"],
            ["data.eval", f"[{launch.ASSETS}/tiny/eval.jsonl]", "[x]"],
            ["data.template_kwargs", "{}", "{a:no_b}"],
            ["optim.lr", "0.004", "0.0001"],
            ["optim.betas", "[0.9,0.95]", "[0.8,0.9]"],
        ],
    )
    assert diff(capsys, "sft", "preset=tiny") == (
        1, [["key", "of", "sft", "sft", "preset=tiny"], ["output_dir", "sft", "null"]]
    )  # fmt: skip


def test_the_recipe(runs, capsys):
    status, lines = diff(capsys, "grpo", "preset=tiny")
    assert (status, lines) == (1, [["key", "of", "grpo", "grpo", "preset=tiny"], ["output_dir", "grpo", "null"]])
    _, lines = diff(capsys, "preset=plain", "my.yaml", "--recipe", "dapo")
    assert ["algorithm.dynamic_sampling", "true", "true"] not in lines and lines[0][2] == "dapo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x=y", "sft"], "x=y is not a configuration: give a file, the folder of a run, or preset=NAME"),
        (["sft", "."], ". is not the folder of a run: it has no config.yaml"),
        (["sft", "none.yaml"], "config=none.yaml: No such file or directory"),
        (["sft", "preset=huge"], "preset='huge' does not exist"),
        (["grpo", "sft", "--recipe", "sft"], "is a key of grpo and dapo, not of this recipe"),
    ],
)
def test_a_mistake_is_one_line(runs, words, says, capsys):
    assert config.main(["diff", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_it_needs_no_torch(runs):
    script = "import sys\nfrom isoloss.tools.config.__main__ import main\nmain()\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "diff", "sft", "sft"], text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines() == ["no key differs", "False"]
