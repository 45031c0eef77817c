"""Configuration files of a user's: what they mean, and what is said of a mistake in them."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from isoloss.engine.config import config_file
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import UserError
from isoloss.recipes import launch
from isoloss.recipes.launch import compose_config

# With a long list, a pair, a mapping and values that only look like others.
RL = [
    "preset=8b_h100",
    "model.path=m",
    "data.train=[a.jsonl,'b c.jsonl']",
    "reward.function=[math,x.py:f]",
    "reward.weights=[1,0.5]",
    "optim.betas=[0.8,0.9]",
    "rollout.servers=[http://a:1]",
    "rollout.server_command='serve --port 1 ${x}'",
    "data.template_kwargs={thinking:false,depth:010,small:1e-7,text:'1e-4'}",
    "data.date='2026-02-03'",
]


def test_what_cfg_prints_is_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*RL[:7], r"rollout.server_command='serve \${x}'", *RL[8:]]
    for recipe, keys in (("grpo", words), ("dapo", ["optim.lr=1e-5"]), ("sft", ["output_dir=no"])):
        config, values, _ = compose_config(recipe, launch.RECIPES[recipe].config, keys)
        assert launch.main(recipe, [*keys, "--cfg"]) == 0
        Path("all.yaml").write_text(capsys.readouterr().out)
        again, same_values, preset = compose_config(recipe, type(config), ["config=all.yaml"])
        assert (again, same_values, preset) == (config, values, "plain")


@pytest.mark.parametrize("recipe", launch.RECIPES)
def test_a_copy_of_a_preset_is_a_file(recipe):
    for preset in (launch.CONF / recipe / "preset").glob("*.yaml"):
        values = yaml.safe_load(preset.read_text())
        if values is not None:  # the preset of the defaults
            assert config_file.read(preset, launch.RECIPES[recipe].config, {}).nested() == values


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text() | st.sampled_from(
    ["${x}", "\\${x}", "a\\\\${b}\\", "no", "1e-4", "012", "3:30", "2026-01-01", "~", "", "null", "0x1f", ".5", "1_0"]
)


names = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1)


@given(st.dictionaries(names, scalars | texts | st.lists(texts)), texts)
@settings(max_examples=60, deadline=None)
def test_any_value_survives(kwargs, folder):
    values = {"model": {"path": folder}, "data": {"template_kwargs": kwargs}}
    path = Path(launch.tempfile.mkdtemp()) / "any.yaml"
    path.write_text(config_file.dump(values))
    read = config_file.read(path, Config, {}).nested()
    path.unlink()
    path.parent.rmdir()
    assert OmegaConf.to_container(OmegaConf.create(read), resolve=True) == values


def test_the_order_of_what_wins(tmp_path, monkeypatch):
    """Preset, then files as they stand, then the command line; wherever the words stand."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("preset: 8b_h100\nmodel: {path: a}\ndata.train: [a, b]\noptim: {lr: 1e-4, clip: 3}\n")
    Path("b.yaml").write_text("optim:\n  lr: 2e-4\ndata:\n  train: c\n  template_kwargs: {x: 1}\n")
    Path("c.yaml").write_text("preset: 32b_h100\ndata: {template_kwargs: {y: yes}}".replace("yes", "'yes'"))
    config, _, preset = compose_config("sft", Config, ["optim.clip=5", "config=a.yaml", "config=b.yaml"])
    assert preset == "8b_h100" and config.parallel.tp == 2  # which the preset says
    assert (config.model.path, config.data.train) == ("a", ("c",))
    assert (config.optim.lr, config.optim.clip) == (2e-4, 5)
    other, _, _ = compose_config("sft", Config, ["config=b.yaml", "config=a.yaml"])
    assert (other.optim.lr, other.optim.clip, other.data.train) == (1e-4, 3, ("a", "b"))
    both, _, preset = compose_config("sft", Config, ["config=a.yaml", "config=b.yaml", "config=c.yaml"])
    assert preset == "32b_h100" and both.data.template_kwargs == {"x": 1, "y": "yes"}
    assert (
        compose_config("sft", Config, ["config=c.yaml", "preset=plain", "model.path=m", "data.train=[x]"])[2] == "plain"
    )
    Path("d.yaml").write_text("train: {steps: 3}")
    assert compose_config("sft", Config, ["config=d.yaml"])[2] == "tiny"  # no model: the demonstration


