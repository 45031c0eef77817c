"""A chat template is a program of somebody else: it is tried in a process with limits before it renders rows."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

SCRIPT = Path(__file__).with_name("template_render.py")
SECONDS, MEMORY, TEXT = 10, 1 << 30, 64 << 20  # of a processor; bytes; characters that it may make of a few words
PATIENCE = 600.0  # on a machine that is busy, for so many seconds of a processor


def try_templates(texts: Iterable[str], folder: str) -> None:
    """UserError where one of these templates takes more than SECONDS, MEMORY or TEXT for a conversation of a few words.
    What else is wrong with it shows where a row is rendered."""
    for text in texts:
        if exceeded := _exceeded(text):
            raise UserError(
                f"tokenizer: {folder}: its chat template takes {exceeded} for a conversation of a few words: copy it "
                "again from the model's source, and do not use it if it is the same there"
            )


@cache
def _exceeded(text: str) -> str | None:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        limits = [str(each) for each in (SECONDS, MEMORY, TEXT)]
        helper = Helper(
            [sys.executable, "-I", str(SCRIPT), str(file.fileno()), *limits],
            stdout=subprocess.DEVNULL,
            pass_fds=[file.fileno()],
            env=environment.of_other_programs(),
        )
        try:
            status = helper.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            helper.kill()
    if status == 0:
        return None
    if status == os.EX_SOFTWARE:
        return f"more than {MEMORY >> 30} GiB of memory, or makes more than {TEXT >> 20} MiB of text,"
    return f"more than {SECONDS} seconds" if status < 0 else None
