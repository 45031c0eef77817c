"""Pickles of `.metadata` that read differently each time, that change what the process shares, or that take memory."""

import pickle
from pathlib import Path

_VALUE, _ANSWERS = b"r\x00\x00\x10\x00", b"r\x01\x00\x10\x00"  # LONG_BINPUT at indices that pickles of metadata lack
_KEY = "torch.strided"


def name(module: str, attribute: str) -> bytes:
    return plain(module) + plain(attribute) + b"\x93"


def plain(value: object) -> bytes:
    return pickle.dumps(value, 4)[2:-1]


def with_program(pickled: bytes, program: bytes) -> bytes:
    """The same value, once the program, which leaves one object on the stack, has run."""
    return pickled[:-1] + program + b"0."


def build(target: bytes, state: bytes) -> bytes:
    return target + state + b"b"


def after_readings(pickled: bytes, mark: Path, harmless: int) -> bytes:
    """The same value; from reading `harmless` + 1 on in one process it makes the mark.

    The state that lasts is the attribute `cache` of `torch.serialization._get_layout`: BUILD sets it, a call looks into
    it. The first reading finds a layout there, and every reading leaves the number of the next one.
    """
    states = [str(reading) for reading in range(2, harmless + 2)]
    last = states[-1]
    modules = {**dict.fromkeys(states, "pathlib"), last: "posix"}
    names = {**dict.fromkeys(states, "PosixPath"), last: "system"}
    following = dict(zip(states, [*states[1:], last]))
    program = _ask(plain(_KEY)) + _VALUE + b"0"
    program += _answer("pathlib", modules) + _answer("PosixPath", names) + b"\x93"
    program += plain(f"touch {mark}") + b"\x85R0"
    program += _answer(states[0], following) + _ANSWERS + b"0"
    cache = b"}" + plain(_KEY) + b"j\x01\x00\x10\x00s"
    program += build(name("torch.serialization", "_get_layout"), b"N}" + plain("cache") + cache + b"s\x86")
    return with_program(pickled, program)


def _ask(key: bytes) -> bytes:
    return name("torch.serialization", "_get_layout") + key + b"\x85R"


def _answer(first: str, others: dict[str, str]) -> bytes:
    """Leaves on the stack what stands for the value found: `first` for anything that `others` does not hold."""
    value = b"j\x00\x00\x10\x00"
    table = b"}" + value + plain(first) + b"s" + b"".join(plain(k) + plain(v) + b"s" for k, v in others.items())
    state = b"N}" + plain("cache") + table + b"s\x86"
    return build(name("torch.serialization", "_get_layout"), state) + b"0" + _ask(value)
