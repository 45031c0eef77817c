"""Process groups, sharding and the loss normalizer. Importing this package lets Megatron-Core run without a GPU."""

import importlib
import logging
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from isoloss.parallel.layout import Layout
from isoloss.parallel.runtime.errors import PreemptedError, UserError

if TYPE_CHECKING:
    from isoloss.parallel.mesh import Mesh
    from isoloss.parallel.normalizer import GlobalLossNormalizer

__all__ = ["GlobalLossNormalizer", "Layout", "Mesh", "PreemptedError", "UserError"]
# Imported on first access: torch and Megatron-Core take seconds to import, and a mistake in a command line is reported
# before that.
_LATER = {"GlobalLossNormalizer": "isoloss.parallel.normalizer", "Mesh": "isoloss.parallel.mesh"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


class _BeforeMegatron(MetaPathFinder):
    """Installs the CUDA stubs when any module first imports Megatron-Core."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "megatron":
            sys.meta_path.remove(self)
            _install_cuda_stubs()


def _install_cuda_stubs() -> None:
    importlib.import_module("isoloss.parallel.runtime.cuda_stubs").install()


if "megatron" in sys.modules:
    _install_cuda_stubs()
else:
    sys.meta_path.insert(0, _BeforeMegatron())
# Megatron-Core warns at import of every optional package (Transformer Engine, apex, ...) that is missing.
for _module in ("megatron", "torch.distributed"):
    warnings.filterwarnings("ignore", module=_module)
# From 0.17 on, Megatron-Core imports torch's compiler of extensions, which warns of CUDA on a machine without a GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
