"""What transformers computes in fp32 whatever the model's type is, in fp64: its own source, with the type replaced.

Rotary angles stay fp32, as they do in the engine.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

_SINGLE = re.compile(r"torch\.float(32)?\b|\.float\(\)")


class Patches(Protocol):
    def setattr(self, target: Any, name: str, value: Any, /) -> None: ...


def compute_in(module: ModuleType, patches: Patches) -> None:
    """Let the models of a modeling_*.py of transformers compute in fp64 throughout, until the patches are undone."""
    for name, found in list(vars(module).items()):
        if getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(found) and _is_single(found):
            patches.setattr(module, name, doubled(found, module))
        elif inspect.isclass(found) and "Rotary" not in name:
            for method, own in list(vars(found).items()):
                if inspect.isfunction(own) and not method.startswith("__") and _is_single(own):
                    patches.setattr(found, method, doubled(own, module))


def scale_embedding(model: nn.Module) -> None:
    """Let a model that was made in fp32 scale its embeddings by what one made in fp64 would."""
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)


def doubled(function: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """The function, compiled again with fp64 in place of fp32."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    source = source[re.search(r"^def ", source, re.MULTILINE).start() :]
    source = _SINGLE.sub(lambda found: ".double()" if "(" in found[0] else "torch.float64", source)
    found: dict[str, Any] = {}
    exec(compile(source, f"fp64 of {function.__qualname__}", "exec"), vars(module), found)
    return found[inspect.unwrap(function).__name__]


def _is_single(function: Callable[..., Any]) -> bool:
    return bool(_SINGLE.search(inspect.getsource(inspect.unwrap(function))))
