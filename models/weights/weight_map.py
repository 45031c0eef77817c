"""The weight map: every weight of a model, by its Megatron-Core name and by its Hugging Face names.

One map serves loading, exporting, gradients and the checkpoint converter, so they cannot disagree. Names are global
(layers and experts counted over the whole model, not within a rank) and follow Megatron-Core's local layer spec;
`checkpoint_names` tells what they are called in a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from isoloss.models.architecture import Architecture, GatedDelta, Latent
from isoloss.models.weights.mappings import (
    QKV,
    ColumnParallel,
    GatedMLP,
    GatedQKV,
    InterleavedGatedMLP,
    JoinedGatedMLP,
    ParamMapping,
    Replicated,
    RowParallel,
    Sections,
    TransposedRowParallel,
    Vocabulary,
    WovenSections,
)

Shape = tuple[int, ...]
LM_HEAD = "lm_head.weight"
# Megatron-Core's names of what Gated DeltaNet projects of a token, in their order; the first three go through the
# convolution.
DELTA_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
VALUE_HEAD = "score.weight"  # what transformers calls the head of its classifiers


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, or one row of dim 0 of a tensor that holds the same thing for every expert.

    shape: of the part.
    row, rows: which of how many; None for a whole tensor.
    """

    tensor: str
    shape: Shape
    row: int | None = None
    rows: int | None = None

    @property
    def tensor_shape(self) -> Shape:
        return self.shape if self.rows is None else (self.rows, *self.shape)


