"""A reader of pickles that runs nothing of them and reaches nothing of this process.

`pickle.Unpickler` with a list of admitted names is not enough: BUILD sets attributes of whatever a name stands for,
which lasts beyond the reading, and a memo index of four bytes takes gigabytes. Here a name is an opaque object that its
reader defines. The pickle can call it, make an instance by it, and give that instance its state once, all by functions
of the reader; it cannot change it.

Only opcodes that protocols 2 to 5 write for plain values and dataclasses are known. A value takes at most some hundred
bytes for each byte of the file: nothing is made of a length or an index that the file merely names.
"""

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

_MAX_AXES = 64  # of a tensor, and of what is read from a pickle as one key
_MAX_INT_BYTES = 64
_SCALARS = (str, bytes, int, float, bool, type(None))


class RefusedError(ValueError):
    """The pickle asks for something that is not admitted. Its text says for what."""


class Inert:
    """In place of a value that nobody reads: takes what a pickle does to it, and does nothing."""

    __slots__ = ()


class Name:
    """The meaning of a global of a pickle; a pickle cannot set an attribute of it.

    called: function that REDUCE calls with the arguments.
    made: function of the arguments that makes NEWOBJ's instance; `built` takes the instance and its state, once.
    """

    __slots__ = ("built", "called", "made", "text")

    def __init__(
        self,
        text: str,
        called: Callable[..., Any] | None = None,
        made: Callable[..., Any] | None = None,
        built: Callable[[Any, Any], None] | None = None,
    ):
        self.text, self.called, self.made, self.built = text, called, made, built


def inert(text: str) -> Name:
    """A name whose instances and answers are Inert."""
    return Name(text, called=_nothing, made=_nothing, built=lambda instance, state: None)


def of_fields(text: str, kind: type, fields: Mapping[str, tuple[type, ...]]) -> Name:
    """The name of a dataclass: its state is a dict of all of these fields, each of one of its types."""

    def made() -> Any:
        return object.__new__(kind)

    def built(instance: Any, state: Any) -> None:
        if type(state) is not dict or not fields.keys() >= state.keys():
            raise RefusedError(f"fields that {text} does not have")
        for field, types in fields.items():
            if type(value := state.get(field)) not in types:
                raise RefusedError(f"a {type(value).__name__} as {text}.{field}")
            instance.__dict__[field] = value

    return Name(text, made=made, built=built)


def axes(values: Any) -> tuple[int, ...]:
    """A shape, or an offset."""
    if not isinstance(values, tuple) or len(values) > _MAX_AXES or any(type(value) is not int for value in values):
        raise RefusedError("a shape that is none")
    return tuple(values)


