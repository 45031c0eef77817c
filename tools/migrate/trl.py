"""TRL: the YAML or JSON of the arguments of SFTConfig or GRPOConfig, as `trl sft --config` takes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.parallel import UserError
from isoloss.tools.migrate import reading, trl_grpo, trl_sft
from isoloss.tools.migrate.table import Source

COMMON = {row.key for row in trl_sft.ROWS}
OF_GRPO = {row.key for row in trl_grpo.ROWS if "*" not in row.key} - COMMON


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """What is migrated, what it says, and what of it was not read."""
    given = reading.mapping(path) if path is not None else {}
    named = {key.replace("-", "_"): value for key, value in (given | _added(words)).items()}
    return (trl_grpo.SOURCE if OF_GRPO & named.keys() else trl_sft.SOURCE), named, []


def _added(words: Sequence[str]) -> dict[str, Any]:
    """What stands after the file: key=value, or --key value as for `trl sft`."""
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if alone := [word for word in words[:at] if "=" not in word]:
        raise UserError(f"cannot read {alone[0]!r}; write key=value")
    return reading.assignments(words[:at]) | {
        name.removeprefix("--"): value for name, value in reading.flags(words[at:]).items()
    }
