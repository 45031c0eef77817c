"""What a key says of itself: its bounds refuse, however the configuration is built, and `--help` tells them."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

from isoloss.engine.config import help
from isoloss.engine.config import schema as config
from isoloss.engine.config.parse import known_keys
from isoloss.engine.config.schema import DataConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import UserError
from isoloss.parallel.runtime.config_key import Keys, choices_of, key, meaning_of
from isoloss.recipes import launch
from isoloss.tools.dev import configuration

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def never(monkeypatch):
    def run(recipe, config, run_name):
        raise AssertionError("--help must not start a run")

    monkeypatch.setattr(launch, "run", run)


def helped(capsys, *argv: str) -> str:
    assert launch.main("grpo", list(argv)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_help_tells_every_key_and_keeps_to_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = helped(capsys, "--help").splitlines()
    assert max(map(len, lines)) <= columns
    told = [match[1] for line in lines if (match := re.match(r"  ([a-z_.]+)(=\S+)?  \(", line))]
    assert sorted(told) == sorted(known_keys(RLConfig)) and len(told) > 100
    assert "Presets" in " ".join(lines) and "tiny" in " ".join(lines)


def test_help_of_a_group_tells_type_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = helped(capsys, "--help", "optim")
    assert "optim.lr=1e-05  (number >= 0)\n      Peak learning rate.\n" in out
    assert "optim.schedule=cosine  (constant | linear | cosine)\n" in out
    assert "optim.betas=[0.9,0.95]  (list of 2 numbers >= 0 and < 1)\n" in out
    assert "train.steps" not in out and "model." not in out and "usage:" not in out
    assert "train.steps=null  (integer >= 1 or null)\n" in helped(capsys, "--help", "train")
    assert "parallel.sequence_parallel=null  (true | false | null)\n" in helped(capsys, "-h", "parallel")
    assert "model.path  (text; required)" in helped(capsys, "-h", "model")


def test_help_of_one_key(capsys):
    out = helped(capsys, "--help", "output_dir")
    assert "output_dir=null  (text or null)" in out and "optim." not in out


@pytest.mark.parametrize(
    ("topic", "says"), [("rolout", "did you mean 'rollout'?"), ("optim.lrr", "'optim.lr'"), ("xyz", "groups: model, ")]
)
def test_help_of_an_unknown_group_is_one_line(topic, says, capsys):
    assert launch.main("grpo", ["--help", topic]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"isoloss: error: --help {topic}: ") and says in err


def test_the_page_of_the_documentation_is_what_the_classes_say(tmp_path):
    configuration.main(["--out", str(tmp_path / "page.md")])
    written = (tmp_path / "page.md").read_text()
    assert (ROOT / "docs/configuration.md").read_text() == written, "run python -m isoloss.tools.dev.configuration"
    told = re.findall(r"^- `([a-z_.]+)(?:=\S+)?` \((.+)\)<br>\n  \S", written, re.M)
    assert [name for name, _ in told] == [*(f"{g}.{f.name}" for g, f in KEYS), "output_dir"]
    assert max(len(line) for line in written.splitlines()) <= 220


# ---- bounds ---------------------------------------------------------------------------------------------------------

GROUPS = {f.name: f.type for f in dataclasses.fields(RLConfig) if dataclasses.is_dataclass(f.type)}
KEYS = [(group, f) for group, cls in GROUPS.items() for f in dataclasses.fields(cls)]
NECESSARY = {"model": {"path": "somewhere"}}


def of(group: str, name: str, value: object) -> typing.Any:
    return GROUPS[group](**(NECESSARY.get(group, {}) | {name: value}))


@pytest.mark.parametrize(("group", "field"), KEYS, ids=[f"{g}.{f.name}" for g, f in KEYS])
def test_every_key_refuses_what_its_bounds_exclude(group, field):
    """Built in Python, not from a command line; and the message has the key's whole name."""
    meaning, name = meaning_of(field), f"{group}.{field.name}"
    assert meaning.text.endswith(".") and "\n" not in meaning.text
    pair = typing.get_origin(field.type) is tuple
    steps = {">=": -1, ">": 0, "<=": 1, "<": 0}
    wrong = [bound + steps[sign] for sign, bound in meaning.bounds()]
    wrong += ["no such choice"] if choices_of(field) else []
    wrong += [float("nan"), float("inf")] if float in (field.type, *typing.get_args(field.type)) else []
    for value in wrong:
        with pytest.raises(UserError) as error:
            of(group, field.name, (value, value) if pair else value)
        assert str(error.value).startswith(f"{name}=") and "\n" not in str(error.value)
    if meaning.required:
        with pytest.raises(UserError, match=f"{name}="):
            of(group, field.name, () if pair else "")


