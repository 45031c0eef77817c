"""Does a run fit its GPUs, and what will a step cost? From its configuration, without a GPU and without weights.

    python -m isoloss.tools.plan sft preset=8b_h100 model.path=DIR --gpus 8
    python -m isoloss.tools.plan sft preset=32b_h100 model.path=DIR --gpus 64 --gpu h200 --json plan.json
    python -m isoloss.tools.plan sft preset=32b_h100 model.path=DIR --gpus 64 --search --write my_32b
    python -m isoloss.tools.plan grpo preset=8b_h100 model.path=DIR rollout.servers=[URL] --gpus 8

The real Engine takes a step as one rank of every pipeline stage, on tensors that have shapes and no values. So memory
is counted, not guessed: rows are full (batch.max_tokens) and every token is a target. model.path needs no more than
config.json; with data.train also a tokenizer, and the rows of the file are planned too. Seconds are an estimate, from
the data sheet of the GPU. With --search every legal layout is ranked, by formulas of memory and time.
Exit status: 0 it fits, 1 it does not, 2 a mistake in the arguments or the configuration.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from isoloss.engine.config import Config
from isoloss.engine.device_memory import MARGIN
from isoloss.engine.rl.config import RLConfig
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.parallel import UserError
from isoloss.recipes.launch import compose_config, print_error_once
from isoloss.tools import command_line
from isoloss.tools.dryrun.data_file import plan_data
from isoloss.tools.dryrun.estimate import estimate
from isoloss.tools.dryrun.hardware import GPUS, Gpu
from isoloss.tools.dryrun.picture import draw
from isoloss.tools.dryrun.preset import write_preset
from isoloss.tools.dryrun.rollout_batch import estimate_batch
from isoloss.tools.dryrun.search import search
from isoloss.tools.dryrun.stages import dry_runs
from isoloss.tools.dryrun.tables import (
    batch_lines,
    data_table,
    exchange_table,
    fits,
    phase_table,
    search_table,
    stage_table,
    verdict,
)

RECIPES = {"sft": Config, "grpo": RLConfig, "dapo": RLConfig}
BEST = 5


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)  # keys may stand on both sides of an option
    try:
        if arguments.write is not None and not arguments.search:
            raise UserError(f"--write {arguments.write} writes what --search found: add --search")
        _check_files(arguments)
        config, _, preset = compose_config(arguments.recipe, RECIPES[arguments.recipe], arguments.overrides)
        arch = read_architecture(hf_folder(config.model.path))
        gpu = GPUS[arguments.gpu]
        print(f"{arguments.recipe} preset={preset} on {arguments.gpus} x {gpu.name}")
        if arguments.search:
            return _search(config, arch, arguments.gpus, gpu, arguments.recipe, arguments.write)
        return _plan(config, arch, gpu, arguments)
    except UserError as error:
        print_error_once(str(error))
        return 2


def parser() -> command_line.Parser:
    parser = command_line.parser("plan", __doc__)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run, over all nodes")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="default: %(default)s")
    server = "GPUs of one rollout server; default: the fewest that hold the weights with room for a cache"
    parser.add_argument("--server-gpus", type=int, choices=(1, 2, 4, 8), help=server)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was counted")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw memory by stage and phase, and the ranks"
    )
    parser.add_argument("--search", action="store_true", help=f"the {BEST} best layouts instead of the configured one")
    parser.add_argument("--write", metavar="NAME", help="with --search: make a preset of the best")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="preset=NAME and keys of the recipe")
    return parser


def _check_files(arguments: argparse.Namespace) -> None:
    """Before the minutes that a dry run may take."""
    for option in ("json", "picture"):
        file = getattr(arguments, option)
        if file is not None and not file.parent.is_dir():
            raise UserError(f"--{option}={file} must be a file in a folder that exists")
    if arguments.picture is not None and arguments.picture.suffix != ".png":
        raise UserError(f"--picture={arguments.picture} must end in .png")


def _plan(config: Config, arch: Architecture, gpu: Gpu, arguments: argparse.Namespace) -> int:
    layout = config.parallel.layout().with_world(arguments.gpus)
    data = plan_data(config, arch, layout) if config.data.train else None
    stages = dry_runs(arguments.recipe, arguments.overrides, layout)
    step = estimate(config, arch, layout, stages, gpu)
    batch = None
    if isinstance(config, RLConfig):
        batch = estimate_batch(config, arch, layout, stages, step, gpu, arguments.server_gpus)
    fitting = all(fits(report, gpu) for report in stages)
    if arguments.json is not None:
        plan = {"gpu": asdict(gpu), "margin": MARGIN, "fits": fitting, "estimate": asdict(step)}
        plan |= {"batch": batch and asdict(batch), "data": data and asdict(data)}
        text = json.dumps(plan | {"stages": [asdict(report) for report in stages]}, indent=1)
        arguments.json.write_text(text + "\n")
    if arguments.picture is not None:
        draw(stages, layout, gpu, arguments.picture)
    print(f"layout {layout}\n{stage_table(stages, gpu)}\n{phase_table(stages, gpu)}\n{exchange_table(stages)}")
    if data is not None:
        print(data_table(data, config, layout))
    print(verdict(step, config, fitting=fitting))
    if batch is not None:
        print(batch_lines(batch))
    return 0 if fitting else 1


def _search(config: Config, arch: Architecture, gpus: int, gpu: Gpu, recipe: str, name: str | None) -> int:
    found = search(config, arch, gpus, gpu)
    if not found:
        print("no layout fits: take more GPUs, or a lower data.max_length")
        return 1
    print(search_table(found[:BEST]))
    if name is not None:
        print(f"wrote {write_preset(recipe, name, found[0])}: preset={name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
