"""Plan whether a run fits its GPUs, and the time of a step, from its configuration, without a GPU or weights.

    python -m isoloss.tools.plan sft preset=8b_h100 model.path=DIR --gpus 8
    python -m isoloss.tools.plan sft preset=32b_h100 model.path=DIR --gpus 64 --gpu h200 --json plan.json
    python -m isoloss.tools.plan sft preset=32b_h100 model.path=DIR --gpus 64 --search --write my_32b
    python -m isoloss.tools.plan grpo preset=8b_h100 model.path=DIR rollout.servers=[URL] --gpus 8

The real Engine takes a step as one rank of every pipeline stage, on tensors that have shapes and no values. So memory
is counted, not guessed: rows are full (batch.max_tokens) and every token is a target. model.path needs no more than
config.json; with data.train also a tokenizer, and the rows of the file are planned too. Seconds are an estimate, from
the data sheet of the GPU. With --search every legal layout is ranked, by one counted layer of each kind and a formula
of time.
Exit status: 0 it fits, 1 it does not, 2 a mistake in the arguments or the configuration.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from isoloss.engine.memory import counting_process
from isoloss.parallel import UserError
from isoloss.recipes.command_line import refuse_repeated
from isoloss.recipes.launch import RECIPES, compose_config, print_error_once
from isoloss.tools import command_line
from isoloss.tools.plan.hardware import GPUS


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)  # keys may stand on both sides of an option
    try:
        if arguments.gpus < 1:
            raise UserError(f"--gpus {arguments.gpus} must be at least 1")
        if argv is None:
            refuse_repeated(RECIPES[arguments.recipe].config, arguments.overrides)
        if arguments.write is not None and not arguments.search:
            raise UserError(f"--write {arguments.write} writes what --search found: add --search")
        _check_files(arguments)
        config, _, preset = compose_config(arguments.recipe, RECIPES[arguments.recipe].config, arguments.overrides)
        config.refuse_adapter()
        if arguments.search:
            counting_process.start()
        from isoloss.tools.plan import plans  # its import takes seconds: help and a mistake do not wait for it

        print(f"{arguments.recipe} preset={preset} on {arguments.gpus} x {GPUS[arguments.gpu].name}")
        return plans.search(config, arguments) if arguments.search else plans.plan(config, arguments)
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
    parser.add_argument("--search", action="store_true", help="the best layouts instead of the configured one")
    parser.add_argument(
        "--write",
        metavar="NAME",
        help="with --search: make a preset of the best, or with NAME.yaml a file for config=NAME.yaml",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="preset=NAME, config=FILE and keys of the recipe"
    )
    return parser


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse a bad path before the dry run, which may take minutes."""
    for option in ("json", "picture"):
        file = getattr(arguments, option)
        if file is not None and not file.parent.is_dir():
            raise UserError(f"--{option}={file} must be a file in a folder that exists")
    if arguments.picture is not None and arguments.picture.suffix != ".png":
        raise UserError(f"--picture={arguments.picture} must end in .png")


if __name__ == "__main__":
    sys.exit(main())
