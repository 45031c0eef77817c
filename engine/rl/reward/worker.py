"""The script that calls reward functions, run by its path: python worker.py CONNECTION

It imports the standard library alone, and what the functions import: importing `isoloss.engine` would bring torch and
Megatron-Core with it, hundreds of megabytes and seconds for each worker.

The parent sends sys.path and the functions, FILE.py:NAME or MODULE:NAME, and is told of each its parameters, or why it
cannot be had. Then it sends calls, (number of the function, keyword arguments, batched), and each is answered by a
number or, as text, what was wrong; a batched one by a list of those and None, or by text.
"""

import asyncio
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any


class NotFoundError(Exception):
    """Ends the sentence "reward.function=NAME ..."."""


def load(function: str) -> Callable[..., Any]:
    """The function of that name. Raises NotFoundError."""
    target, _, name = function.rpartition(":")
    try:
        module = load_file(target) if target.endswith(".py") else importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and (target == error.name or target.startswith(error.name + ".")):
            raise NotFoundError(
                f"names a module that is not there ({error.name}): correct it, or put its folder on PYTHONPATH"
            ) from None
        raise NotFoundError(f"cannot be imported: {reason(error)}") from None
    except NotFoundError:
        raise
    except Exception as error:
        raise NotFoundError(f"cannot be imported: {reason(error)}") from None
    found = getattr(module, name, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, public, n=3, cutoff=0.5) or public[:5]
        has = f"did you mean {' or '.join(close)}?" if close else "it has no functions"
        raise NotFoundError(f"names no function of {target}: {has}")
    return found


@functools.cache
def load_file(path: str) -> ModuleType:
    """Run once for all the functions that are wanted of it."""
    if not os.path.isfile(path):
        raise NotFoundError(f"names a file that is not there, seen from {os.getcwd()}: correct the path")
    # Its own name might be that of a library: a file math_verify.py would hide the real one.
    name = "reward_file_" + os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """(name, kind, required) of each."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        raise NotFoundError("does not tell its parameters: wrap it in a function of your own") from None
    return [(each.name, each.kind.name, each.default is each.empty) for each in found]


def describe(function: str, functions: list[Callable[..., Any]]) -> list[tuple[str, str, bool]] | str:
    try:
        functions.append(load(function))
        return parameters(functions[-1])
    except NotFoundError as error:
        return str(error)


def call(function: Callable[..., Any], arguments: dict[str, Any], batched: bool) -> float | str | list:
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        if not batched:
            return number(result)
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            return f"returned {shown(result)}, not a list of numbers"
        return [None if value is None else number(value) for value in result]
    except Exception as error:  # whatever it is, it is the answer to this call
        return reason(error)


async def awaited(result: Any) -> Any:
    return await result


def number(value: Any) -> float | str:
    """The reward, or what is wrong with it. verl's functions may give a mapping with `score`."""
    score: Any = value["score"] if isinstance(value, Mapping) and "score" in value else value
    try:
        found = math.nan if isinstance(score, str | bytes) else float(score)
    except (TypeError, ValueError):
        found = math.nan
    return found if math.isfinite(found) else f"returned {shown(value)}, not a finite number"


def shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def reason(error: BaseException) -> str:
    """One line: the exception, and the line of code that it comes from."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


def main() -> None:
    descriptor, own = int(sys.argv[1]), os.getpid()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent may be gone
        sys.path[:], names = connection.recv()
        functions: list[Callable[..., Any]] = []
        connection.send([describe(name, functions) for name in names])
        while True:
            index, arguments, batched = connection.recv()
            answer = call(functions[index], arguments, batched)
            if os.getpid() != own:  # a fork that the function made came back from it: its answer would be one too many
                os._exit(0)
            connection.send(answer)


if __name__ == "__main__":
    main()
