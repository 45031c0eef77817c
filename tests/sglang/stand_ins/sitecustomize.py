"""Stand-ins for three packages that SGLang imports on every machine and does not need on a CPU.

This folder on PYTHONPATH puts them into every process of the server. SGLang itself ships the same idea for macOS
(`sglang/_platform_stubs.py`).

triton, torchvision: inert: decorators give the function back, types can be subclassed, everything else is false.
    PyPI has no CPU build of either.
sgl_kernel: raises when a kernel is called. SGLang's own PyTorch code must then be what runs, never a silent nothing.
    OPERATORS are those that a module of SGLang looks up when it is imported.

SGLang's own processes are forks of the one that was started. Its adapters get memory that is not pinned.
"""

import multiprocessing
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

INERT = ("triton", "torchvision")
KERNELS = ("sgl_kernel", "sgl_kernel.mamba")
OPERATORS = (
    "fused_gdn_gating_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu", "fused_sigmoid_mul_cpu",
)  # fmt: skip


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _InertType(type):
    """Of classes such as triton.Config: any attribute is its own dotted name."""

    def __getattr__(cls, name):
        if _is_dunder(name):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Inert(ModuleType):
    """A package all of whose attributes exist."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, _Loader(), is_package=True)

    def __getattr__(self, name):
        if _is_dunder(name):
            raise AttributeError(name)
        if name[0].isupper():
            members = {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None}
            made = _InertType(name, (), members)
        else:
            full = f"{self.__name__}.{name}"
            made = sys.modules.setdefault(full, _Inert(full))
        setattr(self, name, made)
        return made

    def __call__(self, *args, **kwargs):
        """As a decorator, with arguments or without."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getitem__(self, key):
        return self

    def __bool__(self):
        return False


class _Kernels(ModuleType):
    """A module all of whose functions exist, with no submodules but those in KERNELS."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if _is_dunder(name):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(f"{self.__name__}.{name} is a kernel, and this is a CPU without kernels")

        setattr(self, name, missing)
        return missing


class _Loader:
    def create_module(self, spec):
        return _Inert(spec.name)

    def exec_module(self, module):
        pass


class _KernelLoader:
    def create_module(self, spec):
        return _Kernels(spec.name)

    def exec_module(self, module):
        if module.__name__ == KERNELS[0]:
            from torch import library  # not before something wants it: every process of Python comes by here

            for name in OPERATORS:  # without an implementation: a call raises NotImplementedError
                library.define(f"sgl_kernel::{name}", "(Tensor x) -> Tensor")


def _without_pinning() -> None:
    """SGLang's adapters pin memory on every machine, which PyTorch refuses without a GPU."""
    import torch

    def unpinned(function):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


class _Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "sglang.srt.lora":
            _without_pinning()
        if fullname in KERNELS:
            return ModuleSpec(fullname, _KernelLoader(), is_package=True)
        if fullname.split(".")[0] not in INERT or _asked_by_transformers():
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


def _asked_by_transformers() -> bool:
    """transformers asks whether torchvision is installed and then reads its version: let it hear no."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_name == "_is_package_available" and "transformers" in frame.f_code.co_filename:
            return True
    return False


sys.meta_path.insert(0, _Finder())
triton = sys.modules["triton"] = _Inert("triton")
triton.__version__ = "3.0.0"
triton.cdiv = lambda a, b: -(a // -b)
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def _set_start_method(method: str | None, force: bool = False) -> None:
    """SGLang asks for "spawn", as forks cannot have CUDA: each of its processes imports it again, seven CPU seconds."""
    _set("fork" if method == "spawn" else method, force)


_set, multiprocessing.set_start_method = multiprocessing.set_start_method, _set_start_method
