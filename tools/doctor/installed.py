"""Read what is installed here from the metadata of packages, without an import of any."""

import re
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from isoloss.parallel.runtime import versions
from isoloss.parallel.runtime.versions import version_of

# The parts of Transformer Engine come as packages of their own; the first that is here has the version.
TRANSFORMER_ENGINE = tuple(f"transformer-engine{part}" for part in ("", "-torch", "-cu13", "-cu12"))


@dataclass(frozen=True)
class Installed:
    """Versions of packages; None for a package that is not installed.

    cuda: the CUDA release of the torch build; None in a build for the CPU.
    nccl: version of the package nvidia-nccl for this CUDA. pinned_nccl: the version that torch requires.
    sglang_torch: the torch that an SGLang in this environment requires.
    """

    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    pinned_nccl: str | None = None
    megatron_core: str | None = None
    transformer_engine: str | None = None
    sglang: str | None = None
    sglang_torch: Requirement | None = None


def read_installed() -> Installed:
    torch, sglang = version_of("torch"), version_of("sglang")
    cuda = _cuda_of_torch() if torch else None
    nccl = next((need.specifier for need in needs_of("torch") if need.name.startswith("nvidia-nccl-cu")), ())
    return Installed(
        torch,
        cuda,
        versions.installed_nccl(cuda),
        next((pin.version for pin in nccl), None),
        version_of("megatron-core"),
        next(filter(None, map(version_of, TRANSFORMER_ENGINE)), None),
        sglang,
        next((need for need in needs_of("sglang") if need.name == "torch"), None),
    )


def needs_of(package: str) -> list[Requirement]:
    """Return the requirements of a package on this machine, without extras; none if it is not installed."""
    try:
        needs = [Requirement(text) for text in requires(package) or ()]
    except PackageNotFoundError:
        return []
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _cuda_of_torch() -> str | None:
    """Read torch.version's source: neither the metadata nor the version of the package always has it."""
    spec = PathFinder.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for folder in folders if (path := Path(folder) / "version.py").is_file()]
    release = re.search(r"^cuda\b.*= *'([\d.]+)'", files[0].read_text(), re.M) if files else None
    return release[1] if release else None
