"""Convert checkpoints between Hugging Face and Megatron-Core, without a model, a GPU or a process group.

    python -m isoloss.tools.convert hf-to-mcore --hf DIR --out DIR [--dtype bf16] [--verify]
    python -m isoloss.tools.convert mcore-to-hf --checkpoint DIR --out DIR [--dtype bf16] [--verify]

--dry-run prints what would be done. Files are written by several processes, under a temporary name beside --out that is
renamed at the end: --out is absent or complete. A run that was interrupted goes on where it was when it is started
again with the same arguments.
--verify then reads everything back, compares every tensor bit by bit and, with the whole model in memory, the logits
with those of transformers; what stands the test is certified by conversion.json ("verified": true) in --out. If --out
was written already by the same command without --verify, it is verified as it is.
Exit status: 0 done, 1 written but not verified, 2 a mistake in the arguments or the files; told in one line.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from isoloss.models import hf_to_mcore, transfer
from isoloss.parallel import UserError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
        return 0
    except Unverified as error:
        print(f"isoloss: not verified: {error}; {arguments.out} has no certificate, do not use it", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"isoloss: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"isoloss: interrupted; {transfer.AGAIN}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m isoloss.tools.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "hf-to-mcore",
        help="a Hugging Face folder into a Megatron-Core checkpoint, for any tensor, pipeline and expert parallelism",
        description="Convert a Hugging Face folder (config.json and safetensors) into a Megatron-Core checkpoint, "
        "in the torch_dist format. It fits every layout: load it with any tensor, pipeline and expert parallelism.",
    )
    command.add_argument("--hf", required=True, type=Path, metavar="DIR", help="the Hugging Face folder")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the checkpoint; must not exist yet")
    command.add_argument("--dtype", choices=sorted(DTYPES), help="type of the weights; default: as they are stored")
    _add_common(command)
    command.set_defaults(command=_hf_to_mcore)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=_positive, metavar="N", help="processes that copy; default: one a core")
    command.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")


def _hf_to_mcore(arguments: argparse.Namespace) -> None:
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
    else:
        _run(plan.transfer, arguments, "hf-to-mcore")


def _print_files(plan: transfer.Plan) -> None:
    kinds = Counter[str](type(segment).__name__ for file in plan.files for segment in file.segments)
    print("  segments: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    checked = sum(source.sha256 is not None for source in plan.sources)
    print(f"  sources: {len(plan.sources)} files, {checked} of them with a published checksum")
    for file in plan.files:
        print(f"  {file.nbytes:>15,}  {file.name}")
    print(f"  {'':>15}  {plan.manifest[0]}")


def _run(plan: transfer.Plan, arguments: argparse.Namespace, label: str) -> None:
    report = transfer.run(plan, arguments.out, workers=arguments.workers, label=label)
    written = report.nbytes - report.kept
    print(
        f"wrote {written / 1e9:.2f} GB in {report.seconds:.1f} s, {written / 1e9 / report.seconds:.2f} GB/s"
        + (f"; {report.kept / 1e9:.2f} GB were there already" if report.kept else "")
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(main())
