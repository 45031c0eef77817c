"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU.

    python -m isoloss.tools.convert hf-to-mcore --hf DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR --hf DIR --keep-unused

--dry-run prints what would be done. Files are written by several threads, under a temporary name next to --out that
is renamed at the end: --out is absent or complete. A run that was interrupted goes on where it was when it is started
again with the same arguments.
--verify then reads everything back, compares every tensor bit by bit and, with the whole model in memory, the logits
with those of transformers. A conversion that passes is certified: conversion.json in --out says "verified": true. An
--out that exists already, from a run without --verify, is verified as it is.
Exit status: 0 done, 1 written but found wrong by --verify, 2 a mistake in the arguments or the files, in one line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from isoloss.parallel import UserError
from isoloss.tools import command_line

DTYPES = ("bf16", "fp16", "fp32")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from isoloss.models.conversion.transfer import AGAIN  # these take seconds: help and a mistake do not wait for them
    from isoloss.tools.convert import commands as conversions
    from isoloss.tools.convert.verify_models import Unverified

    try:
        getattr(conversions, arguments.command)(arguments)
        return 0
    except Unverified as error:
        print(f"isoloss: not verified: {error}; do not use {arguments.out}", file=sys.stderr)
        return 1
    except (UserError, OSError) as error:
        return command_line.tell_mistake(error)
    except KeyboardInterrupt:
        print(f"isoloss: interrupted; {AGAIN}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser("convert", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "hf-to-mcore",
        help="a Hugging Face folder into a Megatron-Core checkpoint, for any tensor, pipeline and expert parallelism",
        description="Convert a Hugging Face folder (config.json and safetensors) into a Megatron-Core checkpoint in "
        "the torch_dist format. It fits every layout: load it with any tensor, pipeline and expert parallelism.",
    )
    command.add_argument("--hf", required=True, type=Path, metavar="DIR", help="the Hugging Face folder")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the checkpoint; must not exist yet")
    command.add_argument("--dtype", choices=DTYPES, help="type of the weights; default: as they are stored")
    _add_common(command)
    command.set_defaults(command="hf_to_mcore")
    command = commands.add_parser(
        "mcore-to-hf",
        help="a checkpoint of isoloss or of plain Megatron-Core into a Hugging Face folder",
        description="Convert a torch_dist checkpoint, of isoloss or of plain Megatron-Core, saved at any layout, into "
        "a Hugging Face folder. The optimizer's state is passed over, the rows that pad the vocabulary are left out.",
    )
    which = "the checkpoint, or the folder of a run of isoloss, Megatron-LM or Megatron-Bridge: then its newest one"
    command.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help=which)
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new folder; must not exist yet")
    config = "folder to take config.json, tokenizer and names of files from; default: huggingface/ in the checkpoint"
    command.add_argument("--hf", type=Path, metavar="DIR", help=config)
    kept = "type of the weights; default: as in the files of --hf, else as config.json says or as they were converted"
    command.add_argument("--dtype", choices=DTYPES, help=kept)
    unused = "copy every other tensor of --hf as it is: a vision tower, layers for multi-token prediction"
    command.add_argument("--keep-unused", action="store_true", help=unused)
    _add_common(command)
    command.set_defaults(command="mcore_to_hf")
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=_positive, metavar="N", help="threads that write; default: two a core")
    command.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    command.add_argument("--verify", action="store_true", help="compare what was written with what it was made from")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