@pytest.mark.parametrize(
    ("text", "of", "read"),
    [
        ("optim.lr: 1e-4", "optim.lr", 1e-4),
        ("optim.lr: 3", "optim.lr", 3.0),
        ("optim.lr: '1e-4'", "optim.lr", 1e-4),
        ("optim: {betas: [0.9, 1e-1]}", "optim.betas", (0.9, 0.1)),
        ("output_dir: no", "output_dir", "no"),
        ("output_dir: 010", "output_dir", "010"),
        ("output_dir: 2026-01-01", "output_dir", "2026-01-01"),
        ("output_dir: ~", "output_dir", None),
        ("output_dir:", "output_dir", None),
        ("output_dir: 'null'", "output_dir", "null"),
        ("train.profile: 3:30", "train.profile", "3:30"),
        ("model.from_scratch: Yes", "model.from_scratch", True),
        ("model: {from_scratch: off}", "model.from_scratch", False),
        ("train.steps: 1_000", "train.steps", 1000),
        ("data: {train: a b.jsonl}", "data.train", ("a b.jsonl",)),
        ("data.template_kwargs: {a: 1e-4, b: 'no', c: [1, true, ~]}", "data.template_kwargs",
         {"a": 1e-4, "b": "no", "c": [1, True, None]}),
        ("data.train: &files [a]\ndata.eval: *files", "data.eval", ("a",)),
        ("output_dir: ${model.path}/run", "output_dir", "m/run"),
    ],
)  # fmt: skip
def test_values_are_what_their_keys_want(text, of, read, tmp_path):
    (tmp_path / "my.yaml").write_text(text)
    keys = ["model.path=m", *(["data.train=[x]"] * ("data.train" not in text and "data: {train" not in text))]
    config: object = compose_config("sft", Config, [*keys, f"config={tmp_path / 'my.yaml'}"])[0]
    for part in of.split("."):
        config = getattr(config, part)
    assert config == read and type(config) is type(read)


