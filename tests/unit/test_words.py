"""Docstrings, comments and pages are in plain technical English, as far as a machine can see: no banned word, a first
sentence that does not begin with a relative word, and fields that are "name: noun phrase"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("engine", "models", "parallel", "recipes", "tools")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
# Words that hide who does what. "report", "log", "warn", "raise", "next to" and "as many" say it.
BANNED = re.compile(
    r"\b(told|tells?|telling|besides?|whoever|of (ours|theirs|mine|hers)|so many|whence|thereof)\b", re.IGNORECASE
)
# A docstring that begins so has no verb: "Return what ...", "True if ...", "Number of ..." have one, or are a noun.
RELATIVE = re.compile(r"(What|Whether|Of|As|Those|That|These|One|Its|It|Where|Who|How|Whom)\b")
# "name: of the model", "name: what is computed": no noun phrase.
FIELD = re.compile(r"[a-z_][\w, ]*: (of|those|that|what|as|by) ")
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, NODES) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, rule and text of each fault in a module."""
    for line, text in docstrings(source):
        if RELATIVE.match(text):
            yield line, "first sentence without a verb", text.splitlines()[0]
        for part in text.splitlines():
            if BANNED.search(part):
                yield line, "banned word", part
            if FIELD.match(part.strip()):
                yield line, "field is no noun phrase", part
    for line, text in comments(source):
        if BANNED.search(text):
            yield line, "banned word", text


@pytest.mark.parametrize("folder", PRODUCT)
def test_docstrings_and_comments_are_plain(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {rule}: {text.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, rule, text in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_pages_are_plain():
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in pages
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED.search(line)
    ]
    assert len(pages) > 20
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""The ranks are told."""', "banned word"),
        ('"""Whether it holds."""', "first sentence without a verb"),
        ('def f(x):\n    """Return a sum.\n\n    x: of the ranks.\n    """', "field is no noun phrase"),
        ("x = 1  # beside the other", "banned word"),
        ('class A:\n    """What a rank holds."""', "first sentence without a verb"),
    ],
)
def test_each_fault_is_found(source, rule):
    assert [each[1] for each in faults(source)] == [rule]


def test_plain_words_pass():
    source = '"""Return the sum over ranks.\n\nx: sum of a rank, [T].\n"""\nx = 1  # foretold, tellurium, of its own'
    assert not [*faults(source)]
