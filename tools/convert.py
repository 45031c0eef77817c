"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU.

    python -m isoloss.tools.convert hf-to-mcore --hf DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR [--dtype bf16] [--verify]

--dry-run prints what would be done. Files are written by several processes, under a temporary name beside --out that is
renamed at the end: --out is absent or complete. A run that was interrupted goes on where it was when it is started
again with the same arguments.
--verify then reads everything back, compares every tensor bit by bit and, with the whole model in memory, the logits
with those of transformers. What stands the test is certified: conversion.json in --out says "verified": true. An --out
that is there already, from a run without --verify, is verified as it is.
Exit status: 0 done, 1 written but found wrong by --verify, 2 a mistake in the arguments or the files; told in one line.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from isoloss.models.conversion import certificate, hf_to_mcore, transfer
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.weights import manifest
from isoloss.models.weights.distcp import METADATA
from isoloss.parallel import UserError
from isoloss.tools.verify import verify_export, verify_import
from isoloss.tools.verify_logits import LogitsEvidence
from isoloss.tools.verify_models import Unverified

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
        return 0
    except Unverified as error:
        print(f"isoloss: not verified: {error}; do not use {arguments.out}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"isoloss: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"isoloss: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"isoloss: interrupted; {transfer.AGAIN}", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"isoloss: error: {message}; --help tells more\n")


def _parser() -> argparse.ArgumentParser:
    prog, as_written = "python -m isoloss.tools.convert", argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "hf-to-mcore",
        help="a Hugging Face folder into a Megatron-Core checkpoint, for any tensor, pipeline and expert parallelism",
        description="Convert a Hugging Face folder (config.json and safetensors) into a Megatron-Core checkpoint in "
        "the torch_dist format. It fits every layout: load it with any tensor, pipeline and expert parallelism.",
    )
    command.add_argument("--hf", required=True, type=Path, metavar="DIR", help="the Hugging Face folder")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the checkpoint; must not exist yet")
    command.add_argument("--dtype", choices=sorted(DTYPES), help="type of the weights; default: as they are stored")
    _add_common(command)
    command.set_defaults(command=_hf_to_mcore)
    command = commands.add_parser(
        "mcore-to-hf",
        help="a checkpoint of isoloss or of plain Megatron-Core into a Hugging Face folder",
        description="Convert a torch_dist checkpoint, of isoloss or of plain Megatron-Core, saved at any layout, into "
        "a Hugging Face folder. The optimizer's state is passed over, the rows that pad the vocabulary are left out.",
    )
    command.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="the checkpoint")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new folder; must not exist yet")
    config = "folder to take config.json, tokenizer and names of files from; default: huggingface/ in the checkpoint"
    command.add_argument("--hf", type=Path, metavar="DIR", help=config)
    kept = "type of the weights; default: the one of config.json, or for a converted checkpoint as they are stored"
    command.add_argument("--dtype", choices=sorted(DTYPES), help=kept)
    _add_common(command)
    command.set_defaults(command=_mcore_to_hf)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=_positive, metavar="N", help="processes that copy; default: two a core")
    command.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    command.add_argument("--verify", action="store_true", help="compare what was written with what it was made from")


def _hf_to_mcore(arguments: argparse.Namespace) -> None:
    _check_folder("--hf", arguments.hf, "config.json")
    _check_target(arguments, manifest.NAME)
    plan = hf_to_mcore.plan(arguments.hf, DTYPES.get(arguments.dtype))
    print(
        f"{arguments.hf}: {plan.arch.family}, {plan.num_source_tensors} tensors used, {len(plan.left_out)} left out\n"
        f"{arguments.out}: {plan.num_tensors} tensors, {', '.join(plan.dtypes)}, {plan.style.value} keys, "
        f"{len(plan.transfer.files) + 1} files, {plan.transfer.nbytes:,} bytes"
    )
    for name in plan.left_out:
        print(f"  left out: {name}")
    if arguments.dry_run:
        _print_files(plan.transfer)
        return
    _write(plan.transfer, arguments, "hf-to-mcore")
    if arguments.verify:
        dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
        _tell(verify_import(arguments.hf, arguments.out, dtype), arguments.out)


def _mcore_to_hf(arguments: argparse.Namespace) -> None:
    _check_folder("--checkpoint", arguments.checkpoint, METADATA)
    if arguments.hf:
        _check_folder("--hf", arguments.hf, "config.json")
    _check_target(arguments, certificate.NAME)
    export = plan_export(arguments.checkpoint, arguments.hf, DTYPES.get(arguments.dtype))
    weights, tensors = export.weights, [tensor for file in export.files for tensor in file.tensors]
    print(
        f"{arguments.checkpoint}: {export.arch.family}, {len(weights.keys)} tensors used, {weights.style.value} keys, "
        f"{weights.padded_vocab} rows of vocabulary trimmed to {export.arch.vocab_size}\n"
        f"{arguments.out}: {len(tensors)} tensors, {', '.join(sorted({tensor.dtype for tensor in tensors}))}, "
        f"{len(export.plan.files) + 1} files, {export.plan.nbytes:,} bytes"
    )
    for name in weights.skipped:
        print(f"  left out: {name}")
    if arguments.dry_run:
        _print_files(export.plan)
        return
    _write(export.plan, arguments, "mcore-to-hf")
    if arguments.verify:
        _tell(verify_export(export, arguments.out), arguments.out)


def _check_target(arguments: argparse.Namespace, last_file: str) -> None:
    """That there is no --out yet, unless a run that ended with `last_file` wrote it and it is only to be verified."""
    if not (arguments.verify and (arguments.out / last_file).is_file()):
        transfer.check_target(arguments.out)


def _check_folder(option: str, folder: Path, file: str) -> None:
    if not folder.is_dir():
        raise UserError(f"{option} {folder} is not a folder; give one that exists")
    if not (folder / file).is_file():
        raise UserError(f"{option} {folder} has no {file}; give the folder that holds the model")


def _print_files(plan: transfer.Plan) -> None:
    kinds = Counter[str](type(segment).__name__ for file in plan.files for segment in file.segments)
    print("  segments: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    checked = sum(source.checksum is not None for source in plan.sources)
    print(f"  sources: {len(plan.sources)} files, {checked} of them with a published checksum")
    for file in plan.files:
        print(f"  {file.nbytes:>15,}  {file.name}")
    print(f"  {'':>15}  {plan.manifest[0]}")


def _write(plan: transfer.Plan, arguments: argparse.Namespace, label: str) -> None:
    if arguments.out.exists():
        print(f"{arguments.out} is there already")
        return
    report = transfer.run(plan, arguments.out, workers=arguments.workers, label=label)
    written = report.nbytes - report.kept
    print(
        f"wrote {written / 1e9:.2f} GB in {report.seconds:.1f} s, {written / 1e9 / report.seconds:.2f} GB/s"
        + (f"; {report.kept / 1e9:.2f} GB were there already" if report.kept else "")
    )


def _tell(logits: LogitsEvidence, folder: Path) -> None:
    experts = f"; all {logits.experts} experts were chosen" if logits.experts else ""
    print(
        f"verified: every tensor is the same; {logits.compared:,} logits differ from transformers' by at most "
        f"{logits.max_difference:.1e} (tolerance {logits.tolerance:.1e}, spread {logits.spread:.3g}){experts}; "
        f"certificate: {folder / certificate.NAME}"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