MISTAKES = [
    ("optim:\n  lrr: 1", "my.yaml:2: unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
    ("learning_rate: 1", "my.yaml:1: unknown key 'learning_rate'; did you mean 'optim.lr'?"),
    ("# a\noptim:\n  lr: 1\n  clip: 1\n  lr: 2", "my.yaml:5: optim.lr is given twice, first in line 3; give it once"),
    ("optim: {lr: 1}\noptim.lr: 2", "my.yaml:2: optim.lr is given twice, first in line 1"),
    ("optim: {lr: 1}\ntrain: {steps: 1}\noptim: {clip: 2}", "my.yaml:3: optim is given twice, first in line 1"),
    ("data:\n  template_kwargs: {a: 1, a: 2}", "my.yaml:2: data.template_kwargs.a is given twice"),
    (
        "data.template_kwargs:\n  a: no",
        "my.yaml:2: data.template_kwargs.a: no is bool to some readers of YAML; put quotes",
    ),
    ("data.template_kwargs: {a: 012}", "a: 012 is int to some readers"),
    ("data.template_kwargs: {a: 2026-01-01}", "a: 2026-01-01 is timestamp to some readers"),
    ("train.steps: 1e3", "my.yaml:1: train.steps='1e3' must be an integer"),
    ("train.steps: 010", "train.steps='010' must be an integer"),
    ("model.from_scratch: 1", "model.from_scratch='1' must be true or false"),
    ("output_dir: None", "my.yaml:1: output_dir: None is a text in YAML; write null"),
    ("optim.lr: !!python/name:os.system x", "optim.lr: the tag python/name:os.system is not read"),
    ("optim.lr: ", "optim.lr=None must be a number"),
    ("optim:", "my.yaml:1: optim is a group and must have keys below it, such as `optim.lr`"),
    ("optim: 3", "optim is a group and must have keys below it"),
    ("optim:\n\tlr: 1", "my.yaml:2: cannot be read as YAML: found character '\\t'"),
    ("optim: {lr: 1", "my.yaml:1: cannot be read as YAML: expected ',' or '}'"),
    ("optim.lr: 1\n---\noptim.lr: 2", "my.yaml:2: cannot be read as YAML: but found another document"),
    ("", "my.yaml must hold keys, a line each"),
    ("optim.lr=1e-4 train.steps=3", "my.yaml must hold keys, a line each, such as `optim.lr: 1e-5`"),
    ("- optim.lr=1e-4", "must hold keys"),
    ("base: &base {lr: 1}\noptim: {<<: *base}", "my.yaml:1: unknown key 'base'"),
    ("optim: &me {lr: 1, <<: *me}", "without merged or recursive anchors"),
    ("data: {template_kwargs: {a: &me [*me]}}", "an anchor must not contain itself"),
    ("data: {template_kwargs: &me {a: *me}}", "without merged or recursive anchors"),
    ("defaults: [preset: tiny]", "my.yaml:1: defaults is of Hydra's own files: write `preset: NAME`"),
    ("config: base.yaml", "give both on the command line, config=FIRST config=SECOND"),
    ("preset: [tiny]", "preset must be the name of a preset"),
    ("preset: huge", "preset='huge' does not exist; choose one of"),
    ("rollout.temperature: 1", "my.yaml:1: rollout.temperature is a key of grpo and dapo, not of this recipe"),
    ("optim:\n  lr: -1", "optim.lr=-1.0 must not be negative (my.yaml:2)"),
    ("train:\n  precision: fp16", "train.precision='fp16' is not one of fp32, bf16, fp64 (my.yaml:2)"),
    ("output_dir: ${nothing}", "nothing"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_a_mistake_is_named_with_its_line(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        compose_config("sft", Config, ["config=my.yaml"])
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["config=none.yaml"], "config=none.yaml: No such file or directory; give a YAML file"),
        (["config=."], "config=. is a folder: write config=config.yaml"),
        (["config=binary.yaml"], "config=binary.yaml is not UTF-8"),
        (["config="], "config= must name one file"),
        (["config=[a.yaml,b.yaml]"], "give several as config=FIRST config=SECOND"),
        (["config=a.yaml,b.yaml"], "give several as config=FIRST config=SECOND"),
        (["my.yaml"], "cannot read 'my.yaml'; write config=my.yaml"),
        (["--config", "my.yaml"], "there is no option --config; write config=my.yaml"),
        (["--config=my.yaml"], "write config=my.yaml"),
        (["--file", "my.yml"], "there is no option --file; write config=my.yml"),
        (["preset=./my.yaml"], "preset=./my.yaml is a file: write config=./my.yaml"),
        (["preset="], "preset='' does not exist"),
        (["config", "=", "my.yaml"], "write config=my.yaml in one word"),
        (["config=my.yaml", "algorithm.kl_estimator=k1"], "has no effect with algorithm.kl_coef=0.0"),
        (["config=my.yaml", "optim.lr=-3"], "optim.lr=-3.0 must not be negative"),
    ],
)
def test_a_command_line_with_files(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("optim.lr: -1")
    Path("binary.yaml").write_bytes(b"a: \xff")
    if "algorithm.kl_estimator=k1" in words:
        Path("my.yaml").write_text("optim.lr: 1")
    monkeypatch.setattr(sys, "argv", ["grpo", *words])
    assert launch.main("grpo") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not line.endswith("(my.yaml:1)")


def test_a_run_is_started_with_a_banner_line_and_hashes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda recipe, config, name: print(name, json.dumps(config_file.recorded())))
    texts = {"a.yaml": "model.path: m\ndata.train: x\n", "b.yaml": "optim.lr: 1e-4\n"}
    for name, text in texts.items():
        Path(name).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    monkeypatch.setattr(sys, "argv", ["sft", "config=a.yaml", "config=b.yaml"])  # not refused as repeated
    assert launch.main("sft") == 0
    banner, run = capsys.readouterr().out.splitlines()
    listed = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in digests.items())
    assert banner == f"configuration: preset=plain, then {listed}"
    assert run == f"sft-plain {json.dumps(digests)}"
    monkeypatch.setattr(sys, "argv", ["sft", "model.path=m", "data.train=x"])
    assert launch.main("sft") == 0
    assert capsys.readouterr().out == "sft-plain {}\n"  # those of an earlier configuration are not this one's


def test_the_schema_of_reinforcement_learning_reads_files_of_fine_tuning(tmp_path):
    _, values, _ = compose_config("sft", Config, [])
    (tmp_path / "sft.yaml").write_text(config_file.dump(values))
    assert config_file.read(tmp_path / "sft.yaml", RLConfig, {}).nested() == values
