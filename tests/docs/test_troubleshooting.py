"""The lines that the page of symptoms shows are lines of the product."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SAYS = ("engine", "recipes", "tools/prove")  # the folders whose lines are shown
LEAST = 18  # characters that a shown line has in common with one piece of a string of the product


def pieces() -> dict[str, list[str]]:
    """Return the constant parts of all strings of the product, between what is filled in, by their first characters."""
    found: dict[str, list[str]] = {}
    for file in (file for folder in SAYS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= LEAST:
                found.setdefault(node.value[:LEAST], []).append(node.value)
    return found


def of_product(line: str, known: dict[str, list[str]]) -> bool:
    """Return whether a line has a piece of the product's, whole or up to where the page cuts the line."""
    ends = (line[start:] for start in range(len(line) - LEAST + 1))
    return any(end.startswith(piece) or piece.startswith(end) for end in ends for piece in known.get(end[:LEAST], ()))


def test_lines_are_of_the_product():
    known = pieces()
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    shown = re.sub(r"\n +", " ", "".join(blocks)).splitlines()
    assert len(shown) > 20
    assert [line for line in shown if not of_product(line, known)] == []


def test_a_line_that_nobody_prints_is_noticed():
    known = pieces()
    assert not of_product("isoloss: error: the tokens of the batch have gone to another country", known)
    assert of_product("isoloss: interrupted twice: the steps since the newest checkpoint are lost", known)
