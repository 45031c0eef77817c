"""What is known of another trainer's keys, and what one of its configurations says."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.parallel import UserError
from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.releases import Sizes

Recipe = Literal["sft", "grpo", "dapo"]
Matter = Literal["nothing", "give", "result"]
IMAGES = re.compile(r"(^|[-_.])(vlm?|vision|omni)([-_.\d]|$)", re.IGNORECASE)
NO_DISTILLATION = "isoloss has no distillation: nothing is learned from a teacher"


class Unset:
    """What a key of ours gets where the source decides nothing: our default."""


UNSET = Unset()


@dataclass(frozen=True)
class Row:
    """A key of the source.

    key: its name; `group.*` stands for every name below the group, `--prefix-*` for every name that begins so.
    default: its value where a configuration does not name it.
    to: our keys that it decides; `ours|key`: only where the configuration does not name the source's other key.
    why: what we do instead, of a key without a counterpart.
    neutral: values with which a key without a counterpart asks for nothing.
    lost: what of its value cannot be carried over, or None.
    matter: where that, or a key without a counterpart, is told: among what changes the result, what a user must give,
    or what changes nothing that is learned.
    when: the settings in which a key without a counterpart is read at all.
    """

    key: str
    default: Any = None
    to: tuple[str, ...] = ()
    why: str = ""
    neutral: tuple[Any, ...] = ()
    lost: "Callable[[Settings], str | None] | None" = None
    matter: Matter = "nothing"
    when: "Callable[[Settings], bool] | None" = None

    def matches(self, key: str) -> bool:
        return key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key


def to(
    key: str,
    ours: str,
    default: Any = None,
    lost: "Callable[[Settings], str | None] | None" = None,
    matter: Matter = "nothing",
) -> Row:
    """A key with a counterpart. ours: our keys, separated by spaces."""
    return Row(key, default, tuple(ours.split()), lost=lost, matter=matter)


def none(
    why: str,
    *keys: str,
    neutral: tuple[Any, ...] = (),
    matter: Matter = "nothing",
    when: "Callable[[Settings], bool] | None" = None,
) -> tuple[Row, ...]:
    """Keys without a counterpart, for one reason."""
    return tuple(Row(key, why=why, neutral=neutral, matter=matter, when=when) for key in keys)


def changes(
    why: str, *keys: str, neutral: tuple[Any, ...] = (), when: "Callable[[Settings], bool] | None" = None
) -> tuple[Row, ...]:
    """Keys without a counterpart, which decide what is learned."""
    return none(why, *keys, neutral=(None, False, *neutral), matter="result", when=when)


@dataclass(frozen=True)
class Settings:
    """What a configuration says, key by key. given: what it names. rows: of its trainer."""

    trainer: str
    given: Mapping[str, Any]
    rows: tuple[Row, ...]

    def __call__(self, key: str) -> Any:
        """Its value: as given, or the trainer's default. Raises UserError where a variable in it has no value."""
        value = self.given[key] if key in self.given else self.default(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and "$" in item:
                raise self.refusal(key, "has a variable whose value is not known; give it as NAME=VALUE, or the key")
        return value

    def default(self, key: str) -> Any:
        return next(row.default for row in self.rows if row.key == key)

    def has(self, *keys: str) -> bool:
        """Whether it names one of them, with a value."""
        return any(self.given.get(key) is not None for key in keys)

    def on(self, key: str) -> bool:
        """Whether it names the key, as true."""
        return key in self.given and self.flag(key)

    def named(self, key: str) -> Any:
        """Its value where it names the key, or None."""
        return self(key) if key in self.given else None

    def first(self, *keys: str) -> Any:
        """Of the first that it names; else the default of the first."""
        return self(next((key for key in keys if self.has(key)), keys[0]))

    def number(self, key: str) -> float:
        value = self(key)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.refusal(key, "must be a number") from None

    def integer(self, key: str) -> int:
        value = self.number(key)
        if not value.is_integer():
            raise self.refusal(key, "must be a whole number")
        return int(value)

    def optional(self, key: str) -> int | None:
        """A whole number, or None where there is none."""
        return None if self(key) is None else self.integer(key)

    def positive(self, key: str) -> int | None:
        """A whole number above 0; None for none, 0 and -1, which trainers use for it."""
        value = self.optional(key)
        return value if value is not None and value > 0 else None

    def flag(self, key: str) -> bool:
        value = self(key)
        known = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "none": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() not in known:
            raise self.refusal(key, "must be true or false")
        return known[str(value).lower()]

    def text(self, key: str) -> str:
        return str(self(key))

    def texts(self, key: str) -> list[str]:
        value = self(key)
        return [] if value is None else [str(item) for item in value] if isinstance(value, list) else [str(value)]

    def refusal(self, key: str, hint: str) -> UserError:
        value = self.given[key] if key in self.given else self.default(key)
        return UserError(f"{self.trainer}: {key}={value!r} {hint}")


@dataclass(frozen=True)
class Source:
    """A kind of configuration.

    trainer: its name. rows: its keys. keys: our keys, each as a function of its settings; UNSET leaves our default.
    recipe: which of ours it becomes. loss: what it divides its loss by, and remarks on it. before: what a user must
    still give. past: the sizes of its steps, and which rows of releases.PASTS are about it.
    """

    trainer: str
    rows: tuple[Row, ...]
    keys: Mapping[str, Callable[[Settings], Any]]
    recipe: Callable[[Settings], Recipe]
    loss: Callable[[Settings], tuple[Denominator, list[str]]]
    before: Callable[[Settings], list[str]]
    past: Callable[[Settings], tuple[Sizes, list[str]]] = lambda settings: (Sizes(), [])

    def row_of(self, key: str) -> Row | None:
        """The row of that very name, or the one of its longest group."""
        found = [row for row in self.rows if row.matches(key)]
        return max(found, key=lambda row: (not row.key.endswith("*"), len(row.key)), default=None)


@dataclass(frozen=True)
class Account:
    """Where each key that a configuration names went; each line begins with it.

    changes: what the run learned by it, and ours does not. give: what of it a user must give otherwise. Both with a
    reason, as in without. translated: what it became. same: it asks for what we do by default. without: no counterpart,
    with what we do instead. unknown: names of no key that we know. implied: our keys that it decides by the trainer's
    defaults.
    """

    changes: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    give: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    translated: list[str] = dataclasses.field(default_factory=list)
    same: list[str] = dataclasses.field(default_factory=list)
    without: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    implied: list[str] = dataclasses.field(default_factory=list)


def lost_images(key: str) -> "Callable[[Settings], str | None]":
    """Of the key that names the model."""

    def lost(s: "Settings") -> str | None:
        sees = IMAGES.search(str(s(key)).rstrip("/").rsplit("/", 1)[-1])
        return "by its name it takes images, and isoloss trains on text alone" if sees else None

    return lost


def translate(source: Source, settings: Settings) -> dict[str, Any]:
    """Our keys that the configuration decides, by its own values and by its trainer's defaults."""
    values = {key: function(settings) for key, function in source.keys.items()}
    return {key: value for key, value in values.items() if value is not UNSET}


def account(source: Source, settings: Settings, emitted: Mapping[str, str]) -> Account:
    """emitted: the lines that are written, by our key. Raises UserError where none of the keys is the trainer's."""
    told, named = Account(), set()
    for key, value in settings.given.items():
        row, shown = source.row_of(key), f"{key}={_shown(value)}"
        if row is None:
            told.unknown.append(shown)
            continue
        decided = [ours for ours, _, other in (name.partition("|") for name in row.to) if not settings.has(other)]
        lines = [emitted[ours] for ours in decided if ours in emitted]
        named |= set(decided)
        lost = row.lost(settings) if row.lost is not None else None
        unread = value in row.neutral or (row.when is not None and not row.when(settings))
        if reason := row.why if row.why and not unread else lost:
            {"result": told.changes, "give": told.give, "nothing": told.without}[row.matter].append((shown, reason))
        elif lines:
            told.translated.append(f"{shown} -> {' '.join(lines)}")
        else:
            told.same.append(shown)
    for row in source.rows:  # defaults that ours are not
        if row.matter == "result" and row.lost and row.key not in settings.given and (why := row.lost(settings)):
            told.changes.append((f"{row.key}={_shown(row.default)}, {source.trainer}'s default", why))
    if len(told.unknown) == len(settings.given):
        raise UserError(f"this is not a configuration of {source.trainer}: it has none of its keys")
    told.implied.extend(line for ours, line in emitted.items() if ours not in named)
    return told


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(_shown, value))}]" if isinstance(value, list) else str(value)
