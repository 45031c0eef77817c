"""The commands of `isoloss.tools.convert` for adapters. Each takes its parsed arguments."""

import argparse
import sys
from pathlib import Path

from isoloss.models.conversion import certificate
from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.adapter_checkpoint import CheckpointFactors
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.merge import plan_merge
from isoloss.models.lora.peft_folder import write_adapter
from isoloss.models.lora.peft_reader import AdapterFolder
from isoloss.models.lora.peft_source import FolderFactors, keys_of
from isoloss.parallel import UserError
from isoloss.tools.convert.commands import check_checkpoint, check_folder, check_target, hf_folder, print_files, write
from isoloss.tools.convert.verify_merge import verify_merge

LARGE_LOSS = 0.1  # of the update's norm


def export_adapter(arguments: argparse.Namespace) -> None:
    check_checkpoint(arguments.checkpoint)
    hf = hf_folder(arguments.hf, "name the model that the adapter was trained on") if arguments.hf else None
    factors = CheckpointFactors(arguments.checkpoint, hf)
    tensors = write_adapter(arguments.out, factors.arch, factors.lora, factors, str(hf) if hf else None)
    print(
        f"{factors.folder}: {factors.arch.family}, adapter with {_keys(factors.lora)}\n"
        f"{arguments.out}: {len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors.values()):,} bytes"
    )


def import_adapter(arguments: argparse.Namespace) -> None:
    hf, adapter = _model_and_adapter(arguments)
    arch = read_architecture(hf)
    folder = AdapterFolder(adapter, arch)
    lora = keys_of(folder, arch)
    tensors = write_adapter(arguments.out, arch, lora, FolderFactors(folder), str(hf))
    _remark(folder, hf)
    print(f"{arguments.out}: {len(tensors)} tensors\ntrain it on with: lora.init={arguments.out} {_keys(lora)}")


def merge(arguments: argparse.Namespace) -> None:
    hf, adapter = _model_and_adapter(arguments)
    check_target(arguments, certificate.NAME)
    merged = plan_merge(hf, adapter)
    pairs = merged.adapter.pairs.values()
    ranks = ", ".join(map(str, sorted({pair.a.shape[0] for pair in pairs})))
    print(
        f"{adapter}: {len(pairs)} matrices of rank {ranks}, in {len(merged.adapted)} tensors of {hf} "
        f"({merged.arch.family})\n"
        f"{arguments.out}: {len(merged.plan.files) + 1} files, {merged.plan.nbytes:,} bytes"
    )
    _remark(merged.adapter, hf)
    if arguments.dry_run:
        print_files(merged.plan)
        return
    write(merged.plan, arguments, "merge")
    if not arguments.verify:
        return
    found = verify_merge(hf, adapter, arguments.out, transposed=merged.transposed)
    print(
        f"verified: {found.tensors} tensors, {found.adapted} of them with the adapter; rounding left "
        f"{found.unchanged / max(1, found.numbers):.1%} of {found.numbers:,} adapted numbers as they were, and "
        f"{found.lost:.2g} of the update is lost; certificate: {arguments.out / certificate.NAME}"
    )
    if found.lost > LARGE_LOSS:
        print(
            f"isoloss: {found.lost:.0%} of the adapter's update is lost in the rounding to the model's type: serve the "
            "adapter beside the model, or merge into a copy of the model in fp32",
            file=sys.stderr,
        )


def _model_and_adapter(arguments: argparse.Namespace) -> tuple[Path, Path]:
    hf = hf_folder(arguments.hf, "mcore-to-hf converts it")
    check_folder("--adapter", arguments.adapter)
    if not (arguments.adapter / "adapter_config.json").is_file() and (arguments.adapter / "config.json").is_file():
        raise UserError(f"--adapter {arguments.adapter} is a whole model; give the folder with adapter_config.json")
    return hf, arguments.adapter


def _remark(folder: AdapterFolder, hf: Path) -> None:
    base = folder.config.base
    if base and Path(base).name != hf.name:
        print(f"  the adapter names its model {base}; shapes and names are those of {hf}")
    if folder.config.dropout:
        print(f"  lora_dropout={folder.config.dropout:g} was for its training and has no effect here")


def _keys(lora: LoraConfig) -> str:
    """Return the keys that differ from the defaults, as a command takes them."""
    keys = [f"lora.rank={lora.rank}", f"lora.alpha={lora.alpha:.12g}"]
    keys += [f"lora.scaling={lora.scaling}"] if lora.scaling != "rank" else []
    keys += [f"lora.targets=[{','.join(lora.targets)}]"] if lora.targets != ("all",) else []
    keys += [f"lora.expert_rank={lora.expert_rank}"] if lora.expert_rank is not None else []
    return " ".join(keys)
