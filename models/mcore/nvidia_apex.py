"""NVIDIA's apex, which Megatron-Core imports where it is, and the other package of that name."""

from importlib.machinery import PathFinder
from pathlib import Path

from isoloss.parallel import UserError


def check() -> None:
    """Raises UserError where the package `apex` is not NVIDIA's: PyPI's is another project. Imports neither."""
    spec = PathFinder.find_spec("apex")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if spec is not None and not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        raise UserError(
            f"the package apex in {folders[0] if folders else spec.origin} is not NVIDIA's (the one on PyPI is another "
            "project): pip uninstall apex; isoloss needs none, and NVIDIA's is built from its own repository"
        )
