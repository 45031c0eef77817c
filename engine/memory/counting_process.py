"""Ask another process to count memory: `counting` changes torch in the process that counts. Imports no torch itself."""

import atexit
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

COUNTING = "isoloss.engine.memory.counting"


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of this function of `counting`. Raises RuntimeError if it fails."""
    process = start()
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump((function, arguments), process.stdin)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError) as error:
        raise RuntimeError("the process that counts memory has ended; memory.check=false starts without it") from error
    if isinstance(answer, str):
        raise RuntimeError(f"memory could not be counted ({answer}); memory.check=false starts without it")
    return answer


@cache
def start() -> subprocess.Popen:
    """Start the process, once: it imports for seconds, in which the caller need not wait."""
    # The process sees no GPU. Backends of simulated groups warn that they have no hooks.
    changes = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # Not -m: classes of a module that runs as __main__ could not be read back here.
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import answer_questions; answer_questions()"]
    process = subprocess.Popen(command, env=os.environ | changes, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    return process


def answer_questions() -> None:
    """Answer until the process that asks has ended."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Megatron-Core prints
    importlib.import_module(COUNTING)
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = function(*arguments)
        except Exception as error:  # for the process that asks
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
