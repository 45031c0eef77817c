"""Verify a merge (`merge --verify`): every tensor of the merged model is that of the base, plus the adapter's product.

This shares neither the reading nor the sums of the merge: the safetensors library reads the files, names are matched
anew, and the products are PEFT's.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from isoloss.models.conversion import certificate
from isoloss.models.conversion.hashed_file import write_whole
from isoloss.models.weights import manifest
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.convert.verify import check_files
from isoloss.tools.convert.verify_models import Unverified

# Where experts stand in files that have them one by one: gate, up, down.
_EXPERTS = {"mlp.experts": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe.experts": ("w1", "w3", "w2")}
# Of a sum's size: what two orders of adding, and of rounding, may differ by.
_SLACK = {torch.bfloat16: 2.0**-22, torch.float16: 2.0**-22, torch.float32: 2.0**-46}


@dataclass(frozen=True)
class MergeEvidence:
    """tensors, adapted: numbers of tensors compared, and of those with an adapter. numbers: of what an adapter changes.

    unchanged: how many of these are, after rounding, what they were.
    lost: norm of what rounding took from the update, as a part of the update's.
    """

    tensors: int
    adapted: int
    numbers: int
    unchanged: int
    lost: float


@dataclass
class _Sums:
    numbers: int = 0
    unchanged: int = 0
    update: float = 0.0
    error: float = 0.0


class _Files:
    """The tensors of a model's safetensors files, by name."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self.file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        files = {SINGLE}
        if not (folder / SINGLE).is_file():
            files = {*json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
        for file in sorted(files):
            self._open[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
            self.file_of |= dict.fromkeys(self._open[file].keys(), file)

    def get(self, name: str, row: int | None = None) -> Tensor:
        file = self._open[self.file_of[name]]
        return file.get_tensor(name) if row is None else file.get_slice(name)[row]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self.file_of[name]].get_slice(name).get_shape())


def verify_merge(hf: Path, adapter: Path, out: Path, *, transposed: bool) -> MergeEvidence:
    """Certify the merged model `out`. transposed: the model's files hold experts as [in, out].

    Raises Unverified; then there is no certificate.
    """
    try:
        record = json.loads((out / certificate.NAME).read_text(encoding="utf-8"))
        check_files(out, manifest.files_from_json(record["files"]))
    except UserError as error:
        raise Unverified(str(error)) from error
    for path in out.iterdir():
        copied = path.suffix != ".safetensors" and path.name != certificate.NAME and path.is_file()
        if copied and path.read_bytes() != (hf / path.name).read_bytes():
            raise Unverified(f"{path} differs from {hf / path.name}")
    sums = _Sums()
    with ExitStack() as stack:
        base, merged = _Files(hf, stack), _Files(out, stack)
        if base.file_of != merged.file_of:
            raise Unverified(f"{out} does not hold the tensors of {hf}, each in its file")
        deltas = dict[str, dict[int | None, tuple[Tensor, Tensor]]]()
        for name, row, factors in _deltas(adapter, base, transposed):
            if row in deltas.setdefault(name, {}):
                raise Unverified(f"{adapter} adapts {name} twice")
            deltas[name][row] = factors
        for name in base.file_of:
            for row, (left, right) in deltas.get(name, {}).items():
                _compare_sum(name, base.get(name, row), merged.get(name, row), left @ right, sums)
            if name not in deltas and not _same(base.get(name), merged.get(name)):
                raise Unverified(f"{name} has no adapter, and differs from that of {hf}")
    lost = math.sqrt(sums.error / sums.update) if sums.update else 0.0
    evidence = MergeEvidence(len(base.file_of), len(deltas), sums.numbers, sums.unchanged, lost)
    _certify(out, {**record, "verified": True, "merged": asdict(evidence)})
    return evidence


