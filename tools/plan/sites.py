"""Find the line of isoloss or Megatron that asked for an op."""

import functools
import sys
from pathlib import Path

import megatron.core
import torch

import isoloss.engine
import isoloss.models
import isoloss.parallel

# Folders whose frames are named, and the names of their files in a report.
SOURCES = {
    str(Path(module.__path__[0])): f"isoloss/{module.__name__.split('.')[-1]}"
    for module in (isoloss.engine, isoloss.models, isoloss.parallel)
} | {str(Path(megatron.core.__path__[0])): "megatron/core"}
# Files that call an op on behalf of their callers.
TRANSPARENT = ("/cuda_stubs.py", "/fused.py", "/memory/live_bytes.py", "/memory/nowhere.py")


def site() -> str:
    """Return file:line of the innermost frame of isoloss or Megatron; in a backward with the node of autograd's graph,
    and that node alone in a thread of autograd."""
    node = torch._C._current_autograd_node()
    behind = f" {node.name()}" if node else ""
    frame = sys._getframe(1)
    while frame is not None:
        file = named(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}{behind}"
        frame = frame.f_back
    return f"torch{behind}"


@functools.cache
def named(path: str) -> str | None:
    """Return the name of a file in a report; None for a file that is not named."""
    for folder, title in SOURCES.items():
        if path.startswith(folder) and not path.endswith(TRANSPARENT):
            return title + path.removeprefix(folder)
    return None
