"""Chat templates that do not end, or fill the memory, end in one line; those that merely fail are left to the rows."""

import shutil

import pytest
from support.runs.runs import TINY

from isoloss.engine.data import chat_template
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.chat_template import try_templates
from isoloss.parallel import UserError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
ENDLESS += "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "says"),
    (
        (ENDLESS, "more than 1 seconds"),
        ("{% if tools %}" + ENDLESS + "{% endif %}", "more than 1 seconds"),
        ("{{ 'ab' * 10**9 }}", "more than 1 GiB of memory"),
        ("{{ '%3000000000d' % 1 }}", "more than 1 GiB of memory"),
        ("{% generation %}{{ [0] * 10**9 }}{% endgeneration %}", "more than 1 GiB of memory"),
        ("{% for a in range(999) %}{{ 'a' * 100000 }}{% endfor %}", "makes more than 64 MiB of text"),
    ),
    ids=("time", "time with tools", "product", "format", "list", "text"),
)
def test_a_template_without_measure(text, says, monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    with pytest.raises(UserError, match=rf"^tokenizer: folder: its chat template takes .*{says}"):
        try_templates(["{{ messages }}", text], "folder")


def test_a_tokenizer_with_such_a_template_is_refused_before_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text("{{ 'a' * 10**11 }}")
    with pytest.raises(UserError, match=r"model: its chat template takes more than 1 GiB of memory"):
        load_tokenizer(str(tmp_path / "model"), 1 << 20)


def test_what_merely_fails_is_left_to_the_rows():
    fails = ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ a.b.c }}", "{{ ''.__class__.mro() }}", "")
    try_templates(fails, "folder")


def test_a_template_is_tried_once(monkeypatch):
    text = "{# tried once #}"
    try_templates([text], "folder")
    monkeypatch.setattr(chat_template, "Helper", None)
    try_templates([text], "folder")
