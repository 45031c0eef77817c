"""The weight map: every weight of a model, by its Megatron-Core name and by its Hugging Face names.

One map serves loading, exporting, gradients and the checkpoint converter, so they cannot disagree. Names are global
(layers counted over the whole model, not within a pipeline stage) and follow Megatron-Core's local layer spec;
Transformer Engine's spec calls two of the norms `linear_qkv.layer_norm_weight` and `linear_fc1.layer_norm_weight`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from isoloss.models.architecture import Architecture
from isoloss.models.forms import Form, GateUp, Qkv, Replicated, Rows, Vocabulary

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One Megatron-Core parameter.

    name: its global name in GPTModel.
    shape: before tensor parallelism, vocabulary at its true size.
    hf_names, hf_shapes: the Hugging Face tensors, in the order that `form.merge` takes them.
    layer: index of the decoder layer, or None.
    """

    name: str
    shape: Shape
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    form: Form
    layer: int | None = None


def weight_map(arch: Architecture) -> tuple[Weight, ...]:
    """Every weight of the model, in model order. A tied output projection is not a weight of its own."""
    hidden, vocabulary = arch.hidden_size, Vocabulary(arch.vocab_size)
    table: Shape = (arch.vocab_size, hidden)
    weights = [_whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", table, vocabulary)]
    for layer in range(arch.num_layers):
        weights += [*_attention(arch, layer), *_mlp(arch, layer)]
    weights.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), Replicated()))
    if not arch.tie_embeddings:
        weights.append(_whole("output_layer.weight", "lm_head.weight", table, vocabulary))
    return tuple(weights)


def _attention(arch: Architecture, layer: int) -> Iterator[Weight]:
    mcore, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, d = arch.hidden_size, arch.head_dim
    yield _whole(f"{mcore}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), Replicated(), layer)
    qkv = Qkv(arch.num_heads, arch.num_kv_heads, d)
    sizes = (arch.num_heads * d, arch.num_kv_heads * d, arch.num_kv_heads * d)
    rest_of_kind: dict[str, Shape] = {"weight": (hidden,), "bias": ()}
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        rest = rest_of_kind[kind]
        yield Weight(
            name=f"{mcore}self_attention.linear_qkv.{kind}",
            shape=(sum(sizes), *rest),
            hf_names=tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv"),
            hf_shapes=tuple((size, *rest) for size in sizes),
            form=qkv,
            layer=layer,
        )
    if arch.qk_norm:
        for part in "qk":
            yield _whole(
                f"{mcore}self_attention.{part}_layernorm.weight",
                f"{hf}self_attn.{part}_norm.weight",
                (d,),
                Replicated(),
                layer,
            )
    yield _whole(
        f"{mcore}self_attention.linear_proj.weight",
        f"{hf}self_attn.o_proj.weight",
        (hidden, arch.num_heads * d),
        Rows(),
        layer,
    )


def _mlp(arch: Architecture, layer: int) -> Iterator[Weight]:
    mcore, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, wide = arch.hidden_size, arch.intermediate_size
    yield _whole(
        f"{mcore}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,), Replicated(), layer
    )
    yield Weight(
        name=f"{mcore}mlp.linear_fc1.weight",
        shape=(2 * wide, hidden),
        hf_names=(f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
        hf_shapes=((wide, hidden), (wide, hidden)),
        form=GateUp(),
        layer=layer,
    )
    yield _whole(f"{mcore}mlp.linear_fc2.weight", f"{hf}mlp.down_proj.weight", (hidden, wide), Rows(), layer)


def _whole(name: str, hf_name: str, shape: Shape, form: Form, layer: int | None = None) -> Weight:
    return Weight(name, shape, (hf_name,), (shape,), form, layer)
