"""verl: a YAML file, a launch script, or overrides; reinforcement learning or supervised fine-tuning."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.tools.migrate import reading, verl_rl, verl_sft
from isoloss.tools.migrate.table import Source
from isoloss.tools.migrate.verl_rl_rows import ROWS

REINFORCEMENT = Source("verl", ROWS, verl_rl.KEYS, verl_rl.recipe, verl_rl.loss, verl_rl.before, verl_rl.past)
PROGRAMS = re.compile(r"(verl\.trainer\.\w*|main_ppo\w*|main_dapo|sft_trainer\w*)(\.py)?$")


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """What is migrated, what it says, and what of it was not read."""
    choices = frozenset(row.key for row in (*ROWS, *verl_sft.ROWS) if "." not in row.key)
    variables, overrides = reading.split_variables(words, choices)
    if path is not None and path.suffix in (".yaml", ".yml", ".json"):
        given, unread = reading.flattened(reading.mapping(path)), []
    else:
        script = reading.script(path, variables)
        given, unread = reading.assignments(reading.arguments_of(script, PROGRAMS)), script.unread
    given |= reading.assignments(overrides)
    fine_tuning = not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in given)
    return (verl_sft.SOURCE if fine_tuning else REINFORCEMENT), given, unread
