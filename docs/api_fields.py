"""An extension of griffe, which reads docstrings for the page of the API: fields become lists.

Docstrings of isoloss describe a field or an argument as `name: noun phrase`, a line each, where Markdown would join the
lines to a paragraph. Fields of configurations are keys, which docs/configuration.md explains.
"""

import ast
import re
from typing import Any

import griffe

FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


class Fields(griffe.Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
        if isinstance(obj, griffe.Class) and obj.name.endswith("Config"):
            obj.members.clear()
            obj.bases = []
            obj.labels.discard("dataclass")
        for parameter in obj.parameters if isinstance(obj, griffe.Function) else ():
            parameter.default = default_of(parameter.default)


def default_of(value: Any) -> Any:
    """Return the default of a parameter; where it is key(1, "its help", ...), the number alone."""
    if not str(value).startswith("key("):
        return value
    call = ast.parse(str(value), mode="eval").body
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else None


def with_lists(docstring: str) -> str:
    """Return the docstring with its fields as a Markdown list; an indented line goes on with the field before it."""
    lines: list[str] = []
    listed = False
    for line in docstring.replace("][", "]\\[").split("\n"):  # a[b][c] is no link
        field = FIELD.match(line)
        if field:
            lines += [] if listed else [""]
            names = ", ".join(f"`{name}`" for name in field[1].split(", "))
            line = f"- {names}: {line[field.end() :]}"
        elif listed and not line.startswith(" "):
            lines.append("")
        listed = field is not None or (listed and line.startswith(" "))
        lines.append(line)
    return "\n".join(lines)
