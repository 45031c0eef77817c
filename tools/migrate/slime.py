"""slime: a launch script, or the arguments of train.py; reinforcement learning, or supervised fine-tuning."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.tools.migrate import reading, slime_keys
from isoloss.tools.migrate.slime_rows import ROWS
from isoloss.tools.migrate.table import Source

SLIME = Source("slime", ROWS, slime_keys.KEYS, slime_keys.recipe, slime_keys.loss, slime_keys.before)
PROGRAMS = re.compile(r"(^|/)train(_async)?\.py$")


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """What is migrated, what it says, and what of it was not read."""
    variables, rest = reading.split_variables(words)
    script = reading.script(path, variables)
    given = reading.flags([*reading.arguments_of(script, PROGRAMS), *rest])
    return SLIME, given, script.unread
