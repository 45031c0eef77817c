"""Prove, on your data and configuration, that the loss and gradients of a step do not depend on the layout.

    python -m isoloss.tools.prove --layouts "tp2,pp2,ulysses2,dp2,tp2+pp2+ring2"
    python -m isoloss.tools.prove --layouts dp2,tp2 model.path=DIR data.train=FILE batch.global_size=64
    python -m isoloss.tools.prove --layouts dp2,ring2 --loss clip algorithm.kl_coef=0.1
    python -m isoloss.tools.prove --serve --kills 50

One global batch runs under the reference layout (one rank, one micro-batch) and under every asked layout, in one
micro-batch a rank, in about three, and one sample at a time. Loss, gradient norm and every parameter's gradient must
agree up to rounding; the certificate is proof.json, a table and a picture, and says of every claim which runs exercised
it. `--plant BUG` plants a known bug, and the proof must then fail where the bug shows.
`--serve` plays a recorded session of training clients against isoloss-serve instead: over the layouts, against a loop
over the engine, with other clients at the same time, and with answers lost and processes killed.
Exit status: 0 every claim proved, 1 not, 2 a mistake in the arguments, the configuration or the data. With a planted
bug: 1 it is caught where it shows, 3 it is missed, or a run fails in which it does not show.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isoloss.engine.config.schema import Config
from isoloss.engine.rl.algorithms import LOSSES, loss_of
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout, UserError
from isoloss.recipes.command_line import refuse_repeated
from isoloss.recipes.launch import compose_config, print_error_once
from isoloss.tools import command_line

if TYPE_CHECKING:
    from isoloss.tools.prove.rank_pool import WorkerPool

LAYOUTS = "tp2,pp2,ulysses2,dp2,tp2+pp2+ring2"
OF_STEPS = ("budgets", "aggregations", "loss", "plant")
OF_SERVERS = ("kills", "seed")


def main(argv: Sequence[str] | None = None, pool: "WorkerPool | None" = None) -> int:
    """Run the command. pool: runs the ranks; default one of its own."""
    arguments = parser().parse_intermixed_args(argv)  # keys may stand on both sides of an option
    try:
        for override in arguments.overrides:
            if override.startswith("output_dir="):
                raise UserError(f"{override} is the folder of a run; --out {override[11:]} is that of the certificate")
        if arguments.serve:
            refuse_options(arguments, OF_STEPS, "is of the proof of a step: leave it out with --serve")
            from isoloss.tools.prove.serve import proof as proof_of_servers

            return proof_of_servers.run(arguments)
        refuse_options(arguments, OF_SERVERS, "is of the proof of isoloss-serve: add --serve")
        if argv is None:
            refuse_repeated(RLConfig, arguments.overrides)
        layouts = [Layout.parse(text) for text in (arguments.layouts or LAYOUTS).split(",")]
        config = configuration(arguments.loss, arguments.overrides)
        from isoloss.tools.prove import proof  # its import takes seconds: help and a mistake do not wait for it

        return proof.run(arguments, config, layouts, pool)
    except UserError as error:
        print_error_once(str(error))
        return 2


def parser() -> command_line.Parser:
    parser = command_line.parser("prove", __doc__)
    parser.add_argument("--layouts", help=f"layouts, separated by commas; default {LAYOUTS}")
    parser.add_argument(
        "--budgets",
        type=token_budgets,
        help="token budgets of a micro-batch, 0: all in one; default, from the data: one micro-batch, about three, one "
        "sample each",
    )
    parser.add_argument("--aggregations", help="aggregation modes; default loss.aggregation")
    parser.add_argument(
        "--loss",
        metavar="LOSS",
        help=f"a policy loss ({', '.join(LOSSES)}, file.py:function) instead of cross-entropy, with made-up advantages "
        "and log-probabilities of older policies; the keys algorithm.* go with it",
    )
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp64")
    parser.add_argument("--plant", metavar="BUG", help="a known bug to plant; a wrong name lists the right ones")
    parser.add_argument(
        "--serve", action="store_true", help="prove isoloss-serve; the keys are those of isoloss-serve then"
    )
    parser.add_argument("--kills", type=int, help="with --serve: times that processes get SIGKILL; default 3")
    parser.add_argument("--seed", type=int, help="with --serve: seed of the session and of the kills; default 0")
    parser.add_argument(
        "--out", type=Path, help="folder of the certificate; default runs/proof, runs/proof-BUG or runs/proof-serve"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="preset=NAME and keys of the sft recipe")
    return parser


def refuse_options(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UserError where an option is given that this proof does not read."""
    for name in names:
        if (given := getattr(arguments, name)) is not None:
            raise UserError(f"--{name} {given} {why}")


def token_budgets(text: str) -> list[int]:
    """Parse whole numbers. argparse reports a ValueError in one line."""
    return [int(budget) for budget in text.split(",")]


def configuration(loss: str | None, overrides: Sequence[str]) -> Config:
    """Compose the configuration of the sft recipe; for a policy loss with the keys of reinforcement learning."""
    only = loss_of(loss).aggregation if loss else None
    policy = [f"algorithm.loss={loss}"] if loss else []
    fitting = [f"loss.aggregation={only}"] if only else []
    return compose_config("sft", RLConfig if loss else Config, [*policy, *fitting, *overrides])[0]


if __name__ == "__main__":
    sys.exit(main())
