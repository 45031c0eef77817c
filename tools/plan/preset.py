"""Write a candidate of a search as a preset."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from isoloss.engine.config.parse import defaults
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.limits import GIB
from isoloss.parallel import UserError
from isoloss.recipes.launch import CONF
from isoloss.tools.plan.search import Candidate

OF_THE_RUN = ("model", "output_dir")  # and the data files: a preset does not set them


def write_preset(recipe: str, name: str, candidate: Candidate) -> Path:
    """Write every key whose value is not the default. Raises UserError if a preset of this name exists."""
    file = CONF / recipe / "preset" / f"{name}.yaml"
    if file.exists():
        raise UserError(f"--write {name}: {file} exists; choose another name, or delete it")
    layout, peak = candidate.layout, max(candidate.peaks) / GIB
    head = (
        "# @package _global_\n# Found by isoloss.tools.plan --search, by formulas of memory and time; not run:\n"
        f"# {layout.world_size} GPUs, {layout}: {peak:.1f} GiB, {candidate.seconds:.1f} s a step\n"
    )
    file.write_text(head + yaml.safe_dump(_changed(candidate.config), sort_keys=False))
    return file


def _changed(config: Config) -> dict[str, Any]:
    plain = defaults(type(config))
    changed: dict[str, Any] = {}
    for group, values in asdict(config).items():
        if group in OF_THE_RUN or not isinstance(values, dict):
            continue
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if group == "data":
            listed = {key: value for key, value in listed.items() if key not in ("train", "eval")}
        different = {key: value for key, value in listed.items() if value != plain[group][key]}
        if different:
            changed[group] = different
    return changed
