"""Describe the keys of a configuration from its dataclasses, for `--help` and docs/configuration.md."""

import dataclasses
import difflib
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from isoloss.parallel import UserError
from isoloss.parallel.runtime.config_key import choices_of, is_nullable, meaning_of

READING = (
    "Each key is shown as key=default, then what it takes. Presets change some defaults: --cfg shows what a run would "
    "get. A list is written as [a,b], and null stands for no value."
)


@dataclasses.dataclass(frozen=True)
class KeyHelp:
    """The description of a key: its dotted name, the values that it takes in words, and its meaning.

    default: default as a command line has it; None if the key is required.
    """

    name: str
    takes: str
    default: str | None
    text: str

    @property
    def head(self) -> str:
        """Return "optim.lr=1e-05", or for a required key "model.path"."""
        return self.name if self.default is None else f"{self.name}={self.default}"

    @property
    def note(self) -> str:
        return self.takes if self.default is not None else f"{self.takes}; required"


@dataclasses.dataclass(frozen=True)
class KeyGroup:
    """The description of a group: its name, "" for keys without one, and the first paragraph of its class's
    docstring."""

    name: str
    text: str
    keys: tuple[KeyHelp, ...]


def groups(cls: Any) -> Iterator[KeyGroup]:
    """Yield the groups of a configuration class in order, then the keys without a group."""
    ungrouped = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            text = " ".join((field.type.__doc__ or "").split("\n\n")[0].split())
            keys = tuple(_key(f"{field.name}.", key) for key in dataclasses.fields(field.type))
            yield KeyGroup(field.name, text, keys)
        else:
            ungrouped.append(_key("", field))
    yield KeyGroup("", "Keys without a group.", tuple(ungrouped))


def terminal_help(cls: Any, topic: str, columns: int) -> str:
    """Return all groups, or with a `topic` one group or one key, in lines of at most `columns`.

    Raises UserError for a topic that does not exist.
    """
    shown = list(groups(cls))
    if topic:
        keys = ((group, [key for key in group.keys if topic in (group.name, key.name)]) for group in shown)
        shown = [dataclasses.replace(group, keys=chosen) for group, chosen in keys if chosen]
    if not shown:
        names = [group.name for group in groups(cls) if group.name]
        near = difflib.get_close_matches(topic, [*names, *(k.name for g in groups(cls) for k in g.keys)], 1, 0.5)
        guess = f"did you mean {near[0]!r}?" if near else f"groups: {', '.join(names)}"
        raise UserError(f"--help {topic}: there is no such group or key; {guess}")
    width = max(40, min(columns, 120))
    lines = textwrap.wrap(READING, width)
    for group in shown:
        lines += ["", *textwrap.wrap(f"{group.name}: {group.text}" if group.name else group.text, width)]
        for key in group.keys:
            lines += _wrapped(f"{key.head}  ({key.note})", width, "  ", " " * 6)
            lines += _wrapped(key.text, width, " " * 6, " " * 6)
    return "\n".join(lines) + "\n"


def markdown_lists(cls: Any) -> dict[str, str]:
    """Return the text and the list of keys of every group as Markdown, by the name of the group."""
    lists = {}
    for group in groups(cls):
        lines = [*textwrap.wrap(group.text, 120), ""]
        for key in group.keys:
            lines.append(f"- `{key.head}` ({key.note})<br>")
            lines += _wrapped(key.text, 120, "  ", "  ")
        lists[group.name] = "\n".join(lines)
    return lists


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _key(prefix: str, field: "dataclasses.Field[Any]") -> KeyHelp:
    meaning = meaning_of(field)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    written = None if meaning.required and not default else as_written(default)
    return KeyHelp(f"{prefix}{field.name}", _takes(field), written, meaning.text)


def as_written(value: Any) -> str:
    """Return a value as a command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{as_written(item)}' for name, item in value.items())}}}"
    return f"[{','.join(map(as_written, value))}]" if isinstance(value, tuple) else str(value)


def _takes(field: "dataclasses.Field[Any]") -> str:
    """Return what a key takes: "integer >= 1 or null", "grpo | gae", "list of 2 numbers >= 0 and < 1"."""
    names = [*choices_of(field), *(["file.py:function"] if meaning_of(field).or_function else [])]
    kind, choices = field.type, " | ".join(names)
    if is_nullable(field):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        plural = {int: "integers", float: "numbers"}.get(items[0], "texts")
        words = f"list of {choices or (plural if items[-1] is Ellipsis else f'{len(items)} {plural}')}"
    elif typing.get_origin(kind) is Mapping:
        words = "names with values"
    else:
        words = choices or {int: "integer", float: "number", bool: "true | false"}.get(kind, "text")
    bounds = " and ".join(f"{sign} {bound}" for sign, bound in meaning_of(field).bounds())
    ending = "" if not is_nullable(field) else " | null" if "|" in words else " or null"
    return " ".join(part for part in (words, bounds) if part) + ending
