"""Keys of the configuration. The default, meaning and bounds of a key are written once, in the field of its dataclass.

`key` makes such a field. The base class `Keys` checks every value against its bounds when an object is built.
isoloss.engine.config.help prints meanings and bounds for users.
"""

import dataclasses
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from isoloss.parallel.runtime.errors import UserError


def require(holds: bool, key: str, value: object, hint: str) -> None:
    if not holds:
        raise UserError(f"{key}={value!r} {hint}")


@dataclasses.dataclass(frozen=True)
class KeySpec:
    """The meaning, choices and bounds of a key. Choices and bounds hold for each item of a list, and not for null.

    text: meaning for `--help` and docs/configuration.md, with units and the meaning of null.
    required: True to refuse the default, which is empty.
    choices: valid names, if the type is not a Literal of them.
    or_function: True to allow a function of the user, file.py:function, too.
    at_least, above, at_most, below: bounds; None: no bound.
    refusal: text after `key=value` for a value out of bounds; None: a text made from the bounds.
    """

    text: str
    required: bool = False
    choices: tuple[str, ...] = ()
    or_function: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    refusal: str | None = None

    def bounds(self) -> list[tuple[str, float]]:
        """List the bounds with their signs, such as [(">=", 0), ("<", 1)]."""
        bounds = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return [(sign, bound) for sign, bound in bounds if bound is not None]

    def within(self, number: float) -> bool:
        holds = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
        return all(holds[sign](number, bound) for sign, bound in self.bounds())

    def must(self, is_list: bool, nullable: bool) -> str:
        """Return the text of a refusal after `key=value`, such as "must not be negative"."""
        if self.refusal is not None:
            return self.refusal
        each, or_null = "each " if is_list else "", ", or null" if nullable else ""
        match self.bounds():
            case [(">=", 0)] if not is_list and not nullable:
                return "must not be negative"
            case [(">", 0)] if not is_list:
                return f"must be positive{or_null}"
            case [(">=", low), ("<=" | "<" as sign, high)]:
                return f"must {each}be in [{low}, {high}{']' if sign == '<=' else ')'}{or_null}"
            case several:
                words = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
                return f"must {each}be {' and '.join(f'{words[sign]} {bound}' for sign, bound in several)}{or_null}"


def key(default: Any, text: str, **more: Any) -> Any:
    """Make a field of a `Keys` class. more: fields of `KeySpec`."""
    meaning = KeySpec(text, **more)
    if isinstance(default, Mapping):  # a dataclass allows no mutable default, and a dict has no hash
        return dataclasses.field(default_factory=lambda: dict(default), hash=False, metadata={"key": meaning})
    return dataclasses.field(default=default, metadata={"key": meaning})


@dataclasses.dataclass(frozen=True)
class Keys:
    """Base of a group of keys: `class OptimConfig(Keys, group="optim")`. Raises UserError for a value out of bounds.

    A subclass that defines `__post_init__`, for rules between keys, must call `super().__post_init__()`.
    """

    _group = ""

    def __init_subclass__(cls, group: str | None = None, **others: Any):
        super().__init_subclass__(**others)
        if group is not None:
            cls._group = group

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = f"{self._group}.{field.name}"
            value = typed(name, field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check(name, field, value)


WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def typed(name: str, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the value of a key, with a tuple for a list or a single text, and text for a path.

    Raises UserError for a value of another type than the key's.
    """
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        items = (value,) if isinstance(value, str) else value
        require(isinstance(items, tuple | list), name, value, "must be a list")
        return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)
    for kind in kinds:
        if kind in WANTED and not (value is None and types.NoneType in kinds):
            allowed: Any = (int, float) if kind is float else kind
            accepted = isinstance(value, allowed)
            require(accepted and (kind is bool or not isinstance(value, bool)), name, value, f"must be {WANTED[kind]}")
    return value


def meaning_of(field: "dataclasses.Field[Any]") -> KeySpec:
    assert "key" in field.metadata, f"{field.name} is a key without a meaning: make the field with key(...)"
    return field.metadata["key"]


@functools.cache
def choices_of(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Return the valid names of a key, or of the items of its list; empty if any value is valid."""
    return meaning_of(field).choices or _literals(field.type)


def is_nullable(field: "dataclasses.Field[Any]") -> bool:
    return types.NoneType in typing.get_args(field.type)


def _literals(kind: Any) -> tuple[str, ...]:
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return next((names for part in typing.get_args(kind) if (names := _literals(part))), ())


def _check(name: str, field: "dataclasses.Field[Any]", value: Any) -> None:
    meaning, choices = meaning_of(field), choices_of(field)
    is_list = isinstance(value, tuple)
    if meaning.required and not value:
        raise _refused(name, field, list(value) if is_list else value)
    if value is None:
        return
    items = value if is_list else (value,)
    if choices:
        verb = "may only name" if is_list else "is not one of"
        or_function = " or file.py:function" if meaning.or_function else ""
        known = (item in choices or (meaning.or_function and ":" in item) for item in items)
        require(all(known), name, value, f"{verb} {', '.join(choices)}{or_function}")
    for item in items:
        if isinstance(item, float):
            require(math.isfinite(item), name, value, "must be a finite number")
        if isinstance(item, (int, float)) and not meaning.within(item):
            raise _refused(name, field, value)


def _refused(name: str, field: "dataclasses.Field[Any]", value: object) -> UserError:
    return UserError(f"{name}={value!r} {meaning_of(field).must(isinstance(value, list | tuple), is_nullable(field))}")
