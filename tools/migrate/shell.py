"""Read as much of a shell script as launch scripts need: variables, arrays, arithmetic, and the words of commands.

Nothing is executed. The body of an if, a case or a loop is not read, because it depends on the machine: a variable that
it sets has no value, and a key that needs one is refused.
"""

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_]\w*)(\+?=)(.*)", re.S)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?-)(.*))?\}|(\w+))", re.S)
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
OPENING, CLOSING = ("if", "case", "for", "while", "until", "{"), ("fi", "esac", "done", "}")
ENDS = ";&|\n"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip


@dataclass
class Script:
    """The state of a script that is being read.

    folder: the folder of the script. fixed: variables that the user gives, which win. variables, arrays: values by
    name. commands: words of each command. unread: sourced files that were not found. depth: number of open blocks.
    """

    folder: Path
    fixed: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    depth: int = 0

    def run(self, text: str) -> None:
        command: list[str] = []
        tokens = list(words(text))
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token == "(" and command and command[-1].endswith("="):
                end = tokens.index(")", at) if ")" in tokens[at:] else len(tokens)
                self._array(command.pop(), [word for word in tokens[at + 1 : end] if word not in ENDS])
                at = end
            elif token in ENDS:
                self._command(command)
                command = []
            elif token not in ("(", ")"):
                command.append(token)
            at += 1
        self._command(command)

    def _array(self, name: str, items: list[str]) -> None:
        if self.depth == 0:
            expanded = [word for item in items for word in self.expand(item)]
            before = self.arrays.get(name[:-2], []) if name.endswith("+=") else []
            self.arrays[name.rstrip("+=")] = before + expanded

    def _command(self, command: list[str]) -> None:
        while command and command[0] in ("then", "else", "do", "export", "local", "readonly"):
            command = command[1:]
        if not command:
            return
        first = command[0]
        self.depth = max(self.depth + (first in OPENING) - (first in CLOSING), 0)
        if self.depth or first in CLOSING:
            return
        if first in ("source", "."):
            self._source(command[1] if len(command) > 1 else "")
        elif all(ASSIGNMENT.fullmatch(word) for word in command):
            for word in command:
                name, how, value = ASSIGNMENT.fullmatch(word).groups()  # pyright: ignore[reportOptionalMemberAccess]
                before = self.variables.get(name, "") if how == "+=" else ""
                self.variables[name] = before + " ".join(self.expand(value))
        else:
            self.commands.append([word for raw in command for word in self.expand(raw)])

    def _source(self, word: str) -> None:
        """Read a sourced file in the script's folder, also if the script computes the folder in front of its name."""
        (name,) = self.expand(word) or [""]
        path = self.folder / (name.rsplit("}/", 1)[-1].rsplit(")/", 1)[-1] if "$" in name else name)
        if path.is_file():
            self.run(path.read_text())
        else:
            self.unread.append(word)

    def expand(self, word: str) -> list[str]:
        """Return the words that a word expands to. A variable without a value stays as it is written, with its $."""
        if found := ARRAY.fullmatch(word):
            return self.arrays.get(found[1], [])
        if word.strip('"').startswith(("$@", "${@", "$*")):
            return []
        if VARIABLE.fullmatch(word):  # without quotes, its value becomes as many words as it has
            return [self._text(part) for part in words(self._part(word)) if part not in ENDS + "()"]
        return [self._text(word)]

    def _text(self, word: str) -> str:
        parts, at = [], 0
        while at < len(word):
            end = _part_end(word, at)
            parts.append(self._part(word[at:end]))
            at = end
        return "".join(parts)

    def _part(self, part: str) -> str:
        if part[0] == "'":
            return part[1:-1]
        if part[0] == '"':
            return self._quoted(part[1:-1])
        if part[0] == "\\":
            return part[1:]
        if part.startswith("$(("):
            return self._number(part)
        if found := VARIABLE.fullmatch(part):
            name = found[1] or found[4]
            value = self.fixed.get(name, self.variables.get(name))
            if found[2] and not (value or (value is not None and found[2] == "-")):
                return self._text(found[3])
            return part if value is None else value
        return part

    def _quoted(self, text: str) -> str:
        """Expand a text between double quotes, where a single quote is a character."""
        at, parts = 0, []
        while at < len(text):
            end = _part_end(text, at) if text[at] in "$\\" else at + 1
            parts.append(self._part(text[at:end]) if end > at + 1 else text[at:end])
            at = end
        return "".join(parts)

    def _number(self, part: str) -> str:
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._part(f"${name[1]}"), part[3:-2])
        try:
            return str(_calculate(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, KeyError, AttributeError, ZeroDivisionError):
            return part


def _calculate(node: ast.AST) -> int:
    """Compute a node of whole numbers. Raise KeyError or AttributeError for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    return OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))  # pyright: ignore


def words(text: str) -> Iterator[str]:
    """Yield the words of a script with their quotes, parentheses, and the ENDS of commands."""
    text, at = text.replace("\\\n", " "), 0
    while at < len(text):
        c = text[at]
        if c == "#":
            at = _find(text, "\n", at)
        elif c in ENDS or c in "()":
            yield c
            at += 1
        elif c in "<>" or c.isspace():
            at += 1
        else:
            end = _word_end(text, at)
            yield text[at:end]
            at = end


def _word_end(text: str, at: int) -> int:
    while at < len(text) and not text[at].isspace() and text[at] not in ENDS + "()<>":
        c = text[at]
        if c == "'":
            at = _find(text, "'", at + 1) + 1
        elif c == '"':
            at = _part_end(text, at)
        elif text[at : at + 2] in ("$(", "${"):
            at = _balanced(text, at + 1)
        else:
            at += 2 if c == "\\" else 1
    return min(at, len(text))


def _part_end(word: str, at: int) -> int:
    """Return the end of a quoted text, of an expansion, or of the plain text before the next of these."""
    c = word[at]
    if c == "'":
        return _find(word, "'", at + 1) + 1
    if c == '"':
        at += 1
        while at < len(word) and word[at] != '"':
            at = _part_end(word, at) if word[at] == "$" else at + (2 if word[at] == "\\" else 1)
        return at + 1
    if c == "\\":
        return at + 2
    if c != "$":
        return next((i for i in range(at + 1, len(word)) if word[i] in "'\"\\$"), len(word))
    if word[at + 1 : at + 2] in ("(", "{"):
        return _balanced(word, at + 1)
    name = re.compile(r"\$\w*").match(word, at)
    return name.end() if name else at + 1


def _balanced(text: str, at: int) -> int:
    """Return the end of the parenthesis or brace that opens at `at`."""
    opened, closed = text[at], {"(": ")", "{": "}"}[text[at]]
    depth = 0
    while at < len(text):
        depth += (text[at] == opened) - (text[at] == closed)
        at += 1
        if depth == 0:
            break
    return at


def _find(text: str, mark: str, at: int) -> int:
    index = text.find(mark, at)
    return len(text) if index < 0 else index
