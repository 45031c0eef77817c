"""The one table of versions that go together, and of what was run with them.

docs/versions.md is printed from it, `isoloss.tools.doctor` judges an installation by it, and a broadcast of weights
asks it before a group of trainer and servers is formed. Facts are those of package metadata on PyPI (Requires-Dist),
for Linux on x86-64. Imports no torch.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = "2.11"  # the first with all that the code calls
WEIGHT_SYNCS = ("broadcast", "tensor", "disk")  # values of rollout.weight_sync
# Oldest major version of the NVIDIA driver for a torch that was built for this major version of CUDA.
OLDEST_DRIVER = {12: 525, 13: 580}


@dataclass(frozen=True)
class VersionSet:
    """Versions for one environment of the trainer, and the servers beside it.

    cuda, nccl: those of the torch wheel; None in a build for the CPU.
    transformer_engine: the range that megatron_core asks for; None where there is none to use.
    sglang: of the servers, in an environment of their own.
    weight_syncs: the values of rollout.weight_sync that such servers can have.
    driver: oldest major version of the NVIDIA driver.
    run: what was run with it, and what was not.
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
    """What recipes/containers/Dockerfile is made of.

    set: the name of the versions.
    cuda: of the base image, nvidia/cuda; with the nvcc that builds kernels for torch.
    transformer_engine: that of the extra isoloss[gpu].
    """

    set: str
    cuda: str
    transformer_engine: str


@dataclass(frozen=True)
class TorchWheel:
    """A torch of PyPI. nccl: the version of nvidia-nccl that it pins."""

    version: str
    cuda: str
    nccl: str


@dataclass(frozen=True)
class ServerRelease:
    """A release of SGLang. torch: the version that it pins. nccl: what that wheel of torch pins."""

    sglang: str
    python: str
    torch: str
    nccl: str


@dataclass(frozen=True)
class MegatronRelease:
    """A release of Megatron-Core.

    transformer_engine: the range of its metadata.
    usable: isoloss runs with it. use: what was run, or why nothing does.
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
    """Without the part that names a build: 2.13.0+cu130 is 2.13.0."""
    return version.partition("+")[0]


def set_of_images() -> VersionSet:
    return next(each for each in SETS if each.name == IMAGES.set)


def nccl_of_torch(torch: str) -> str | None:
    """What the wheel of that version pins; None for one that is not in the table."""
    return next((wheel.nccl for wheel in TORCH_WHEELS if wheel.version == public(torch)), None)


def nccl_of_sglang(sglang: str | None) -> str | None:
    """What an installation of that release from its wheel has; None for one that is not in the table."""
    return next((release.nccl for release in SERVER_RELEASES if release.sglang == sglang), None)


def version_of(package: str) -> str | None:
    """None where nobody installed it, such as a checkout that is imported from its folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_nccl(cuda: str | None) -> str | None:
    """The NCCL that a torch for that CUDA loads: of its package, which may be another than torch was built with.
    None where torch brings its own, and in a build for the CPU."""
    return version_of(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda else None


def foreign_nccl(torch: str, nccl: str | None, sglang: str | None) -> str | None:
    """The NCCL of servers of that release, where a trainer with these versions can form no group with them; None where
    it can, and where that cannot be told.

    NCCL forms no group across versions ("Mismatched NCCL version detected"). A server tells its release and not its
    NCCL, which a container image may have exchanged. So a trainer whose NCCL is not that of its torch wheel is let
    pass: it was chosen, and for that purpose.
    """
    theirs = nccl_of_sglang(sglang)
    return theirs if theirs != nccl and nccl is not None and nccl == nccl_of_torch(torch) else None