def _deltas(adapter: Path, base: _Files, transposed: bool) -> Iterator[tuple[str, int | None, tuple[Tensor, Tensor]]]:
    """Yield for every adapted matrix the name of its tensor, its row there, and the factors of its product."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        keys = sorted(file.keys())
        for key in (key for key in keys if key.endswith(".lora_A.weight")):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = file.get_tensor(key).double(), file.get_tensor(key.replace(".lora_A.", ".lora_B.")).double()
            name = next((name for name in _spellings(f"{module}.weight") if name in base.file_of), None)
            if name is not None:
                yield name, None, (b * _scale(config, module), a)
            else:
                yield from _of_experts(config, module, a, b, base, transposed)


def _of_experts(
    config: Mapping[str, Any], module: str, a: Tensor, b: Tensor, base: _Files, transposed: bool
) -> Iterator[tuple[str, int | None, tuple[Tensor, Tensor]]]:
    experts = module.removesuffix(".base_layer")
    inner = module != experts or not _is_down(config)
    called = f"{experts}.{'gate_up_proj' if inner else 'down_proj'}"
    scale = _scale(config, called)
    joined = next((name for name in _spellings(called) if name in base.file_of), None)
    count = base.shape(joined)[0] if joined else _count(experts, base)
    of_a, of_b = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1) * scale
    for expert in range(count):
        if joined:
            left, right = of_b[expert], of_a[expert]
            yield joined, expert, (right.T, left.T) if transposed else (left, right)
            continue
        (gate, up, down), where = _named(experts, base)
        if not inner:
            yield f"{where}.{expert}.{down}.weight", None, (of_b[expert], of_a[expert])
            continue
        for leaf, rows in zip((gate, up), of_b[expert].chunk(2, 0)):
            yield f"{where}.{expert}.{leaf}.weight", None, (rows, of_a[expert])


def _is_down(config: Mapping[str, Any]) -> bool:
    """Return whether the outer, or only, wrapper around the experts is that of down_proj."""
    return any(name.endswith("down_proj") for name in config.get("target_parameters") or ())


def _named(experts: str, base: _Files) -> tuple[tuple[str, str, str], str]:
    for suffix, leaves in _EXPERTS.items():
        for where in _spellings(re.sub(r"(mlp|block_sparse_moe)\.experts$", suffix, experts)):
            if f"{where}.0.{leaves[0]}.weight" in base.file_of:
                return leaves, where
    raise Unverified(f"no tensor of the model is one of {experts}")


def _count(experts: str, base: _Files) -> int:
    (gate, _, _), where = _named(experts, base)
    return sum(re.fullmatch(rf"{re.escape(where)}\.\d+\.{gate}\.weight", name) is not None for name in base.file_of)


def _spellings(name: str) -> tuple[str, ...]:
    """Return the names of a tensor in a text model, and in a multimodal one."""
    return (
        name,
        name.replace("model.", "model.language_model.", 1),
        name.replace("model.", "language_model.model.", 1),
        f"language_model.{name}",
    )


def _scale(config: Mapping[str, Any], module: str) -> float:
    def chosen(patterns: str, default: str) -> Any:
        found = (value for key, value in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, config[default])

    rank = chosen("rank_pattern", "r")
    return chosen("alpha_pattern", "lora_alpha") / (rank**0.5 if config.get("use_rslora") else rank)


def _compare_sum(name: str, base: Tensor, merged: Tensor, delta: Tensor, sums: _Sums) -> None:
    """Compare a merged matrix with the sum in fp64, but for one rounding; add to the statistics."""
    if merged.dtype != base.dtype or merged.shape != base.shape or delta.shape != base.shape:
        raise Unverified(f"{name} is not of the type and shape of the base, or of its adapter")
    exact = base.double() + delta
    rounding = (exact.to(base.dtype).double() - exact).abs()
    slack = _SLACK[base.dtype] * (base.double().abs() + delta.abs().max())
    off = (merged.double() - exact).abs() > rounding + slack
    if bool(off.any()) or not bool(merged.isfinite().all()):
        raise Unverified(f"{name}: {int(off.sum()):,} of {off.numel():,} numbers are not base plus adapter")
    sums.numbers += int((delta != 0).sum())
    sums.unchanged += int(((merged == base) & (delta != 0)).sum())
    sums.update += float(delta.square().sum())
    sums.error += float((merged.double() - exact).square().sum())


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def _certify(out: Path, fields: Mapping[str, Any]) -> None:
    partial = out / f".{certificate.NAME}.partial"
    write_whole(partial, (json.dumps(fields, indent=2) + "\n").encode())
    partial.rename(out / certificate.NAME)
