"""Write a candidate of a search as a preset, or as a configuration file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from isoloss.engine.config.config_file import dump
from isoloss.engine.config.parse import defaults
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.limits import GIB
from isoloss.parallel import UserError
from isoloss.recipes.command_line import CONFIG_ENDINGS
from isoloss.recipes.launch import CONF
from isoloss.tools.plan.search import Candidate

OF_THE_RUN = ("model", "output_dir")  # and the data files: a preset does not set them


def write_preset(recipe: str, name: str, candidate: Candidate) -> tuple[Path, str]:
    """Write every key whose value is not the default. Return the file, and the word of a command line that names it.

    name: name of a preset, or of a file that ends in .yaml. Raises UserError if it exists or cannot be written.
    """
    is_file = name.endswith(CONFIG_ENDINGS)
    file = Path(name) if is_file else CONF / recipe / "preset" / f"{name}.yaml"
    if file.exists():
        raise UserError(f"--write {name}: {file} exists; choose another name, or delete it")
    layout, peak = candidate.layout, max(candidate.peaks) / GIB
    head = (
        "# @package _global_\n# Found by isoloss.tools.plan --search, by formulas of memory and time; not run:\n"
        f"# {layout.world_size} GPUs, {layout}: {peak:.1f} GiB, {candidate.seconds:.1f} s a step\n"
    )
    try:
        file.write_text(head + dump(_changed(candidate.config)))
    except OSError as error:
        hint = "" if is_file else f", or a file of your own: --write {name}.yaml"
        raise UserError(f"--write {name}: {file}: {error.strerror}; name another{hint}") from None
    return file, f"config={name}" if is_file else f"preset={name}"


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
