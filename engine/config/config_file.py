"""Read a configuration file of a user's, key by key, and name the line of every mistake; write one that reads the same.

A file is YAML: groups with their keys, or dotted keys. What a plain scalar means follows from the type of its key, so
`lr: 1e-4` is a number and `output_dir: no` a text. Imports no torch.
"""

import hashlib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from isoloss.engine.config.parse import convert, key_types, unknown_key
from isoloss.parallel.runtime.errors import UserError

NULL = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
FLOAT = re.compile(r"[-+]?(\d[\d_]*)?\.?\d*(e[-+]?\d+)?$", re.IGNORECASE)
TAG = "tag:yaml.org,2002:"
TAGS = tuple(f"{TAG}{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "map", "seq"))
TEXT = TAGS[4]
_composed: list["ConfigFile"] = []  # global, as the command line is that names the files
DEEPEST = 20  # levels of a file; an anchor that contains itself has no end


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file.

    sha256: digest of its bytes.
    preset: preset that it names; None if it names none.
    values: plain values by dotted key, in the order of the file.
    lines: line of each key.
    """

    path: Path
    sha256: str
    preset: str | None
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def nested(self) -> dict[str, Any]:
        """Return the values group by group."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *groups, name = key.split(".")
            group = tree
            for part in groups:
                group = group.setdefault(part, {})
            group[name] = value
        return tree


def read(path: Path, cls: Any, of_others: Mapping[str, str]) -> ConfigFile:
    """Read a file for a configuration class. Raises UserError with file, line and key for whatever is wrong.

    of_others: recipes that have a key that `cls` lacks, by the key.
    """
    try:
        data = path.read_bytes()
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except IsADirectoryError:
        raise UserError(f"config={path} is a folder: write config={path / 'config.yaml'}") from None
    except OSError as error:
        raise UserError(f"config={path}: {error.strerror}; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config={path} is not UTF-8 ({error.reason} at byte {error.start}); save it as such") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        why = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{place}: cannot be read as YAML: {why}") from None
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise UserError(f"config={path} must hold keys, a line each, such as `optim.lr: 1e-5`, or groups of keys")
    reader = _Reader(path, dict(key_types(cls)), of_others)
    for key, name, node in reader.entries(root, "", 0):
        reader.add(key, name, node, 1)
    return ConfigFile(path, hashlib.sha256(data).hexdigest(), reader.preset, reader.values, reader.lines)


def dump(values: Mapping[str, Any]) -> str:
    """Return values as the text of a file that reads as these values, whatever their texts are."""
    return yaml.dump(_escaped(values), Dumper=_Dumper, sort_keys=False)


def record(files: Iterable[ConfigFile]) -> None:
    """Keep the files that the configuration of this process was composed of, for `recorded`."""
    _composed[:] = files


def recorded() -> dict[str, str]:
    """Return the SHA-256 of each file of this process's newest configuration, by path in order; a later one wins."""
    return {str(each.path): each.sha256 for each in _composed}


class _Reader:
    """The keys of a file, as far as it was read. kinds: type of every key. of_others: recipes that have other keys."""

    def __init__(self, path: Path, kinds: Mapping[str, Any], of_others: Mapping[str, str]):
        self.path, self.kinds, self.of_others = path, kinds, of_others
        self.preset: str | None = None
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}

    def refuse(self, node: yaml.Node, text: str) -> typing.NoReturn:
        raise UserError(f"{self.path}:{node.start_mark.line + 1}: {text}")

    def entries(self, group: yaml.MappingNode, prefix: str, depth: int) -> Iterator[tuple[yaml.Node, str, yaml.Node]]:
        """Yield key node, name and value node of each entry of a mapping."""
        seen: dict[str, int] = {}
        for key, value in group.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<" or depth > DEEPEST:
                self.refuse(key, f"{prefix or 'the file'}: a key must be a name, without merged or recursive anchors")
            name = f"{prefix}{key.value}"
            if name in seen:
                self.refuse(key, f"{name} is given twice, first in line {seen[name]}; give it once")
            seen[name] = key.start_mark.line + 1
            yield key, name, value

    def add(self, key: yaml.Node, name: str, node: yaml.Node, depth: int) -> None:
        """Add a key, or the keys of a group."""
        line = key.start_mark.line + 1
        members = [known for known in self.kinds if known.startswith(f"{name}.")]
        if name == "preset":
            self.preset = self.scalar(node, str, name) if isinstance(node, yaml.ScalarNode) else None
            if not self.preset:
                self.refuse(node, "preset must be the name of a preset")
        elif members and isinstance(node, yaml.MappingNode):
            for inner, inner_name, value in self.entries(node, f"{name}.", depth):
                self.add(inner, inner_name, value, depth + 1)
        elif members:
            self.refuse(key, f"{name} is a group and must have keys below it, such as `{members[0]}`")
        elif name not in self.kinds:
            self.refuse(key, _no_key(name) or unknown_key(name, [*self.kinds, "preset"], self.of_others))
        elif name in self.lines:
            self.refuse(key, f"{name} is given twice, first in line {self.lines[name]}; give it once")
        else:
            value = self.value(node, self.kinds[name], name, depth)
            try:
                convert(self.kinds[name], value, name)
            except UserError as error:
                self.refuse(key, str(error))
            self.values[name], self.lines[name] = value, line

    def value(self, node: yaml.Node, kind: Any, name: str, depth: int) -> Any:
        """Return the plain value of a node. kind: wanted type; Any: the type that YAML 1.2 gives it."""
        if node.tag not in TAGS:
            self.refuse(node, f"{name}: the tag {node.tag.removeprefix(TAG)} is not read; write a plain value")
        arguments = [part for part in typing.get_args(kind) if part is not type(None)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, kind, name)
        if isinstance(node, yaml.SequenceNode):
            if depth > DEEPEST:
                self.refuse(node, f"{name}: an anchor must not contain itself")
            item = arguments[0] if typing.get_origin(kind) is tuple else Any
            return [self.value(each, item, name, depth + 1) for each in node.value]
        assert isinstance(node, yaml.MappingNode)
        item = arguments[1] if typing.get_origin(kind) is Mapping else Any
        entries = self.entries(node, f"{name}.", depth)
        return {key.value: self.value(value, item, inner, depth + 1) for key, inner, value in entries}  # type: ignore[attr-defined]

    def scalar(self, node: yaml.ScalarNode, kind: Any, name: str) -> Any:
        text = node.value
        if node.style is not None:  # in quotes, or a block
            return text
        if text in NULL:
            return None
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            if text == "None":
                self.refuse(node, f"{name}: None is a text in YAML; write null")
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        if typing.get_origin(kind) is tuple:
            kind = typing.get_args(kind)[0]
        if kind is str or typing.get_origin(kind) is Literal:
            return text
        if kind is bool:
            return BOOLEANS.get(text.lower(), text)
        if INTEGER.match(text) and kind is not float:
            return int(text)
        if FLOAT.match(text) and any(map(str.isdigit, text)) and kind is not int and not re.match(r"[-+]?0\d", text):
            return float(text)
        if text.lower() in ("true", "false"):
            return BOOLEANS[text.lower()]
        if kind is Any and node.tag != TEXT:
            meaning = node.tag.rpartition(":")[2]
            self.refuse(node, f"{name}: {text} is {meaning} to some readers of YAML; put quotes around a text")
        return text


def _no_key(name: str) -> str:
    """Return the message for a name that has a meaning elsewhere; empty for others."""
    if name == "defaults":
        return "defaults is of Hydra's own files: write `preset: NAME`, and give other files as config=FILE too"
    if name == "config":
        return "a file names no other file: give both on the command line, config=FIRST config=SECOND"
    return ""


def _escaped(value: Any) -> Any:
    """Return a plain value whose texts are read as they are, where `${` would begin a reference."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {name: _escaped(item) for name, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Dumper(yaml.SafeDumper):
    """Writes a text such as '1e-4', which `scalar` would read as a number, in quotes."""


_Dumper.add_implicit_resolver(TAGS[3], FLOAT, list("-+.0123456789"))
