"""Load functions that a user names, `module:function` or `file.py:function`: rewards, losses, advantages.

This module imports the standard library alone: reward workers load this file by its path, without isoloss.
"""

import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any


class NotFoundError(Exception):
    """A function that cannot be loaded. Its message ends the sentence "reward.function=NAME ..."."""


def load(function: str) -> Callable[..., Any]:
    """Import and return the function of that name. Raises NotFoundError."""
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
    """Run a file, once for all its functions, and return its module."""
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


# Files whose lines are left out of what a user reads.
PRODUCT = {__file__, *(os.path.join(os.path.dirname(__file__), room, "worker.py") for room in ("reward", "agents"))}


def reason(error: BaseException) -> str:
    """Return one line: the exception, and the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in PRODUCT]
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
