"""The commands of `isoloss.tools.convert`: plan, print, write, verify. Each takes its parsed arguments."""

import argparse
from pathlib import Path

import torch

from isoloss.models.conversion import certificate, transfer
from isoloss.models.conversion.hf_to_mcore import plan as plan_import
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.conversion.plan import FilePlan
from isoloss.models.families.registry import hub_hint
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder, export_of
from isoloss.models.weights.distcp import METADATA, is_checkpoint
from isoloss.parallel import UserError
from isoloss.tools.convert.verify import verify_export, verify_import
from isoloss.tools.convert.verify_logits import LogitsEvidence

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def hf_to_mcore(arguments: argparse.Namespace) -> None:
    arguments.hf = hf_folder(arguments.hf, "mcore-to-hf converts it")
    check_target(arguments, manifest.NAME)
    plan = plan_import(arguments.hf, DTYPES.get(arguments.dtype))
    print(
        f"{arguments.hf}: {plan.arch.family}, {plan.num_source_tensors} tensors used, {len(plan.left_out)} left out\n"
        f"{arguments.out}: {plan.num_tensors} tensors, {', '.join(plan.dtypes)}, {plan.style.value} keys, "
        f"{len(plan.transfer.files) + 1} files, {plan.transfer.nbytes:,} bytes"
    )
    for name in plan.left_out:
        print(f"  left out: {name}")
    if arguments.dry_run:
        print_files(plan.transfer)
        return
    write(plan.transfer, arguments, "hf-to-mcore")
    if arguments.verify:
        dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
        _tell(verify_import(arguments.hf, arguments.out, dtype), arguments.out)


def mcore_to_hf(arguments: argparse.Namespace) -> None:
    check_checkpoint(arguments.checkpoint)
    if arguments.hf:
        arguments.hf = hf_folder(arguments.hf, "leave --hf out to take what it holds, or name a Hugging Face folder")
    check_target(arguments, certificate.NAME)
    dtype, keep_unused = DTYPES.get(arguments.dtype), arguments.keep_unused
    export = plan_export(arguments.checkpoint, arguments.hf, dtype, keep_unused=keep_unused)
    weights, tensors = export.weights, [tensor for file in export.files for tensor in file.tensors]
    print(
        f"{weights.folder.path}: {export.arch.family}, {len(weights.keys)} tensors used, {weights.style.value} keys, "
        f"{weights.padded_vocab} rows of vocabulary trimmed to {export.arch.vocab_size}\n"
        f"{arguments.out}: {len(tensors)} tensors, {', '.join(sorted({tensor.dtype for tensor in tensors}))}, "
        f"{len(export.plan.files) + 1} files, {export.plan.nbytes:,} bytes"
    )
    for name in weights.skipped:
        print(f"  left out: {name}")
    if arguments.dry_run:
        print_files(export.plan)
        return
    write(export.plan, arguments, "mcore-to-hf")
    if arguments.verify:
        _tell(verify_export(export, arguments.out), arguments.out)


def check_target(arguments: argparse.Namespace, last_file: str) -> None:
    """Refuse an --out that exists, unless it is complete (a run writes `last_file` last) and only to be verified."""
    if not (arguments.verify and (arguments.out / last_file).is_file()):
        transfer.check_target(arguments.out)


def hf_folder(given: Path, of_checkpoint: str) -> Path:
    """Return the Hugging Face folder that --hf names: itself, or the one in the output_dir of a run.

    of_checkpoint: advice for a folder that is a checkpoint.
    """
    check_folder("--hf", given)
    folder = export_of(given)
    if not (folder / "config.json").is_file():
        if is_checkpoint(checkpoint := checkpoint_folder(given)):
            raise UserError(f"--hf {given} is no Hugging Face folder, but the checkpoint {checkpoint}: {of_checkpoint}")
        raise UserError(f"--hf {given} has no config.json; give the folder that holds the model")
    return folder


def check_checkpoint(given: Path) -> None:
    """Raise UserError unless --checkpoint is a checkpoint, or the folder of a run that has one."""
    check_folder("--checkpoint", given)
    folder = checkpoint_folder(given)
    if not is_checkpoint(folder):
        if (folder / "config.json").is_file():
            raise UserError(
                f"--checkpoint {folder} is a Hugging Face folder already: hf-to-mcore makes checkpoints of it"
            )
        raise UserError(f"--checkpoint {given} has no {METADATA}; give a checkpoint, or the folder of a run")


def check_folder(option: str, folder: Path) -> None:
    """Raise UserError where an option names no folder."""
    if not folder.is_dir():
        raise UserError(f"{option} {folder} is not a folder; give one that exists{hub_hint(folder)}")


def print_files(plan: FilePlan) -> None:
    """Print what --dry-run shows."""
    checked = sum(source.checksum is not None for source in plan.sources)
    print(f"  sources: {len(plan.sources)} files, {checked} of them with a published checksum")
    for file in plan.files:
        print(f"  {file.nbytes:>15,}  {file.name}")
    print(f"  {'':>15}  {plan.manifest[0]}")


def write(plan: FilePlan, arguments: argparse.Namespace, label: str) -> None:
    """Write a plan, unless --out is there to be verified, and say how long it took."""
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
