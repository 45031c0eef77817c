"""Parse JSON text into the values of a row, and show values and names in messages."""

import json
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

Parse = Callable[[str], dict[str, Any]]  # of the place of a row; returns its values or raises UserError
# Nesting of objects and lists in a row. A constant, so that whether a row is refused does not depend on the depth of
# the call that reads it; far below the depth at which parsing, copying or rendering ends in a RecursionError.
MAX_DEPTH = 100
MAX_DIGITS = 500  # digits of an integer. A constant, as Python's own limit can be changed in the environment

_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200
_REPR.maxlist = _REPR.maxdict = _REPR.maxtuple = 20


def parse_json(text: str) -> Any:
    """Parse JSON text. Raises ValueError, with a short reason, if the text is not JSON or holds what no row may hold:

    half of a surrogate pair, which no tokenizer takes; a key twice in an object, as its meaning is unknown; more than
    MAX_DEPTH levels; a number of more than MAX_DIGITS digits.
    """
    too_deep = f"JSON of more than {MAX_DEPTH} levels"
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth_exceeds(value, MAX_DEPTH):
        raise ValueError(too_deep)
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"JSON with half of a character, \\u{ord(error.object[error.start]):04x}") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"JSON in which the key {listed([max(names, key=names.count)], 40)} stands twice")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"JSON with a number of {len(digits)} digits")
    return int(digits)


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _parts(outer)]
    return any(isinstance(inner, (dict, list)) for inner in level)


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def without_nulls(value: Any) -> Any:
    """Remove fields that are null from objects, at every depth."""
    # Arrow gives every object the fields of all objects of its column, and a chat template would write the nulls.
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def shown(value: Any, length: int = 60) -> str:
    """Return a value as an error message shows it: its type and a short representation on one line."""
    text = _REPR.repr(value)
    return f"{type(value).__name__} {text if len(text) <= length else text[:length] + '...'}"


def listed(names: Iterable[str], length: int = 200) -> str:
    """Return names as an error message lists them: on one line of at most about `length` characters."""
    text = " ".join(", ".join(names).split())
    return text if len(text) <= length else text[:length] + "..."


def one_line(error: BaseException, length: int = 200) -> str:
    """Return the type and text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]
