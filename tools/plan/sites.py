"""Who asked for what a device does: file:line of isoloss or Megatron."""

import functools
import sys
from pathlib import Path

import megatron.core
import torch

import isoloss.engine
import isoloss.models
import isoloss.parallel

# Folders whose frames are named, and what their files are called in a report.
SOURCES = {
    str(Path(module.__path__[0])): f"isoloss/{module.__name__.split('.')[-1]}"
    for module in (isoloss.engine, isoloss.models, isoloss.parallel)
} | {str(Path(megatron.core.__path__[0])): "megatron/core"}
# They hand on what others ask for.
TRANSPARENT = ("/cuda_stubs.py", "/fused.py")


def site() -> str:
    """file:line of the innermost frame of isoloss or Megatron; in a backward also the node of autograd's graph, alone
    where a thread of autograd's own runs it."""
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
    """What a report calls a file; None for one that is not named."""
    for folder, title in SOURCES.items():
        if path.startswith(folder) and not path.endswith(TRANSPARENT):
            return title + path.removeprefix(folder)
    return None
