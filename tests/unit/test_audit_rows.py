"""The rows that isoloss-audit shows: marks as transformers' mask of the assistant says, and a page that is safe."""

import base64
import hashlib
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.runs.runs import write_model, write_rows

from isoloss.engine.data.chat import load_tokenizer
from isoloss.tools.audit.__main__ import main
from isoloss.tools.audit.pieces import COLOURS, Piece, as_text

SAYS = "{{ m.content }}<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}MARK" + SAYS + "END{% else %}"
    + SAYS + "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, [[friend]]"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Count"},
    {"role": "assistant", "content": "one two three four five six seven"},
]
EVIL = '<script>alert(1)</script> "><img src=x onerror=alert(2)> </pre></li> &amp; \x1b[2J\u202e'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its template has no marks: isoloss finds the turns itself."""
    folder = write_model(tmp_path_factory.mktemp("models") / "small", 2)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", "").replace("END", ""))
    return folder


def audited(tmp_path: Path, model: Path, rows: list[dict[str, Any]], *words: str) -> int:
    path = write_rows(tmp_path / "train.jsonl", rows)
    data = [f"data.train={path}", f"data.cache_dir={tmp_path / 'cache'}", "data.overlong=truncate"]
    return main(["sft", f"model.path={model}", *data, *words])


def expected(model: Path, muted_turn: int | None, most: int) -> str:
    """Brackets by the assistant mask of transformers, which reads the marks of the template."""
    tokenizer = load_tokenizer(str(model), 2048)
    marked = TEMPLATE.replace("MARK", "{% generation %}").replace("END", "{% endgeneration %}")
    out = tokenizer.apply_chat_template(
        TALK, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    kinds, turn, before = [], -1, 0
    for i, target in enumerate(out["assistant_masks"]):
        turn += target and not before
        before = target
        kind = ("[[", "]]") if target else ("", "")
        kinds.append(("##", "##") if i >= most else ("{{", "}}") if target and turn == muted_turn else kind)
    text = ""
    for kind, run in itertools.groupby(range(len(kinds)), key=kinds.__getitem__):
        text += tokenizer.decode([out["input_ids"][i] for i in run]).join(kind)
    return text


@pytest.mark.parametrize(("muted_turn", "most"), [(None, 100), (0, 100), (None, 48)])
def test_marks_are_those_of_the_assistant_mask_of_transformers(tmp_path, model, muted_turn, most, capsys):
    messages = [dict(message) for message in TALK]
    if muted_turn is not None:
        messages[2]["weight"] = 0
    words = (f"data.max_length={most}", "--row", "train.jsonl:1")
    assert audited(tmp_path, model, [{"messages": messages}], *words) == 0
    shown = capsys.readouterr().out.split(" trained", 2)[-1].partition("\n")[2].rstrip("\n")
    wanted = expected(model, muted_turn, most).rstrip("\n")
    assert re.sub("^  ", "", shown, flags=re.M).rstrip() == wanted and ("##" in wanted) == (most == 48)
    assert ("{{" in wanted) == (muted_turn is not None)


def test_colours_mark_what_brackets_mark():
    found = [Piece("<s>", special=True), Piece("ask"), Piece("say", trained=True), Piece("old", muted=True),
             Piece("</s>", trained=True, special=True), Piece("end", trained=True, cut=True)]  # fmt: skip
    assert as_text(found, colour=False) == "<s>ask[[say]]{{old}}[[</s>]]##end##"
    codes = re.findall("\x1b\\[([\\d;]+)m(.*?)\x1b\\[0m", as_text(found, colour=True))
    names = ["context", "context", "trained", "muted", "trained", "cut"]
    assert [code.split(";1")[0] for code, _ in codes] == [COLOURS[name] for name in names]
    assert [code.endswith(";1") for code, _ in codes] == [piece.special for piece in found]
    assert [text for _, text in codes] == [piece.text for piece in found]
    long = [Piece("a" * 5000, trained=True)]
    assert len(as_text(long, colour=False)) < 500 and as_text(long, colour=False, long=None) == f"[[{'a' * 5000}]]"


class Elements(HTMLParser):
    """Collects elements with their attributes, and the text of each <pre>."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.pres: list[str] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "pre":
            self._open = True
            self.pres.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open &= tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.pres[-1] += data


def test_a_row_runs_nothing_on_the_page(tmp_path, model):
    rows = [
        {"messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": f"{EVIL} Yes"}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], EVIL: 1},
        {"messages": EVIL},
    ]
    page = tmp_path / "audit.html"
    assert audited(tmp_path, model, rows, "--html", str(page), "data.max_length=200") == 0
    text = page.read_text(encoding="utf-8")
    elements = Elements(text)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 1 and not {"img", "iframe", "link", "object"} & {*tags}
    assert tags.count("li") == tags.count("pre") == 2
    for _, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "style")]
    escaped = EVIL.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert elements.pres[0].count(escaped) == 2 and "\x1b" not in text and "\u202e" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [attributes["content"] for tag, attributes in elements.found if "http-equiv" in attributes]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "http://" not in text and "https://" not in text


def test_marks_on_the_page_are_those_of_the_terminal(tmp_path, model):
    page = tmp_path / "audit.html"
    audited(tmp_path, model, [{"messages": TALK}], "--html", str(page), "data.max_length=48")
    spans = re.findall(r'<span class="(\w+)(?: special)?">(.*?)</span>', page.read_text().partition("<pre>")[2], re.S)
    marks = {"context": ("", ""), "trained": ("[[", "]]"), "cut": ("##", "##")}
    runs = itertools.groupby(spans, key=lambda span: span[0])
    text = "".join("".join(part for _, part in run).join(marks[kind]) for kind, run in runs)
    assert text.replace("&lt;", "<").replace("&gt;", ">") == expected(model, None, 48)


def test_the_rows_that_are_shown_are_the_worst(tmp_path, model, capsys):
    chat = lambda asked, said: {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    }
    rows = [chat(f"What is {n}?", f"It is {n}.") for n in range(20)]
    rows += [chat("Say " + "much " * 8, "No"), chat("Go", "on " * 50), rows[4], {"text": "All of it."}]
    assert audited(tmp_path, model, rows, "data.max_length=50", "--rows", "4") == 0
    shown = re.findall(r"train\.jsonl:(\d+): [\d,]+ tokens, [\d,]+ trained: (.*)", capsys.readouterr().out)
    assert [(int(number), why.split(" /")[0]) for number, why in shown] == [
        (22, "longest; cut"), (21, "fewest targets"), (23, "repeats"), (24, "all targets"),
    ]  # fmt: skip
    assert audited(tmp_path, model, rows, "data.max_length=50", "--rows", "0") == 0
    assert "rows: context" not in capsys.readouterr().out


def test_a_bad_row_is_shown_by_its_reason(tmp_path, model, capsys):
    rows = [{"messages": TALK}, {"question": "a"}]
    assert audited(tmp_path, model, rows, "data.max_length=99", "--row", "train.jsonl:2") == 0
    assert "train.jsonl:2: rejected: unknown kind of row (keys: question)" in capsys.readouterr().out