def test_a_default_is_within_its_bounds():
    for group, field in KEYS:
        if field.default_factory is dataclasses.MISSING:
            of(group, field.name, NECESSARY.get(group, {}).get(field.name, field.default))


def test_the_names_of_groups_are_those_of_the_configuration():
    assert all(issubclass(cls, Keys) and cls._group == name for name, cls in GROUPS.items())


@dataclasses.dataclass(frozen=True)
class Sample(Keys, group="sample"):
    """Every form of a bound."""

    low: float = key(1.0, "Text.", at_least=0)
    positive: int = key(1, "Text.", above=0)
    low_or_null: int | None = key(None, "Text.", at_least=0)
    positive_or_null: int | None = key(None, "Text.", above=0)
    share: float = key(0.5, "Text.", at_least=0, at_most=1)
    half_open: tuple[float, ...] = key((), "Text.", at_least=0, below=1)
    odd: float = key(0.5, "Text.", above=0, at_most=1)
    worded: int = key(1, "Text.", at_least=1, refusal="must be one or more")
    fraction: float = key(1.0, "Text.", at_least=0.5)
    named: tuple[str, ...] = key((), "Text.", choices=("a", "b"))
    options: Mapping[str, object] = key({"a": True}, "Text.")
    plain: int | None = key(None, "Text.")


@dataclasses.dataclass(frozen=True)
class Whole:
    sample: Sample = dataclasses.field(default_factory=Sample)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("low", -1.0, "sample.low=-1.0 must not be negative"),
        ("positive", 0, "sample.positive=0 must be positive"),
        ("low_or_null", -1, "sample.low_or_null=-1 must be at least 0, or null"),
        ("positive_or_null", 0, "sample.positive_or_null=0 must be positive, or null"),
        ("share", 1.5, "sample.share=1.5 must be in [0, 1]"),
        ("half_open", (0.5, 1.0), "sample.half_open=(0.5, 1.0) must each be in [0, 1)"),
        ("odd", 0.0, "sample.odd=0.0 must be above 0 and at most 1"),
        ("odd", float("nan"), "sample.odd=nan must be a finite number"),
        ("worded", 0, "sample.worded=0 must be one or more"),
        ("fraction", 0, "sample.fraction=0 must be at least 0.5"),
        ("named", ("a", "c"), "sample.named=('a', 'c') may only name a, b"),
    ],
)
def test_the_words_of_a_refusal(name, value, said):
    with pytest.raises(UserError) as error:
        Sample(**{name: value})
    assert str(error.value) == said


def test_every_form_of_a_key_is_told():
    told = help.terminal_help(Whole, "sample", 120)
    assert [line.strip() for line in told.splitlines() if line.startswith("  sample.")] == [
        "sample.low=1.0  (number >= 0)",
        "sample.positive=1  (integer > 0)",
        "sample.low_or_null=null  (integer >= 0 or null)",
        "sample.positive_or_null=null  (integer > 0 or null)",
        "sample.share=0.5  (number >= 0 and <= 1)",
        "sample.half_open=[]  (list of numbers >= 0 and < 1)",
        "sample.odd=0.5  (number > 0 and <= 1)",
        "sample.worded=1  (integer >= 1)",
        "sample.fraction=1.0  (number >= 0.5)",
        "sample.named=[]  (list of a | b)",
        "sample.options={a:true}  (names with values)",
        "sample.plain=null  (integer or null)",
    ]
    assert Sample().options is not Sample().options  # each has its own


def test_bounds_are_held_when_a_configuration_is_changed_in_python():
    with pytest.raises(UserError, match=r"optim\.schedule='step' is not one of constant, linear, cosine"):
        dataclasses.replace(config.OptimConfig(), schedule="step")


def test_a_mistake_is_a_value_error():
    """Who uses the engine from Python catches that."""
    with pytest.raises(ValueError, match=r"optim\.lr"):
        config.OptimConfig(lr=-1.0)


def test_a_configuration_with_names_and_values_has_a_hash():
    thinking, plain = (DataConfig(template_kwargs={"enable_thinking": value}) for value in (True, False))
    assert thinking != plain and len({thinking, plain, DataConfig(template_kwargs={"enable_thinking": True})}) == 2
