"""The script that calls reward functions, run by its path: python worker.py CONNECTION ANSWERS

It imports the standard library alone, and what the functions import: importing `isoloss.engine` would bring torch and
Megatron-Core with it, hundreds of megabytes and seconds for each worker.

The parent sends, over CONNECTION, sys.path and the functions, FILE.py:NAME or MODULE:NAME. The worker answers with the
parameters of each function, or why it cannot be loaded. Then the parent sends calls, (number of the function, keyword
arguments, batched), and each is answered by a number or, as text, what was wrong; a batched one by a list of those and
None, or by text. An answer is a line of JSON on ANSWERS: the parent makes nothing else of what this process, which runs
anybody's code, sends.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# By its path: the package around it would bring torch.
_spec = importlib.util.spec_from_file_location("user_functions", Path(__file__).parents[1] / "user_functions.py")
assert _spec is not None and _spec.loader is not None
user_functions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(user_functions)


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """(name, kind, required) of each."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        raise user_functions.NotFoundError("does not tell its parameters: wrap it in a function of your own") from None
    return [(each.name, each.kind.name, each.default is each.empty) for each in found]


def describe(function: str, functions: list[Callable[..., Any]]) -> list[list[Any]] | str:
    try:
        functions.append(user_functions.load(function))
    except user_functions.NotFoundError as error:
        return str(error)
    return described(functions[-1])


def described(function: Callable[..., Any]) -> list[list[Any]] | str:
    """Return the parameters of a function, or why they are unknown."""
    try:
        return [list(each) for each in parameters(function)]
    except user_functions.NotFoundError as error:
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
        return user_functions.reason(error)


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


def send(answers: int, answer: Any) -> None:
    line = memoryview(json.dumps(answer).encode() + b"\n")
    while line:
        line = line[os.write(answers, line) :]


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # lines appear when they are printed, and whole
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    descriptor, answers, own = int(sys.argv[1]), int(sys.argv[2]), os.getpid()
    for each in (descriptor, answers):
        os.set_inheritable(each, False)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent may be gone
        sys.path[:], names = connection.recv()
        functions: list[Callable[..., Any]] = []
        send(answers, [describe(name, functions) for name in names])
        while True:
            index, arguments, batched = connection.recv()
            answer = call(functions[index], arguments, batched)
            if os.getpid() != own:  # a fork that the function made came back from it: its answer would be one too many
                os._exit(0)
            send(answers, answer)


if __name__ == "__main__":
    main()
