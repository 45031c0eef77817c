"""The first rows as the model gets them, with what is trained marked."""

import io
import re
from importlib.resources import files

import pytest
from support.runs.runs import write_rows

from isoloss.engine.config.schema import Config, DataConfig, ModelConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.show_rows import MOST, coloured, printable, rows_to_show, shown_prompt, shown_row
from isoloss.engine.sft.loop import load_data, shown_rows
from isoloss.models.families.registry import read_architecture

TINY = str(files("isoloss.recipes") / "assets" / "tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY, 2048)


def test_targets_are_marked_and_special_tokens_are_seen(tokenizer):
    parts = [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("Hello, you.<|im_end|>", True)]
    parts += [("\n<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n", False), ("Yes<|im_end|>", True)]
    tokens, mask = [], []
    for text, target in parts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, mask = [*tokens, *ids], [*mask, *[target] * len(ids)]
    head, text = shown_row("train.jsonl:7", tokens, mask, tokenizer, colour=False)
    assert head == f"row train.jsonl:7: {len(tokens)} tokens, {sum(mask)} targets in [[ ]]"
    assert text.replace("\n  ", "\n") == "  " + "".join(f"[[{t}]]" if target else t for t, target in parts)
    head, bright = shown_row("train.jsonl:7", tokens, mask, tokenizer, colour=True)
    assert head.endswith("targets in green")
    assert re.sub("\x1b\\[32m(.*?)\x1b\\[0m", r"[[\1]]", bright, flags=re.DOTALL) == text


@pytest.mark.parametrize(
    ("mask", "flag"),
    [([False] * 4, ": no target"), ([False, True, True, True], ": all targets"), ([False, False, True, True], "")],
)
def test_rows_without_a_target_and_rows_of_nothing_else_are_flagged(tokenizer, mask, flag):
    tokens = tokenizer("One two three four", add_special_tokens=False)["input_ids"][:4]
    assert (
        shown_row("a:1", tokens, mask, tokenizer, False)[0] == f"row a:1: 4 tokens, {sum(mask)} targets in [[ ]]{flag}"
    )


def test_a_prompt_as_it_is_rendered(tokenizer):
    tokens = tokenizer("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False)["input_ids"]
    said = [f"prompt a:1: {len(tokens)} tokens", "  <|im_start|>user\n  Hi<|im_end|>"]
    assert shown_prompt("a:1", tokens, tokenizer) == said


def test_a_row_does_not_command_the_terminal(monkeypatch):
    """Control characters are escape sequences' first; marks of direction turn a line around."""
    assert printable("a\x1b[2Jb\x07\r\u202ec\nd\té\U0001f600") == "a\\x1b[2Jb\\x07\\r\\u202ec\nd\\té\U0001f600"
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("é\U0001f600") == "\\xe9\\U0001f600"


def test_a_long_text_is_cut_in_its_middle():
    assert printable("a" * MOST) == "a" * MOST
    assert printable("a" * 400 + "b" * 5000 + "c" * 400) == "a" * 400 + " ... 5,000 characters ... " + "c" * 400


@pytest.mark.parametrize(
    ("chosen", "terminal", "no_color", "count", "colour"),
    [
        (None, True, None, 2, True),
        (None, True, "1", 2, False),
        (None, False, None, 0, False),
        (5, False, None, 5, False),
        (0, True, "", 0, True),
    ],
)
def test_how_many_and_how(monkeypatch, chosen, terminal, no_color, count, colour):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert rows_to_show(DataConfig(show_rows=chosen)) == count and coloured() == colour


def test_the_rows_of_a_run_are_those_that_it_trains_on(tmp_path):
    rows = [{"prompt": "One, two,", "completion": " three."}, {"text": "Four five."}, {"text": "Six."}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    config = Config(
        ModelConfig(TINY), data=DataConfig((path,), show_rows=2, max_length=64, cache_dir=str(tmp_path / "cache"))
    )
    lines = shown_rows(config, load_data(config, read_architecture(TINY)), 2048)
    assert [line.split(": ")[0] for line in lines[::2]] == [f"row {path}:1", f"row {path}:2"]
    assert lines[1].startswith("  One, two,[[ three.<|") and lines[2].endswith(": all targets")
