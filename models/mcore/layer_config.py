"""Megatron's configuration of a model, with what isoloss's own parts of a layer need: they are given that alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from isoloss.models.mcore.kernels import ALL, Kernels


@dataclass
class LayerConfig(TransformerConfig):
    """kernels: which ones a GPU runs the layers with."""

    kernels: Kernels = ALL

    @property
    def recomputed(self) -> Sequence[str]:
        """What Megatron's selective recomputation makes again of a layer; nothing without it."""
        return (self.recompute_modules or ()) if self.recompute_granularity == "selective" else ()
