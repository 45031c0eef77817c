"""The table of versions that go together, and of the runs with them.

docs/versions.md is printed from this table, `isoloss.tools.doctor` checks an installation against it, and a broadcast
of weights reads it before trainer and servers form a group. Facts are from package metadata on PyPI (Requires-Dist),
for Linux on x86-64. Imports no torch.
"""

from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from isoloss.parallel.runtime.errors import UserError

VERSION = "0.1.0"  # of isoloss; setup.py's distribution has it from here
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = "2.11"  # the first with all functions that the code calls
WEIGHT_SYNCS = ("broadcast", "tensor", "disk")  # values of rollout.weight_sync
# Oldest major version of the NVIDIA driver for a torch that was built for this major version of CUDA.
OLDEST_DRIVER = {12: 525, 13: 580}


@dataclass(frozen=True)
class VersionSet:
    """Versions for one environment of the trainer, and for its servers.

    cuda, nccl: versions of the torch wheel; None in a build for the CPU.
    transformer_engine: range that megatron_core requires; None if Transformer Engine cannot be used.
    sglang: version of the servers, in an environment of their own.
    weight_syncs: values of rollout.weight_sync that work with such servers.
    driver: oldest major version of the NVIDIA driver.
    run: list, in words, of runs with these versions and of parts that were not run.
    """

    name: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    megatron_core: str
    transformer_engine: str | None
    sglang: str
    weight_syncs: tuple[str, ...]
    driver: int | None
    run: str


@dataclass(frozen=True)
class Images:
    """Versions in recipes/containers/Dockerfile.

    set: name of the set of versions.
    cuda: version of the base image, nvidia/cuda, with the nvcc that builds kernels for torch.
    transformer_engine: version of the extra isoloss[gpu].
    """

    set: str
    cuda: str
    transformer_engine: str


@dataclass(frozen=True)
class TorchWheel:
    """A torch wheel of PyPI. nccl: version of nvidia-nccl that the wheel pins."""

    version: str
    cuda: str
    nccl: str


@dataclass(frozen=True)
class ServerRelease:
    """A release of SGLang. torch: version that the release pins. nccl: version that this wheel of torch pins."""

    sglang: str
    python: str
    torch: str
    nccl: str


@dataclass(frozen=True)
class MegatronRelease:
    """A release of Megatron-Core.

    transformer_engine: range in the metadata of the release.
    usable: True if isoloss runs with the release.
    use: reason why isoloss does or does not run with it.
    """

    version: str
    python: str
    transformer_engine: str | None
    usable: bool
    use: str


SETS = (
    VersionSet(
        "CPU", ">=3.11", "2.13.0+cpu", None, None, "0.16.1", None, "0.5.23", WEIGHT_SYNCS, None,
        "the tests, the recipes and a real SGLang server, with Python 3.11. Not run: other versions of Python, but for "
        "what is said of Megatron-Core 0.17.1 below.",
    ),
    VersionSet(
        "GPU", ">=3.11", "2.13.0", "13.0", "2.29.7", "0.16.1", ">=2.9,<2.12", "0.5.23", ("tensor", "disk"), 580,
        "not run on a GPU; torch 2.11.0 with CUDA 13.0, NCCL 2.28.9 and Python 3.12 ran `tests/gpu`, `isoloss-sft` and "
        "`isoloss-grpo` on one H200, without Transformer Engine and SGLang. The same torch, built for the CPU, ran the "
        "tests.",
    ),
    VersionSet(
        "GPU, weights by NCCL", ">=3.11", "2.14.1", "13.0", "2.30.7", "0.16.1", ">=2.9,<2.12", "0.5.23", WEIGHT_SYNCS,
        580, "not run, not even on a CPU. It has the torch that SGLang 0.5.23 pins, so both sides have one NCCL.",
    ),
)  # fmt: skip
IMAGES = Images("GPU, weights by NCCL", "13.0.3", "2.11.0")
TORCH_WHEELS = (
    TorchWheel("2.11.0", "13.0", "2.28.9"),
    TorchWheel("2.12.0", "13.0", "2.29.7"),
    TorchWheel("2.13.0", "13.0", "2.29.7"),
    TorchWheel("2.14.1", "13.0", "2.30.7"),
)
SERVER_RELEASES = (ServerRelease("0.5.23", ">=3.11,<3.14", "2.14.1", "2.30.7"),)
MEGATRON_RELEASES = (
    MegatronRelease("0.16.1", ">=3.10", ">=2.9,<2.12", True, "what isoloss is built on"),
    MegatronRelease("0.17.1", ">=3.12", None, True, "usable; what was run with it is said below"),
    MegatronRelease("0.18.2", ">=3.12", None, False, "not usable: its specs of modules differ; it imports Triton"),
    MegatronRelease("0.19.2", ">=3.12", None, False, "not usable yet: its checkpoints differ; it imports Triton"),
)
TESTED_TORCH = SETS[0].torch.removesuffix("+cpu")
SUPPORTED_MEGATRON = MEGATRON_RELEASES[0].version
NEWEST_MEGATRON = [release.version for release in MEGATRON_RELEASES if release.usable][-1]


def public(version: str) -> str:
    """Strip the name of the build: 2.13.0+cu130 is 2.13.0."""
    return version.partition("+")[0]


def set_of_images() -> VersionSet:
    return next(versions for versions in SETS if versions.name == IMAGES.set)


def nccl_of_torch(torch: str) -> str | None:
    """Return the NCCL that the wheel of a torch version pins; None if the table does not have the version."""
    return next((wheel.nccl for wheel in TORCH_WHEELS if wheel.version == public(torch)), None)


def nccl_of_sglang(sglang: str | None) -> str | None:
    """Return the NCCL of a release of SGLang installed from its wheel; None if the table does not have the release."""
    return next((release.nccl for release in SERVER_RELEASES if release.sglang == sglang), None)


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. That of isoloss is that of this source, also where
    an installation of an earlier one left its metadata."""
    if package == "isoloss":
        return VERSION
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_nccl(cuda: str | None) -> str | None:
    """Return the version of the NCCL package that a torch for this CUDA loads; torch may be built with another version.

    None if torch has NCCL built in, and in a build for the CPU.
    """
    return version_of(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda else None


def foreign_nccl(torch: str, nccl: str | None, sglang: str | None) -> str | None:
    """Return the NCCL of servers of an SGLang release if a trainer with these versions cannot form a group with them.

    None if it can, and if that is unknown. NCCL forms no group across versions ("Mismatched NCCL version detected"). A
    server reports its release and not its NCCL, which a container image may have replaced. So a trainer whose NCCL is
    not the one of its torch wheel is accepted: its NCCL was chosen for that purpose.
    """
    server_nccl = nccl_of_sglang(sglang)
    return server_nccl if server_nccl != nccl and nccl is not None and nccl == nccl_of_torch(torch) else None


def check_apex() -> None:
    """Raise UserError where the package `apex` is not NVIDIA's: PyPI's is another project. Imports neither."""
    spec = PathFinder.find_spec("apex")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if spec is not None and not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        raise UserError(
            f"the package apex in {folders[0] if folders else spec.origin} is not NVIDIA's (the one on PyPI is another "
            "project): pip uninstall apex; isoloss needs none, and NVIDIA's is built from its own repository"
        )