@dataclass(frozen=True)
class Weight:
    """One Megatron-Core parameter (or, for `trained=False`, buffer).

    name: its global name in GPTModel.
    shape: before tensor parallelism, vocabulary at its true size.
    parts: what it is made of, in the order that `mapping.merge` takes them.
    layer, expert: which it belongs to, or None.
    trained: False for the experts' selection bias and the scalar of a layer, which no gradient reaches and which are
        always float32.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    mapping: ParamMapping
    layer: int | None = None
    expert: int | None = None
    trained: bool = True


def weight_map(arch: Architecture) -> tuple[Weight, ...]:
    """Every weight of the model, in model order. A tied output projection is not a weight of its own."""
    hidden, vocabulary = arch.hidden_size, Vocabulary(arch.vocab_size)
    table: Shape = (arch.vocab_size, hidden)
    weights = [_whole("embedding.word_embeddings.weight", embedding_name(arch), table, vocabulary)]
    for layer in range(arch.num_layers):
        weights += _layer(arch, layer)
    weights.append(
        _whole("decoder.final_layernorm.weight", f"{arch.tensor_prefix}norm.weight", (hidden,), Replicated())
    )
    if arch.critic:
        weights.append(_whole("output_layer.weight", VALUE_HEAD, (1, hidden), RowParallel()))
    elif not arch.tie_embeddings:
        weights.append(_whole("output_layer.weight", output_name(arch), table, vocabulary))
    return tuple(weights)


def embedding_name(arch: Architecture) -> str:
    """What Hugging Face files call the embedding."""
    return f"{arch.tensor_prefix}embed_tokens.weight"


def output_name(arch: Architecture) -> str:
    """What Hugging Face files call the output projection."""
    return arch.head_prefix + LM_HEAD


def hf_shapes(weights: tuple[Weight, ...]) -> dict[str, Shape]:
    """The Hugging Face tensors that these weights are made of, in the order of the map."""
    return {part.tensor: part.tensor_shape for weight in weights for part in weight.parts}


def num_parameters(arch: Architecture) -> int:
    """Number of weights, each counted once: a tied output projection adds nothing, vocabulary padding is left out."""
    total = 0
    for weight in weight_map(arch):
        size = 1
        for length in weight.shape:
            size *= length
        total += size if weight.trained else 0
    return total


def _layer(arch: Architecture, layer: int) -> Iterator[Weight]:
    mcore, hf = f"decoder.layers.{layer}.", f"{arch.tensor_prefix}layers.{layer}."
    norm: Shape = (arch.hidden_size,)
    yield _whole(f"{mcore}input_layernorm.weight", f"{hf}input_layernorm.weight", norm, Replicated(), layer)
    if arch.delta and arch.is_linear(layer):
        yield from _gated_delta(arch, arch.delta, layer)
    elif arch.latent:
        yield from _latent_attention(arch, arch.latent, layer)
    else:
        yield from _attention(arch, layer)
    before_mlp = "post_attention_layernorm"
    if arch.sandwich_norm:
        before_mlp, after_attention = "pre_feedforward_layernorm", f"{hf}post_attention_layernorm.weight"
        yield _whole(f"{mcore}post_self_attn_layernorm.weight", after_attention, norm, Replicated(), layer)
    yield _whole(f"{mcore}pre_mlp_layernorm.weight", f"{hf}{before_mlp}.weight", norm, Replicated(), layer)
    if arch.has_experts(layer):
        yield from _experts(arch, layer)
    else:
        yield from _mlp(f"{mcore}mlp.", f"{hf}mlp.", arch.hidden_size, arch.intermediate_size, layer)
    if arch.sandwich_norm:
        after_mlp = f"{hf}post_feedforward_layernorm.weight"
        yield _whole(f"{mcore}post_mlp_layernorm.weight", after_mlp, norm, Replicated(), layer)
    if arch.layer_scalar:
        scalar = Part(f"{hf}layer_scalar", (1,))
        yield Weight(f"{mcore}layer_scalar", scalar.shape, (scalar,), Replicated(), layer, trained=False)


def _attention(arch: Architecture, layer: int) -> Iterator[Weight]:
    mcore, hf = f"decoder.layers.{layer}.self_attention.", f"{arch.tensor_prefix}layers.{layer}.self_attn."
    hidden, d = arch.hidden_size, arch.key_dim(layer)
    kv_heads, u = arch.kv_heads(layer), arch.value_dim(layer) if arch.projects_values(layer) else 0
    qkv = (GatedQKV if arch.output_gate else QKV)(arch.num_heads, kv_heads, d, u)
    sizes = (arch.num_heads * d * (2 if arch.output_gate else 1), kv_heads * d, kv_heads * u)
    for kind, rest in _kinds(arch.qkv_bias, (hidden,)):
        parts = tuple(Part(f"{hf}{letter}_proj.{kind}", (size, *rest)) for letter, size in zip("qkv", sizes) if size)
        yield Weight(f"{mcore}linear_qkv.{kind}", (sum(sizes), *rest), parts, qkv, layer)
    if arch.qk_norm:
        for letter, size in zip("qk", sizes):
            shape, mapping = ((size,), ColumnParallel()) if arch.joint_qk_norm else ((d,), Replicated())
            yield _whole(f"{mcore}{letter}_layernorm.weight", f"{hf}{letter}_norm.weight", shape, mapping, layer)
    if arch.has_sinks(layer):
        name, shape = f"{hf}{arch.sinks_name}", (arch.num_heads,)
        yield _whole(f"{mcore}core_attention.softmax_offset", name, shape, ColumnParallel(), layer)
    yield from _output_projection(arch, layer)


def _gated_delta(arch: Architecture, delta: GatedDelta, layer: int) -> Iterator[Weight]:
    """Megatron-Core's in_proj holds all that is made of a token; Hugging Face files hold it in several tensors."""
    mcore, hf = f"decoder.layers.{layer}.self_attention.", f"{arch.tensor_prefix}layers.{layer}.linear_attn."
    hidden, heads = arch.hidden_size, delta.value_heads
    keys, values = delta.key_heads * delta.key_dim, heads * delta.value_dim
    sizes, names = (keys, keys, values), DELTA_SECTIONS[:3]
    all_sizes, all_names = (*sizes, values, heads, heads), DELTA_SECTIONS
    if delta.woven:
        parts = {"in_proj_qkvz": sum(sizes) + values, "in_proj_ba": 2 * heads}
        in_proj = WovenSections(all_sizes, all_names, (4, 2), delta.key_heads)
    else:
        parts = {"in_proj_qkv": sum(sizes), "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        in_proj = Sections(all_sizes, all_names, tuple(parts.values()))
    projections = tuple(Part(f"{hf}{name}.weight", (rows, hidden)) for name, rows in parts.items())
    yield Weight(f"{mcore}in_proj.weight", (sum(all_sizes), hidden), projections, in_proj, layer)
    conv: Shape = (sum(sizes), 1, delta.conv_width)
    yield _whole(f"{mcore}conv1d.weight", f"{hf}conv1d.weight", conv, Sections(sizes, names), layer)
    for name in ("dt_bias", "A_log"):
        yield _whole(f"{mcore}{name}", f"{hf}{name}", (heads,), ColumnParallel(), layer)
    yield _whole(f"{mcore}out_norm.weight", f"{hf}norm.weight", (delta.value_dim,), Replicated(), layer)
    yield _whole(f"{mcore}out_proj.weight", f"{hf}out_proj.weight", (hidden, values), RowParallel(), layer)


def _latent_attention(arch: Architecture, latent: Latent, layer: int) -> Iterator[Weight]:
    mcore, hf = f"decoder.layers.{layer}.self_attention.", f"{arch.tensor_prefix}layers.{layer}.self_attn."
    hidden, heads = arch.hidden_size, arch.num_heads
    queries = heads * arch.head_dim
    if latent.q_rank is None:
        yield _whole(f"{mcore}linear_q_proj.weight", f"{hf}q_proj.weight", (queries, hidden), ColumnParallel(), layer)
    else:
        yield from _latent(f"{mcore}q", f"{mcore}linear_q", f"{hf}q_a_proj", f"{hf}q_a_layernorm", f"{hf}q_b_proj",
                           (latent.q_rank, latent.q_rank, queries), hidden, layer)  # fmt: skip
    yield from _latent(f"{mcore}kv", f"{mcore}linear_kv", f"{hf}kv_a_proj_with_mqa", f"{hf}kv_a_layernorm",
                       f"{hf}kv_b_proj", (latent.kv_rank + latent.rope_dim, latent.kv_rank,
                                          heads * (latent.nope_dim + latent.value_dim)), hidden, layer)  # fmt: skip
    yield from _output_projection(arch, layer)


def _latent(
    norm: str, linear: str, hf_down: str, hf_norm: str, hf_up: str, sizes: Shape, hidden: int, layer: int
) -> Iterator[Weight]:
    """The projection down to a latent, its norm and the projection up again. sizes: of their outputs."""
    down, rank, up = sizes
    yield _whole(f"{linear}_down_proj.weight", f"{hf_down}.weight", (down, hidden), Replicated(), layer)
    yield _whole(f"{norm}_layernorm.weight", f"{hf_norm}.weight", (rank,), Replicated(), layer)
    yield _whole(f"{linear}_up_proj.weight", f"{hf_up}.weight", (up, rank), ColumnParallel(), layer)


def _output_projection(arch: Architecture, layer: int) -> Iterator[Weight]:
    mcore, hf = (
        f"decoder.layers.{layer}.self_attention.linear_proj.",
        f"{arch.tensor_prefix}layers.{layer}.self_attn.o_proj.",
    )
    shape = (arch.hidden_size, arch.num_heads * arch.value_dim(layer))
    yield _whole(f"{mcore}weight", f"{hf}weight", shape, RowParallel(), layer)
    if arch.linear_bias:
        yield _whole(f"{mcore}bias", f"{hf}bias", (arch.hidden_size,), Replicated(), layer)


def _mlp(
    mcore: str,
    hf: str,
    hidden: int,
    wide: int,
    layer: int,
    expert: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Weight]:
    gate, up, down = names
    parts = tuple(Part(f"{hf}{name}.weight", (wide, hidden)) for name in (gate, up))
    yield Weight(f"{mcore}linear_fc1.weight", (2 * wide, hidden), parts, GatedMLP(), layer, expert)
    yield _whole(f"{mcore}linear_fc2.weight", f"{hf}{down}.weight", (hidden, wide), RowParallel(), layer, expert)


def _experts(arch: Architecture, layer: int) -> Iterator[Weight]:
    moe = arch.experts
    assert moe is not None
    mcore, hf = f"decoder.layers.{layer}.mlp.", f"{arch.tensor_prefix}layers.{layer}.{moe.names.module}."
    router = f"{hf}{moe.names.router}"
    shape: Shape = (moe.count, arch.hidden_size)
    yield _whole(f"{mcore}router.weight", f"{router}.weight", shape, Replicated(), layer)
    if arch.linear_bias:
        yield _whole(f"{mcore}router.bias", f"{router}.bias", (moe.count,), Replicated(), layer)
    if moe.selection_bias:
        bias = Part(f"{hf}{moe.names.selection_bias}", (moe.count,))
        yield Weight(f"{mcore}router.expert_bias", bias.shape, (bias,), Replicated(), layer, trained=False)
    if moe.shared_size:
        prefix = f"{hf}{moe.names.shared}."
        yield from _mlp(f"{mcore}shared_experts.", prefix, arch.hidden_size, moe.shared_size, layer)
    if moe.shared_gate:
        gate = f"{hf}{moe.names.shared_gate}.weight"
        yield _whole(f"{mcore}shared_experts.gate_weight", gate, (1, arch.hidden_size), Replicated(), layer)
    for expert in range(moe.count):
        name = f"{mcore}experts.local_experts.{expert}."
        if moe.names.stacked:
            yield from _stacked_expert(arch, name, f"{hf}experts.", layer, expert)
        else:
            prefix, sizes = f"{hf}experts.{expert}.", (arch.hidden_size, moe.intermediate_size)
            yield from _mlp(name, prefix, *sizes, layer, expert, moe.names.projections)


def _stacked_expert(arch: Architecture, mcore: str, hf: str, layer: int, expert: int) -> Iterator[Weight]:
    """An expert whose tensors hold all experts."""
    assert arch.experts is not None
    hidden, wide, count = arch.hidden_size, arch.experts.intermediate_size, arch.experts.count

    def of(tensor: str, shape: Shape) -> tuple[Part]:
        return (Part(hf + tensor, shape, expert, count),)

    fc1, fc2 = f"{mcore}linear_fc1.", f"{mcore}linear_fc2."
    if arch.experts.names.stacked == "rows":
        gate_up, down = of("gate_up_proj", (2 * wide, hidden)), of("down_proj", (hidden, wide))
        yield Weight(f"{fc1}weight", (2 * wide, hidden), gate_up, JoinedGatedMLP(), layer, expert)
        yield Weight(f"{fc2}weight", (hidden, wide), down, RowParallel(), layer, expert)
        return
    gate_up = InterleavedGatedMLP()
    yield Weight(f"{fc1}weight", (2 * wide, hidden), of("gate_up_proj", (hidden, 2 * wide)), gate_up, layer, expert)
    yield Weight(f"{fc1}bias", (2 * wide,), of("gate_up_proj_bias", (2 * wide,)), gate_up, layer, expert)
    yield Weight(
        f"{fc2}weight", (hidden, wide), of("down_proj", (wide, hidden)), TransposedRowParallel(), layer, expert
    )
    yield Weight(f"{fc2}bias", (hidden,), of("down_proj_bias", (hidden,)), Replicated(), layer, expert)


def _kinds(with_bias: bool, rest: Shape) -> tuple[tuple[str, Shape], ...]:
    """What a linear layer has besides its output features: a weight and perhaps a bias."""
    return (("weight", rest), ("bias", ())) if with_bias else (("weight", rest),)


def _whole(
    name: str, hf_name: str, shape: Shape, mapping: ParamMapping, layer: int | None = None, expert: int | None = None
) -> Weight:
    return Weight(name, shape, (Part(hf_name, shape),), mapping, layer, expert)
