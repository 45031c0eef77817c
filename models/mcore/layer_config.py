"""The options that a model's layers are built with, and Megatron's configuration of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from isoloss.models.mcore.activation_memory import KEEP_ALL, ActivationMemory
from isoloss.models.mcore.kernels import ALL, Kernels
from isoloss.models.rope import Rope


@dataclass(frozen=True)
class BuildOptions:
    """The options of a model's layers, apart from architecture, mesh and precision.

    te: Transformer Engine's modules in place of Megatron's local ones.
    dispatcher: name of the way in which tokens reach their experts.
    deterministic: without Megatron's operations whose repetitions differ on a GPU.
    """

    memory: ActivationMemory = KEEP_ALL
    kernels: Kernels = ALL
    te: bool = False
    dispatcher: str = "alltoall"
    deterministic: bool = False

    def megatron_layer(self, num_experts: int | None) -> ModuleSpec:
        """Return Megatron's spec of a layer, whose slots `isoloss.models.mcore.build` fills."""
        if self.te:
            return get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm=True)
        return get_gpt_layer_local_spec(num_experts, normalization="RMSNorm")


PLAIN = BuildOptions()


@dataclass
class LayerConfig(TransformerConfig):
    """kernels: which ones a GPU runs the layers with.
    ropes: the rotations of the model, each with the channels that it turns, in the order of the rotary table.
    """

    kernels: Kernels = ALL
    ropes: tuple[tuple[Rope, int], ...] = ()

    @property
    def recomputed(self) -> Sequence[str]:
        """Return the modules that Megatron's selective recomputation computes again; none without it."""
        return (self.recompute_modules or ()) if self.recompute_granularity == "selective" else ()
