"""Chat templates that ask for the date get one for the whole run, on whichever day a part of it takes place."""

import datetime
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.runs.runs import TINY, write_rows
from transformers.utils import chat_template_utils

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.chat_template import DIRECTIVES, Template, asks_for_the_date, render
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.rl.prompts import load_prompts
from isoloss.engine.run import folder as run_folder
from isoloss.parallel import UserError
from isoloss.recipes import launch

ASKS = "{{ strftime_now('%d %b %Y') }} "  # as Llama 3.2's
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def today(monkeypatch):
    """today(day) sets the clock of chat templates and of runs."""

    def of(day: str) -> None:
        moment = datetime.datetime.fromisoformat(day)
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: moment), raising=False)
        monkeypatch.setattr(run_folder, "date", SimpleNamespace(today=moment.date))

    return of


def dated(source: Path, folder: Path, asks: str = ASKS) -> Path:
    """A copy of a model's folder whose template asks for the date."""
    shutil.copytree(source, folder)
    template = folder / "chat_template.jinja"
    template.write_text(asks + template.read_text())
    return folder


def test_a_run_goes_on_the_next_day(inputs, arguments, tmp_path, today):
    """And one that was not saved by its first day, or that has another cache of rows, is the same run."""
    model = dated(inputs / "model", tmp_path / "model")
    words = [*arguments, f"model.path={model}", "checkpoint.every=1"]
    run = lambda *more: launch.main("sft", [*words, *more])
    today("2026-11-27")
    assert run("train.steps=1") == 0
    today("2026-11-28")
    assert run("train.steps=2", "checkpoint.resume=true", f"data.cache_dir={tmp_path}/cache") == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["data"]["date"] == "2026-11-27"
    assert run("train.steps=2", "output_dir=other") == 0
    assert yaml.safe_load(Path("other/config.yaml").read_text())["data"]["date"] == "2026-11-28"
    assert run("train.steps=3", "checkpoint.resume=true", "data.date=2026-11-28") == 2


@pytest.mark.parametrize(
    ("asks", "told"),
    (
        (ASKS, "01 Feb 2026 "),
        ("{%- macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }} ", "2026-02-01 "),  # as gpt-oss's
        ("{% if strftime_now is defined %}{{ strftime_now('%A') }}{% endif %}", "Sunday"),
    ),
    ids=("plain", "macro", "if it is there"),
)
def test_rows_and_prompts_tell_the_same_date(asks, told, tmp_path, today):
    today("2030-05-05")
    model = dated(TINY, tmp_path / "model", asks)
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": CHAT[:1], "answer": "x"}])
    tokenizer = load_tokenizer(str(model), 1 << 20)
    data = DataConfig(train=(str(rows),), date="2026-02-01")
    dataset = load_dataset(data, "train", str(model), vocab_size=1 << 20, cache_dir=tmp_path / "cache")
    assert tokenizer.decode(dataset[0].tokens_T.tolist()).startswith(told)
    prompts = load_prompts(
        DataConfig(train=(str(tmp_path / "prompts.jsonl"),), date="2026-02-01"),
        "train",
        tokenizer,
        max_prompt_tokens=999,
        limit="x",
    )
    assert tokenizer.decode(prompts.prompts[0].tokens).startswith(told)
    other = load_dataset(
        DataConfig(train=(str(rows),), date="2026-02-02"),
        "train",
        str(model),
        vocab_size=1 << 20,
        cache_dir=tmp_path / "cache",
    )
    assert other.fingerprint != dataset.fingerprint


def test_a_template_without_a_date_is_given_none(inputs, arguments, tmp_path):
    assert not asks_for_the_date(inputs / "model")
    assert launch.main("sft", [*arguments, "train.steps=1", "checkpoint.export_hf=false"]) == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["data"]["date"] is None
    template = Template(load_tokenizer(str(TINY), 1 << 20), "a row", None, DataConfig().template_variables)
    dated_one = Template(template.tokenizer, "a row", None, DataConfig(date="2026-02-01").template_variables)
    assert render(CHAT, template) == render(CHAT, dated_one)


@pytest.mark.parametrize(
    "template", ("\n  {% if true %}x{% endif %}\n", "  {%- if true %} y{% endif %}", "z\n", "{# a #}\n\n w")
)
def test_the_rest_of_a_template_is_rendered_as_ever(template, tmp_path, today):
    """Its white space, too: against the clock that transformers gives, at every directive."""
    today("2026-02-01")
    tokenizer = load_tokenizer(str(TINY), 1 << 20)
    every = "|".join(f"%{one}" for one in DIRECTIVES)
    tokenizer.chat_template = template + f"{{{{ strftime_now('{every}') }}}}"
    ours = Template(tokenizer, "a row", None, DataConfig(date="2026-02-01").template_variables)
    assert ours(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("file", ("tokenizer_config.json", "chat_template.json", "additional_chat_templates/t.jinja"))
def test_a_template_may_stand_in_several_files(file, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"chat_template": "{{ strftime_now(1) }}"}')
    assert asks_for_the_date(tmp_path / "model")


@pytest.mark.parametrize("day", ("today", "2026-02-30", "20260201", "2026-02-01T10:00"))
def test_a_date_is_a_day(day):
    with pytest.raises(UserError, match=rf"data.date='{day}' must be a day such as"):
        DataConfig(date=day)


def test_the_clock_itself_is_not_for_the_user(tmp_path):
    model = dated(TINY, tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    data = DataConfig(train=(str(rows),), template_kwargs={"strftime_now": "x"})
    with pytest.raises(UserError, match=r"data.template_kwargs.strftime_now is the clock .*: set data.date instead"):
        load_dataset(data, "train", str(model), vocab_size=1 << 20, cache_dir=tmp_path / "cache")
