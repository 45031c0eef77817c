"""Fields of a config.json: read with a type, or refused in one line that names the field, the value and the fix."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from isoloss.parallel.runtime.errors import UserError

ConfigJson = Mapping[str, Any]  # parsed
MAX_LAYERS = 10_000  # more would fill the memory with a list of them before anything could be said


def refuse(name: str, value: object, why: str) -> NoReturn:
    text = repr(value)
    raise UserError(f"config.json: {name}={text if len(text) <= 80 else text[:77] + '...'} {why}")


def missing(name: str) -> NoReturn:
    raise UserError(f"config.json: {name} is missing; add it, as the model's authors published it")


def positive_int(config: ConfigJson, name: str, inside: str = "") -> int:
    value = config.get(name)
    if value is None:
        missing(inside + name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        refuse(inside + name, value, "must be a positive integer")
    if name == "num_hidden_layers" and value > MAX_LAYERS:
        refuse(inside + name, value, f"must be at most {MAX_LAYERS}")
    return value


def positive_number(config: ConfigJson, name: str, inside: str = "") -> float:
    value = config.get(name)
    if value is None:
        missing(inside + name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        refuse(inside + name, value, "must be a positive number")
    return value


def flag(config: ConfigJson, name: str, default: bool = False) -> bool:
    """default: what an absent field means. null is false to the code that reads it, so it is refused where absent means
    true."""
    value = config.get(name, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        refuse(name, value, "must be true or false")
    return value


def with_absent(
    config: ConfigJson, absent: ConfigJson, *, spellings: Sequence[str] = (), null: Sequence[str] = ()
) -> ConfigJson:
    """`config` with what transformers' class takes for the fields that it leaves out. One that is null stays null,
    which that class takes for something else, or refuses.

    spellings: of one field of `absent`, which is there if any of them is.
    null: fields that the class takes for absent where they are null.
    """
    left_out = () if config.keys().isdisjoint(spellings) else spellings
    config = {name: value for name, value in config.items() if value is not None or name not in null}
    return {**{name: value for name, value in absent.items() if name not in left_out}, **config}


def number_of(config: ConfigJson, *spellings: str) -> int:
    """A field that may be 0, under one of its spellings; absent means 0."""
    for name in spellings:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                refuse(name, value, "must be a whole number, at least 0")
            return value
    return 0
