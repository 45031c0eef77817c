"""Take the files that `config=FILE` names out of a command line, and say which of them decides a key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from isoloss.engine.config import config_file
from isoloss.engine.config.config_file import ConfigFile
from isoloss.parallel import UserError

KEY = "config"


@dataclass(frozen=True)
class ConfigFiles:
    """The files of a command line in its order: a later one wins over those before it."""

    files: tuple[ConfigFile, ...]

    @property
    def preset(self) -> str | None:
        """Return the preset that the last file with one names."""
        return next((each.preset for each in reversed(self.files) if each.preset is not None), None)

    def give(self, key: str) -> bool:
        """Return whether a file gives a key."""
        return any(key in each.values for each in self.files)

    def nested(self) -> Any:
        """Return the values of all files, group by group. A list replaces the list of an earlier file; names of a
        mapping are added to its names."""
        return OmegaConf.merge({}, *(each.nested() for each in self.files))

    def place(self, message: str, overrides: Sequence[str]) -> str:
        """Return where the key that a refusal begins with stands, in parentheses; empty if no file decides it."""
        key = message.partition("=")[0]
        if any(override.partition("=")[0] == key for override in overrides):
            return ""
        decides = next((each for each in reversed(self.files) if key in each.lines), None)
        return "" if decides is None else f" ({decides.path}:{decides.lines[key]})"


def read(cls: Any, overrides: Sequence[str], of_others: Mapping[str, str]) -> tuple[ConfigFiles, list[str]]:
    """Read the files of a command line for a configuration class; return them, and the overrides without them.

    of_others: recipes that have a key that `cls` lacks, by the key. Raises UserError.
    """
    files, others = [], []
    for override in overrides:
        key, equals, value = override.partition("=")
        if key != KEY or not equals:
            others.append(override)
        elif value.startswith("[") or "," in value or not value:
            raise UserError(f"{override} must name one file; give several as config=FIRST config=SECOND")
        else:
            files.append(config_file.read(Path(value), cls, of_others))
    return ConfigFiles(tuple(files)), others
