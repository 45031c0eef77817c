"""A stand-in for the package `transformer_engine`, with which Megatron-Core builds models of its TE spec on a CPU.

Only what Megatron-Core's wrappers (megatron/core/extensions/transformer_engine.py) derive from or call while a model is
built: modules with the parameters of the real ones, under their names and with their shard shapes, and no forward.
Keyword arguments that shape no parameter are ignored.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

# Old enough that Megatron-Core asks for no fused operations, new enough for grouped experts (1.11).
VERSION = "1.12.0"


def _unset(*shape: int) -> nn.Parameter:
    """NaN, so that a parameter which nobody loads is seen."""
    return nn.Parameter(torch.full(shape, torch.nan))


class RMSNorm(nn.Module):
    def __init__(self, normalized_shape=None, *, hidden_size=None, **_):
        super().__init__()
        self.weight = _unset(normalized_shape or hidden_size)


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, tp_size, parallel_mode, bias, **_):
        super().__init__()
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.weight = _unset(out_features, in_features)
        if bias:
            self.bias = _unset(out_features)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, **kwargs):
        super().__init__(in_features, out_features, **kwargs)
        self.layer_norm_weight = _unset(in_features)


class GroupedLinear(nn.Module):
    def __init__(self, num_gemms, in_features, out_features, **_):
        super().__init__()  # Megatron-Core has divided the features by the expert TP already
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            setattr(self, f"weight{expert}", _unset(out_features, in_features))


class DotProductAttention(nn.Module):
    def __init__(self, **_):
        super().__init__()


def install() -> None:
    """Make `import transformer_engine` find this stub; before the first import of megatron."""
    package("transformer_engine", __version__=VERSION, **members(sys.modules[__name__]))


def members(classes: ModuleType) -> dict[str, object]:
    """What `transformer_engine` has besides its version, with the layers of `classes`; registers its submodules."""
    names = ("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "DotProductAttention")
    distributed = SimpleNamespace(CudaRNGStatesTracker=object)
    package("transformer_engine.pytorch.fp8", FP8GlobalStateManager=None, fp8_autocast=None)
    package("transformer_engine.pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (), {}))
    package("transformer_engine.pytorch.cpp_extensions", cast_to_fp8=None)
    layers = {name: getattr(classes, name) for name in names}
    return {
        "common": SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object)),
        "pytorch": package("transformer_engine.pytorch", **layers, distributed=distributed),
    }


def package(name: str, **contents) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)  # libraries look for it with importlib.util.find_spec
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module
