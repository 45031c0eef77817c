"""Convert checkpoints between Hugging Face and Megatron-Core, and adapters (LoRA), without a GPU.

    python -m isoloss.tools.convert hf-to-mcore --hf DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR --hf DIR --keep-unused
    python -m isoloss.tools.convert export-adapter --checkpoint DIR --out DIR
    python -m isoloss.tools.convert import-adapter --adapter DIR --hf DIR --out DIR
    python -m isoloss.tools.convert merge --hf DIR --adapter DIR --out DIR [--verify]

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
from typing import Any

from isoloss.parallel import UserError
from isoloss.tools import command_line

DTYPES = ("bf16", "fp16", "fp32")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from isoloss.models.conversion.transfer import AGAIN  # these take seconds: help and a mistake do not wait for them
    from isoloss.tools.convert import adapters, commands
    from isoloss.tools.convert.verify_models import Unverified

    try:
        getattr(adapters if hasattr(adapters, arguments.command) else commands, arguments.command)(arguments)
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
    _add_adapters(commands)
    return parser


def _add_adapters(commands: Any) -> None:
    command = commands.add_parser(
        "export-adapter",
        help="a checkpoint of an adapter into a folder that PEFT, transformers and servers load",
        description="Write the adapter (LoRA) in a checkpoint of isoloss, saved at any layout, as PEFT does.",
    )
    which = "the checkpoint, or the folder of a run: then its newest one"
    command.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help=which)
    base = "folder of the model that it was trained on, for the name of the base and those of tensors"
    command.add_argument("--hf", type=Path, metavar="DIR", help=base)
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new folder; must not exist yet")
    command.set_defaults(command="export_adapter")
    command = commands.add_parser(
        "import-adapter",
        help="an adapter that PEFT wrote, checked against its model, into isoloss's form, with the keys to train it on",
        description="Check an adapter (LoRA) of PEFT against its model, write it as isoloss exports it, with the names "
        "of the model's files, and print the keys with which a run starts from it.",
    )
    command.add_argument("--adapter", required=True, type=Path, metavar="DIR", help="the folder of the adapter")
    command.add_argument("--hf", required=True, type=Path, metavar="DIR", help="the folder of its model")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new folder; must not exist yet")
    command.set_defaults(command="import_adapter")
    command = commands.add_parser(
        "merge",
        help="add an adapter to its model: a Hugging Face folder of the sum",
        description="Add an adapter (LoRA) to its model, tensor by tensor: summed in fp64 and rounded once, to the "
        "type of each tensor. All other tensors, config.json and tokenizer are copied.",
    )
    command.add_argument("--hf", required=True, type=Path, metavar="DIR", help="the folder of the model")
    command.add_argument("--adapter", required=True, type=Path, metavar="DIR", help="the folder of the adapter")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new folder; must not exist yet")
    _add_common(command)
    command.set_defaults(command="merge")


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
