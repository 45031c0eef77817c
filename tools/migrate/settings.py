"""The values that a configuration of another trainer gives its keys, and the functions that tables may name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.parallel import UserError

IMAGES = re.compile(r"(^|[-_.])(vlm?|vision|omni)([-_.\d]|$)", re.IGNORECASE)
SCHEDULES = ("constant", "linear", "cosine")
FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "none": False}


class Unset:
    """The value of a key of isoloss that the source does not decide: isoloss's default holds."""

    def __bool__(self) -> bool:
        return False


UNSET = Unset()


@dataclass(frozen=True)
class Settings:
    """The values of a configuration. Tables may name each method; `*others` are keys that count where `key` is not set.

    trainer: the name of the source's trainer. given: the values of the keys that the configuration names.
    defaults: the trainer's default of every key.
    """

    trainer: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __call__(self, key: str, *others: str) -> Any:
        """Return the value. Raise UserError if it holds a variable whose value is not known."""
        key = self._first(key, *others)
        value = self._raw(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and "$" in item:
                raise self.refusal(key, "has a variable whose value is not known; give it as NAME=VALUE, or the key")
        return value

    value = __call__

    def value_if_any(self, key: str) -> Any:
        return self(key) or UNSET

    def has(self, key: str, *others: str) -> bool:
        """Return whether the configuration gives one of the keys a value other than null."""
        return any(self.given.get(name) is not None for name in (key, *others))

    def named(self, key: str) -> Any:
        """Return the value of a key that the configuration names; None for one that it leaves to its default."""
        return self(key) if key in self.given else None

    def on(self, key: str) -> bool:
        """Return whether the configuration names the key, as true."""
        return key in self.given and self.flag(key)

    def number(self, key: str, *others: str) -> float:
        key = self._first(key, *others)
        value = self(key)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.refusal(key, "must be a number") from None

    def integer(self, key: str, *others: str) -> int:
        value = self.number(key, *others)
        if not value.is_integer():
            raise self.refusal(self._first(key, *others), "must be a whole number")
        return int(value)

    def optional(self, key: str) -> int | None:
        """Return a whole number; None for null and 0."""
        return None if self(key) is None else self.integer(key) or None

    def positive(self, key: str) -> int | None:
        """Return a whole number above 0; None for null, 0 and -1, by which trainers mean none."""
        value = self.optional(key)
        return value if value is not None and value > 0 else None

    def numbers(self, key: str) -> list[float]:
        """Return the numbers of a list."""
        return [float(item) for item in self(key)]

    def pair(self, key: str, second_key: str) -> list[float]:
        return [self.number(key), self.number(second_key)]

    def flag(self, key: str) -> bool:
        value = self(key)
        if isinstance(value, bool):
            return value
        if str(value).lower() not in FLAGS:
            raise self.refusal(key, "must be true or false")
        return FLAGS[str(value).lower()]

    def text(self, key: str) -> str:
        return str(self(key))

    def equals(self, key: str, text: str) -> bool:
        return self.text(key) == text

    def texts(self, key: str) -> list[str]:
        value = self(key)
        return [] if value is None else [str(item) for item in value] if isinstance(value, list) else [str(value)]

    def always(self, *words: str) -> str:
        return " ".join(words)

    def either(self, key: str, true: str, false: str) -> str:
        return true if self.flag(key) else false

    def schedule(self, key: str, *others: str) -> Any:
        """Return the learning rate's schedule if isoloss has one of that name."""
        style = self(key, *others)
        return style if style in SCHEDULES else UNSET

    def takes_images(self, key: str) -> bool:
        """Return whether the name of the model is one of a model that takes images."""
        return bool(IMAGES.search(str(self(key)).rstrip("/").rsplit("/", 1)[-1]))

    def cuts_vocabulary(self, top_p_key: str, top_k_key: str) -> bool:
        return self.number(top_p_key) != 1 or self.integer(top_k_key) not in (-1, 0)

    def columns(self, **theirs: Any) -> Any:
        """Return data.columns, from the trainer's column by isoloss's name; nothing where all names are isoloss's.

        Of a mapping isoloss takes the columns of a row's form from nowhere else, so that it names all of them.
        """
        return UNSET if all(ours == column for ours, column in theirs.items()) else theirs

    def refusal(self, key: str, hint: str) -> UserError:
        return UserError(f"{self.trainer}: {key}={self._raw(key)!r} {hint}")

    def _first(self, *keys: str) -> str:
        """Return the first key that is given, else the first that has a default."""
        having = (key for has in (self.given.get, self.defaults.get) for key in keys if has(key) is not None)
        return next(having, keys[0])

    def _raw(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.defaults[key]
