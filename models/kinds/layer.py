"""A layer of a model: its attention, its MLP and what stands around them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from isoloss.models.kinds.kind import MLP, Attention, Place
from isoloss.models.kinds.weight import Weight


@dataclass(frozen=True)
class Layer:
    """RMSNorm and attention, RMSNorm and an MLP, each added to the residual stream.

    sandwich: outputs of attention and MLP are normed as well, before they are added.
    scalar: the output of the layer is multiplied by a number of its own, which is not trained.
    """

    attention: Attention
    mlp: MLP
    sandwich: bool = False
    scalar: bool = False

    def weights(self, place: Place) -> Iterator[Weight]:
        norm = (place.hidden,)
        yield place.weight("input_layernorm.weight", "input_layernorm.weight", norm)
        yield from self.attention.weights(place)
        before_mlp = "post_attention_layernorm"
        if self.sandwich:
            before_mlp = "pre_feedforward_layernorm"
            yield place.weight("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", norm)
        yield from self.mlp.norm(place, before_mlp)
        yield from self.mlp.weights(place)
        if self.sandwich:
            yield place.weight("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", norm)
        if self.scalar:
            yield replace(place.weight("layer_scalar", "layer_scalar", (1,)), trained=False)

    def fused_norms(self) -> Mapping[str, str]:
        return {**self.attention.fused_norms(), **self.mlp.fused_norms()}
