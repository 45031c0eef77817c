"""What somebody typed to start a recipe or a tool, and what one line says of it."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from isoloss.engine.config.parse import key_types
from isoloss.engine.rl.algorithms import ADVANTAGES
from isoloss.engine.rl.config import RLConfig
from isoloss.recipes import command_line, launch
from isoloss.tools.plan import __main__ as plan
from isoloss.tools.prove import __main__ as prove

RUN = ["model.path=m", "data.train=[a.jsonl]"]


@pytest.fixture(autouse=True)
def never(monkeypatch) -> None:
    def run(recipe, config, run_name):
        raise AssertionError("the run began")

    monkeypatch.setattr(launch, "run", run)


def said(monkeypatch, capsys, recipe: str, words: list[str]) -> str:
    monkeypatch.setattr(sys, "argv", [recipe, *words])
    assert launch.main(recipe) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("isoloss: error: ")


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        ("sft", ["data.train=a.jsonl", "data.train=b.jsonl"], "write a list as data.train=[a.jsonl,b.jsonl]"),
        ("sft", ["data.eval=[a,b]", "optim.lr=1", "data.eval=c"], "write a list as data.eval=[a,b,c]"),
        ("grpo", ["reward.function=math", "reward.function=x.py:f"], "write a list as reward.function=[math,x.py:f]"),
        ("sft", ["optim.lr=1e-3", "optim.lr=1e-4"], "as optim.lr=1e-3 and as optim.lr=1e-4; give it once"),
        ("dapo", ["preset=tiny", "preset=plain"], "preset is given twice"),
        ("sft", [*RUN, "--lr", "1e-4"], "there is no option --lr; write keys as key=value, such as optim.lr=1e-4"),
        ("sft", [*RUN, "--learning-rate=1e-4"], "such as optim.lr=1e-4"),
        ("grpo", ["--max_steps", "7", *RUN], "such as train.steps=7"),
        ("sft", ["--config", "f.yaml"], "there is no option --config; write config=f.yaml"),
        ("sft", ["--cf", *RUN], "there is no option --cf; "),
        ("sft", ["model.path", "=", "DIR"], "write model.path=DIR in one word"),
        ("sft", ["model.path=", "DIR", *RUN[1:]], "write model.path=DIR in one word"),
        ("sft", ["model.path", "=DIR"], "write model.path=DIR in one word"),
        ("grpo", [RUN[0], "rollout.waves", "2"], "write rollout.waves=2 in one word"),
        ("sft", [*RUN, "train.eval_every=5"], "train.eval_every=5 is of evaluations, and data.eval=[] has none"),
        ("sft", ["preset=tiny", "data.eval=[]", "train.eval_every=5"], "data.eval=[] has none"),
        ("grpo", [*RUN, "rollout.eval_top_p=0.9"], "rollout.eval_top_p=0.9 is of evaluations"),
        (
            "grpo",
            [*RUN, "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator=k1 has no effect with algorithm.kl_coef=0.0: set algorithm.kl_coef to another",
        ),
        ("grpo", [*RUN, "algorithm.kl_in=reward", "algorithm.kl_coef=0"], "no effect with algorithm.kl_coef=0"),
        ("grpo", [*RUN, "algorithm.gae_lambda=0.9"], "algorithm.gae_lambda=0.9 has no effect with algorithm.advantage"),
        ("grpo", [*RUN, "algorithm.max_draws=3"], "no effect with algorithm.dynamic_sampling=false"),
        ("dapo", [*RUN, "algorithm.importance_cap=5"], "no effect with algorithm.importance=none"),
        ("grpo", [*RUN, "rollout.servers=[http://a:1]"], "no effect with rollout.backend=transformers"),
        (
            "sft",
            ["parallel.tp=2", "model.path=m", "data.train=[a b.jsonl]"],
            "torchrun --nproc_per_node 2 -m isoloss.recipes.sft parallel.tp=2 model.path=m 'data.train=[a b.jsonl]'",
        ),
        ("grpo", [*RUN, "parallel.pp=2", "parallel.ulysses=2"], "the layout pp2+ulysses2 needs 4 ranks, or a multiple"),
        ("sft", [*RUN, "parallel.tp=2", "parallel.ep=4", "parallel.etp=2"], "torchrun --nproc_per_node 8 -m isoloss"),
        ("dapo", [*RUN, "parallel.ep=2"], "torchrun --nproc_per_node 2 -m isoloss.recipes.dapo model.path=m"),
        ("grpo", ["--rollout-batch-size", "32", *RUN], "such as batch.global_size=32"),
        ("sft", [*RUN, "--lora-rank", "8"], "such as lora.rank=8"),
        (
            "sft",
            [*RUN, "--hub-model-id=x"],
            "there is no option --hub-model-id; a Hugging Face folder in output_dir/hf",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(monkeypatch, capsys, recipe, words, says):
    assert says in said(monkeypatch, capsys, recipe, words)


@pytest.mark.parametrize(
    "words",
    [
        [*RUN, "train.eval_every=0"],
        [*RUN, "data.eval=[b.jsonl]", "train.eval_every=5"],
        ["preset=tiny", "data.eval=[]"],  # what a preset says is no contradiction of the user's
        ["preset=tiny", "train.eval_every=5"],
        ["output_dir=", *RUN],
    ],
)
def test_what_is_no_mistake(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["sft", *words, "--cfg"])
    assert launch.main("sft") == 0
    assert "max_length" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1"],
        ["algorithm.kl_estimator=k3"],  # the default
        ["algorithm.max_draws=3", "algorithm.dynamic_sampling=true"],
        ["algorithm.gae_lambda=0.9", "algorithm.advantage=gae"],
        ["algorithm.importance_cap=5", "algorithm.loss=mine.py:loss"],  # which may read it
        ["rollout.servers=[http://a:1]", "rollout.backend=sglang"],
    ],
)
def test_what_has_an_effect(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["grpo", *RUN, *words, "--cfg"])
    assert launch.main("grpo") == 0
    assert "max_length" in capsys.readouterr().out


def test_the_model_of_the_demonstration_was_not_made_yet(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "isoloss.recipes.sft preset=sort output_dir=runs/sft-sort` first" in said(monkeypatch, capsys, "grpo", [])
    (tmp_path / f"{command_line.START}/hf").mkdir(parents=True)
    monkeypatch.setattr(launch, "run", lambda *given: None)
    assert launch.main("grpo", []) == 0


def test_switches_and_what_they_switch_are_keys():
    keys = {name for name, _ in key_types(RLConfig)}
    for of_switch, switches in command_line.WITHOUT_EFFECT.items():
        assert {*of_switch.split(), *switches} <= keys
    others = command_line.WITHOUT_EFFECT["algorithm.gae_lambda algorithm.value_clip algorithm.critic_lr"]
    assert {*others["algorithm.advantage"]} == {name for name, each in ADVANTAGES.items() if not each.critic}


def test_a_rank_of_torchrun_needs_no_other_command(monkeypatch):
    """Of a world that the layout does not divide, the layout speaks."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    started = []
    monkeypatch.setattr(launch, "run", lambda recipe, config, name: started.append((recipe, config.parallel.tp, name)))
    assert launch.main("sft", [*RUN, "parallel.tp=2"]) == 0
    assert started == [("sft", 2, "sft-plain")]


