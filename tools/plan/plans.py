"""Print and write the results of `isoloss.tools.plan`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from isoloss.engine.config.parse import defaults
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.limits import GIB, room
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.parallel import UserError
from isoloss.recipes.launch import CONF
from isoloss.tools.plan.advice import to_fit
from isoloss.tools.plan.data_file import plan_data
from isoloss.tools.plan.estimate import estimate
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.picture import draw
from isoloss.tools.plan.rollout_batch import estimate_batch
from isoloss.tools.plan.search import Candidate
from isoloss.tools.plan.search import search as best_layouts
from isoloss.tools.plan.stages import dry_runs
from isoloss.tools.plan.tables import (
    batch_lines,
    data_table,
    estimate_lines,
    exchange_table,
    fits,
    phase_table,
    search_table,
    stage_table,
)

BEST = 5  # layouts that are printed
OF_THE_RUN = ("model", "output_dir")  # and the data files: a preset does not set them


def plan(config: Config, arguments: argparse.Namespace) -> int:
    """Plan the configured layout. Return the exit status."""
    arch, gpu = read_architecture(hf_folder(config.model.path)), GPUS[arguments.gpu]
    layout = config.parallel.layout().with_world(arguments.gpus)
    data = plan_data(config, arch, layout) if config.data.train else None
    stages = dry_runs(arguments.recipe, arguments.overrides, layout)
    step = estimate(config, arch, layout, stages, gpu)
    batch = None
    if isinstance(config, RLConfig):
        batch = estimate_batch(config, arch, layout, stages, step, gpu, arguments.server_gpus)
    fitting = all(fits(report, config, gpu) for report in stages)
    if arguments.json is not None:
        plan = {"gpu": asdict(gpu), "room": room(config, gpu.memory), "fits": fitting, "estimate": asdict(step)}
        plan |= {"batch": batch and asdict(batch), "data": data and asdict(data)}
        text = json.dumps(plan | {"stages": [asdict(report) for report in stages]}, indent=1)
        arguments.json.write_text(text + "\n")
    if arguments.picture is not None:
        model = Path(config.model.path).resolve().name
        subject = f"{arguments.recipe} of {model} on {arguments.gpus} x {gpu.name}"
        draw(stages, layout, room(config, gpu.memory), subject, arguments.picture)
    print(f"layout {layout}\n{stage_table(stages, config, gpu)}\n{phase_table(stages, gpu)}\n{exchange_table(stages)}")
    if data is not None:
        print(data_table(data, config, layout))
    print(estimate_lines(step, config))
    if not fitting:
        print(to_fit(config, arch, layout, gpu))
    if batch is not None:
        print(batch_lines(batch))
    return 0 if fitting else 1


def search(config: Config, arguments: argparse.Namespace) -> int:
    """Find the best layouts. Return the exit status."""
    arch = read_architecture(hf_folder(config.model.path))
    found = best_layouts(config, arch, arguments.gpus, GPUS[arguments.gpu])
    if not found:
        print("no layout fits: take more GPUs, or a lower data.max_length")
        return 1
    print(search_table(found[:BEST]))
    if arguments.write is not None:
        file = write_preset(arguments.recipe, arguments.write, found[0])
        print(f"wrote {file}: preset={arguments.write}")
    return 0


def write_preset(recipe: str, name: str, candidate: Candidate) -> Path:
    """Write every key whose value is not the default. Raises UserError if a preset of this name exists."""
    file = CONF / recipe / "preset" / f"{name}.yaml"
    if file.exists():
        raise UserError(f"--write {name}: {file} exists; choose another name, or delete it")
    layout, peak = candidate.layout, max(candidate.peaks) / GIB
    head = (
        "# @package _global_\n# Found by isoloss.tools.plan --search, by estimates of memory and time; not run:\n"
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
