"""Read the files and arguments in which other trainers keep their configurations, as plain keys and values."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isoloss.parallel import UserError
from isoloss.tools.migrate.shell import Script

VARIABLE = re.compile(r"[A-Za-z_]\w*=")
ARGUMENT = re.compile(r"--\w|[+~]*\w+(\.\w+)+=")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def mapping(path: Path) -> dict[str, Any]:
    """Return the names and values of a YAML or JSON file."""
    text = _text(path)
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold names and values, not {type(value).__name__}")
    return {str(name): item for name, item in value.items()}


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted names. A reference gets the value of its key, or stays if there is no such key."""
    tree, flat = OmegaConf.create(dict(values)), {}

    def visit(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and value:
                visit(value, f"{key}.")
                continue
            flat[key] = value
            if isinstance(value, str) and "${" in value:
                with contextlib.suppress(OmegaConfBaseException):
                    flat[key] = OmegaConf.select(tree, key)

    visit(values, "")
    return flat


def script(path: Path | None, variables: Mapping[str, str]) -> Script:
    """Read a launch script, or nothing. variables: the values that the user gives."""
    read = Script(path.parent if path else Path(), {"HOME": str(Path.home()), "PWD": str(Path.cwd()), **variables})
    if path is not None:
        read.run(_text(path))
    return read


def arguments_of(read: Script, programs: re.Pattern[str]) -> list[str]:
    """Return the arguments of the command that runs one of the trainer's programs. A file without such a command holds
    the arguments itself. Raise UserError if the next command consists of arguments, which the trainer never got."""
    for command, after in zip(read.commands, [*read.commands[1:], [""]]):
        at = [i for i, word in enumerate(command) if programs.search(word)]
        if at and ARGUMENT.match(after[0]):
            raise UserError(f"the launch line ends with {command[-1]!r} for want of a backslash: {after[0]!r} and what "
                            "follows never reach the trainer; put \\ at the end of that line")  # fmt: skip
        if at:
            return command[at[-1] + 1 :]
    return [word for command in read.commands if command[0].startswith("-") or "=" in command[0] for word in command]


def assignments(words: Sequence[str]) -> dict[str, Any]:
    """Read Hydra's `key=value`, `+key=value` and `++key=value`."""
    pairs = (word.lstrip("+").split("=", 1) for word in words if "=" in word and not word.startswith(("-", "~", "=")))
    return {key: value_of(value) for key, value in pairs}


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Read `--name value ...`, `--name=value`, and `--name` alone, which is true."""
    given: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name] = value_of(value) if equals else True
        elif name is not None:
            item = value_of(word)
            before = given[name]
            given[name] = item if before is True else [*(before if isinstance(before, list) else [before]), item]
    return given


def value_of(text: str) -> Any:
    """Return a value of a command line: a number, true, null, a list, or text."""
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value == "None":
        return None
    return value if value is None or isinstance(value, (bool, list, dict)) else text.strip("'\"")


def split_variables(words: Sequence[str], known: frozenset[str] = frozenset()) -> tuple[dict[str, str], list[str]]:
    """Divide what the user added into NAME=VALUE for variables of a script, and the trainer's own arguments.

    known: keys without a dot, which are no variables."""
    variables = {}
    others = []
    for word in words:
        name, _, value = word.partition("=")
        if VARIABLE.match(word) and name not in known:
            variables[name] = value
        else:
            others.append(word)
    return variables, others


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot be read: it is not text") from None
