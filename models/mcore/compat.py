"""Adapters for interfaces of Megatron-Core that differ between 0.16.1 and newer releases.

The same code serves every release of `parallel/runtime/versions.py` that is usable; nothing here asks which one is
installed. Patches of Megatron's own code are in `isoloss.models.mcore.patches`.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def submodules_of(spec: Any) -> Any:
    """The submodules of a module that is yet to be built: of a ModuleSpec, or of the function that has taken its place
    from 0.17 on, where it is an argument."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def of_class(spec: Any, module: type, **more: Any) -> Any:
    """The same module that is yet to be built, of another class, which takes more."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **spec.keywords, **more)
    return ModuleSpec(module=module, submodules=spec.submodules, params={**spec.params, **more})


class AnyLayer(SimpleNamespace):
    """The spec of a layer's MLP of isoloss's own class: ModuleSpec's fields, and from 0.19 on also callable."""

    def __call__(self, **settings: Any) -> Any:
        return self.module(submodules=self.submodules, **{**settings, **self.params})


def gradients_for_norm(part: Any) -> Sequence[Tensor]:
    """Return the gradients of an optimizer's parameters, each once; 0.19 renamed the method."""
    return (getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm)()