def read(
    data: bytes,
    find: Callable[[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
    keys: tuple[type, ...] = (),
) -> Any:
    """Return the value of a pickle.

    find: function from a module and a name to a Name, or to a value that cannot be changed.
    persistent: function from a persistent id to its value; None: persistent ids are refused.
    keys: types of keys allowed in dicts in addition to plain values.
    Raises RefusedError, what the functions raise, or an error of some kind where the data is damaged.
    """
    machine = _Machine(data, find, persistent, keys)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"{type(error).__name__} at byte {machine.at}") from None


# ---- how ------------------------------------------------------------------------------------------------------------


def _nothing(*_args: Any) -> Inert:
    return Inert()


class _Machine:
    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None,
        keys: tuple[type, ...],
    ):
        self.at = 0
        self._data, self._find, self._persistent, self._keys = data, find, persistent, keys
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], Any] = {}
        self._unbuilt: dict[int, tuple[Any, Name]] = {}  # by identity; holds the instances, so that none is reused

    def run(self) -> Any:
        data, known = self._data, _OPCODES
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                return self._stack.pop()
            act = known.get(opcode)
            if act is None:
                if chr(opcode) in _NAMES_OF_OPCODES:
                    raise RefusedError(f"the opcode {_NAMES_OF_OPCODES[chr(opcode)]}")
                raise ValueError(f"no pickle at byte {self.at - 1}")
            act(self)

    def take(self, count: int) -> bytes:
        taken = self._data[self.at : self.at + count]
        if len(taken) != count:
            raise ValueError(f"it ends within a value at byte {self.at}")
        self.at += count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self._data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise ValueError(f"a stack without a value at byte {self.at}")
        return self._stack.pop()

    def pop_some(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def top(self) -> Any:
        self.push(value := self.pop())
        return value

    def remember(self, index: int) -> None:
        self._memo[index] = self.top()

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        self.push(self._memo[index])

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedError("a name that is no text")
        if (module, name) not in self._names:
            self._names[module, name] = self._find(module, name)
        self.push(self._names[module, name])

    def stack_name(self) -> None:
        self.name(*self.pop_some(2))

    def reduce(self) -> None:
        named, args = self.pop_some(2)
        if type(named) is not Name or named.called is None or type(args) is not tuple:
            raise RefusedError(f"a call of {_text(named)}")
        self.push(named.called(*args))

    def make(self) -> None:
        named, args = self.pop_some(2)
        if type(named) is not Name or named.made is None or type(args) is not tuple:
            raise RefusedError(f"an instance of {_text(named)}")
        instance = named.made(*args)
        if named.built is not None and type(instance) is not Inert:
            self._unbuilt[id(instance)] = instance, named
        self.push(instance)

    def build(self) -> None:
        state, instance = self.pop(), self.top()
        if type(instance) is Inert:
            return
        _, named = self._unbuilt.pop(id(instance), (None, None))
        if named is None or named.built is None:
            raise RefusedError(f"a change of {_text(instance)}")
        named.built(instance, state)

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is list:
            target.extend(values)
        elif type(target) is not Inert:
            raise RefusedError(f"a change of {_text(target)}")

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if len(values) % 2:
            raise ValueError(f"a key without a value at byte {self.at}")
        if type(target) is dict:
            for key, value in zip(values[::2], values[1::2]):
                self._check_key(key)
                target[key] = value
        elif type(target) is not Inert:
            raise RefusedError(f"a change of {_text(target)}")

    def refer(self) -> None:
        if self._persistent is None:
            raise RefusedError("a persistent id")
        self.push(self._persistent(self.pop()))

    def _check_key(self, key: Any) -> None:
        """Hashing a tuple of tuples, each twice in the next, has no end."""
        parts = key if type(key) is tuple and len(key) <= _MAX_AXES else (key,)
        if not all(isinstance(part, _SCALARS) or type(part) in (*self._keys, Inert) for part in parts):
            raise RefusedError(f"{_text(key)} as a key")


def _text(value: Any) -> str:
    """Return a message's name for a value, never the whole value, whose text can be as long as a pickle likes."""
    return value.text if type(value) is Name else type(value).__name__


def _long(machine: _Machine, size: int) -> None:
    count = machine.number(size)
    if count > _MAX_INT_BYTES:
        raise RefusedError(f"a number of {count} bytes")
    machine.push(int.from_bytes(machine.take(count), "little", signed=True))


def _string(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(size)))


def _protocol(machine: _Machine) -> None:
    if machine.number(1) > 5:
        raise ValueError("a protocol that nobody knows")


_STOP = ord(".")
_NAMES_OF_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
_OPCODES: Mapping[int, Callable[[_Machine], Any]] = {
    opcode[0]: act
    for opcode, act in {
        b"\x80": _protocol,
        b"\x95": lambda m: m.take(8),  # a frame, of which the length says nothing that is needed
        b"(": _Machine.mark,
        b"0": _Machine.pop,
        b"1": _Machine.pop_mark,
        b"2": lambda m: m.push(m.top()),
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
        b"K": lambda m: m.push(m.number(1)),
        b"M": lambda m: m.push(m.number(2)),
        b"\x8a": lambda m: _long(m, 1),
        b"\x8b": lambda m: _long(m, 4),
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        b"\x8c": _string(1),
        b"X": _string(4),
        b"\x8d": _string(8),
        b"C": _bytes(1),
        b"B": _bytes(4),
        b"\x8e": _bytes(8),
        b"]": lambda m: m.push([]),
        b"}": lambda m: m.push({}),
        b")": lambda m: m.push(()),
        b"\x85": lambda m: m.push(m.pop_some(1)),
        b"\x86": lambda m: m.push(m.pop_some(2)),
        b"\x87": lambda m: m.push(m.pop_some(3)),
        b"t": lambda m: m.push(tuple(m.pop_mark())),
        b"a": lambda m: m.append([m.pop()]),
        b"e": lambda m: m.append(m.pop_mark()),
        b"s": lambda m: m.set_items(list(m.pop_some(2))),
        b"u": lambda m: m.set_items(m.pop_mark()),
        b"q": lambda m: m.remember(m.number(1)),
        b"r": lambda m: m.remember(m.number(4)),
        b"\x94": _Machine.memoize,
        b"h": lambda m: m.recall(m.number(1)),
        b"j": lambda m: m.recall(m.number(4)),
        b"c": lambda m: m.name(m.line(), m.line()),
        b"\x93": _Machine.stack_name,
        b"R": _Machine.reduce,
        b"\x81": _Machine.make,
        b"b": _Machine.build,
        b"Q": _Machine.refer,
    }.items()
}
