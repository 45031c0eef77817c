"""Fields of a config.json: read with a type, or refused in one line that names the field, the value and the fix."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from isoloss.models.architecture import MTP_LAYERS
from isoloss.parallel.runtime.errors import UserError

ConfigJson = Mapping[str, Any]  # parsed
# The most that a field counts: what is made of a model takes time and memory by its layers and experts, which a file of
# a few bytes can name at will. No published model has a fourth of either.
MOST = {
    **dict.fromkeys(("num_hidden_layers", *MTP_LAYERS), 1024),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts"), 8192),
}
MOST_OF_OTHERS = 2**31 - 1  # a width, a vocabulary or a number of positions


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
    _check_most(name, value, inside)
    return value


def positive_number(config: ConfigJson, name: str, inside: str = "") -> float:
    value = config.get(name)
    if value is None:
        missing(inside + name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        refuse(inside + name, value, "must be a positive number")
    return value


def flag(config: ConfigJson, name: str, default: bool = False) -> bool:
    """Return a boolean field, `default` where it is absent. transformers reads null as false, so null is refused where
    the default is true."""
    value = config.get(name, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        refuse(name, value, "must be true or false")
    return value


def with_absent(
    config: ConfigJson, absent: ConfigJson, *, spellings: Sequence[str] = (), null: Sequence[str] = ()
) -> ConfigJson:
    """Return `config` with the defaults of transformers' class for absent fields. A field that is null stays null,
    which that class reads as something else, or refuses.

    spellings: names of one field of `absent`, which is present if any of them is.
    null: fields that the class treats as absent where they are null.
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
            _check_most(name, value)
            return value
    return 0


def _check_most(name: str, value: int, inside: str = "") -> None:
    if value > (most := MOST.get(name, MOST_OF_OTHERS)):
        refuse(inside + name, value, f"must be at most {most}, more than any model has; copy the file again")
