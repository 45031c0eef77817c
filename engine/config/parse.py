"""Build the frozen dataclasses of a configuration from plain nested values, and explain wrong names and types."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from isoloss.engine.config import elsewhere
from isoloss.parallel import UserError
from isoloss.parallel.runtime.config_key import require


@functools.cache
def types_of_fields(cls: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a class by name, which take long to resolve: a composition asks a thousand
    times."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def build(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a frozen dataclass from a plain nested mapping. Raises UserError for an unknown key or a wrong type."""
    types_of = types_of_fields(cls)
    for key in values:
        if key not in types_of:
            raise UserError(unknown_key(f"{prefix}{key}", known_keys(cls, prefix)))
    nothing = dataclasses.MISSING
    for f in dataclasses.fields(cls):
        if f.default is nothing and f.default_factory is nothing and f.name not in values:
            raise UserError(f"{prefix}{f.name} is missing: give it")
    return cls(**{key: convert(types_of[key], value, f"{prefix}{key}") for key, value in values.items()})


def defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of all keys of a configuration class, as plain nested values."""
    values = {}
    for f in dataclasses.fields(cls):
        kind = types_of_fields(cls)[f.name]
        if dataclasses.is_dataclass(kind):
            values[f.name] = defaults(kind)
        else:
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            values[f.name] = list(default) if isinstance(default, tuple) else default
    return values


def unknown_key(key: str, known: list[str], of_others: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """Return the message for a key that does not exist, with the nearest of `known`.

    of_others: recipes that have a key, by the key.
    """
    if key in of_others:
        return f"{key} is a key of {of_others[key]}, not of this recipe; leave it out"
    if members := [k for k in known if k.startswith(f"{key}.")]:
        return f"{key!r} is a group, not a key; its keys are {', '.join(members)}"
    # The right name in the wrong group is likelier than another name in the right group.
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = difflib.get_close_matches(key, same_name, n=1, cutoff=0)
    if (translated := elsewhere.key_of(key)) in known:
        near = [translated]
    elif not near and (explanation := elsewhere.explanation(key, {name.partition(".")[0] for name in known})):
        return f"unknown key {key!r}: {explanation}"
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}")


def mappings(cls: Any) -> list[str]:
    """Return the keys that hold a mapping, whose names are not fixed."""
    return [name for name, kind in key_types(cls) if typing.get_origin(kind) is Mapping]


def known_keys(cls: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all keys of a configuration class."""
    return [name for name, _ in key_types(cls, prefix)]


def key_types(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every key of a configuration class."""
    for name, kind in types_of_fields(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from key_types(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def convert(kind: Any, value: Any, key: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise UserError(f"{key}={value!r} must be a group of keys: {', '.join(known_keys(kind, key + '.'))}")
        return build(kind, value, f"{key}.")
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        arms = [arm for arm in args if arm is not type(None)]
        fitting = (arm for arm in arms if dataclasses.is_dataclass(arm) == isinstance(value, Mapping))
        return convert(next(fitting, arms[0]), value, key)
    if origin is Literal:
        return value  # the class compares it with its choices
    if origin is Mapping:
        value = {} if value is None else value
        require(isinstance(value, Mapping), key, value, "must be a mapping of names to values, such as {name: value}")
        return dict(value)
    if origin is tuple:
        items = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or (args[-1] is not Ellipsis and len(items) != len(args)):
            raise UserError(f"{key}={value!r} must be a list" + ("" if args[-1] is Ellipsis else f" of {len(args)}"))
        return tuple(convert(args[0], item, key) for item in items)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-5 as a string
        except (ValueError, OverflowError):
            raise UserError(f"{key}={value!r} must be a number") from None
    if kind is str and isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]
        raise UserError(f"{key}={value!r} must be {wanted}")
    return value