@pytest.mark.parametrize("recipe", launch.RECIPES)
def test_each_recipe_has_a_command_and_a_loop(monkeypatch, recipe):
    started = []
    monkeypatch.setattr(launch, "run", lambda *given: started.append(given))
    monkeypatch.setattr(sys, "argv", [recipe, *RUN])
    assert importlib.import_module(f"isoloss.recipes.{recipe}").main() == 0
    ((name, config, run_name),) = started
    assert (name, run_name) == (recipe, f"{recipe}-plain")
    assert isinstance(config, RLConfig) == (recipe != "sft")
    module, _, function = launch.RECIPES[recipe].loop.partition(":")
    found = importlib.util.find_spec(module)  # an import of it takes seconds
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    parameters = rf"\(\s*config: {type(config).__name__},\s*run_name: str\b"
    assert re.search(rf"^def {function}{parameters}", source, re.MULTILINE)


def test_of_a_programs_list_the_last_one_counts(capsys):
    assert launch.main("grpo", [*RUN, "optim.lr=1e-3", "optim.lr=0.25", "--cfg"]) == 0
    assert "lr: 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "words", "says"),
    [
        (prove, ["--layouts", "dp2", "output_dir=here"], "--out here is that of the certificate"),
        (prove, ["data.train=a", "data.train=b"], "write a list as data.train=[a,b]"),
        (prove, ["--loss", "clip", "algorithm.kl_coef=0", "algorithm.kl_coef=1"], "give it once"),
        (plan, ["sft", *RUN, "--gpus", "0"], "--gpus 0 must be at least 1"),
        (plan, ["sft", *RUN, "--gpus", "-8"], "--gpus -8 must be at least 1"),
        (plan, ["sft", *RUN, "--gpus", "8", "model.path=n"], "model.path is given twice"),
    ],
)
def test_the_tools_refuse_it_too(monkeypatch, capsys, tool, words, says):
    monkeypatch.setattr(sys, "argv", ["tool", *words])
    assert tool.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
