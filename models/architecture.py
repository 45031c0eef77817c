"""What a decoder-only transformer is, apart from its weights: the one description that every builder reads.

Families (families/llama.py, ...) make an `Architecture` from a Hugging Face config.json. All of them share RMSNorm
before attention and MLP, rotary positions and a gated MLP; what differs is a field here.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from isoloss.models.rope import Rope

# Fields of config.json for the layers that files append for multi-token prediction: four spellings.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class ExpertNames:
    """What Hugging Face files call the experts of a layer, below `model.layers.N.`.

    module: of router and experts.
    projections: of an expert: gate, up, down.
    stacked: gate_up_proj and down_proj hold those of all experts: as `rows` (gate above up, Qwen3.5), or `transposed`,
        gate and up interleaved, with biases (gpt-oss).
    selection_bias, shared, shared_gate: of the selection bias, of the shared experts and of their gate, below the
        module.
    """

    module: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: Literal["", "rows", "transposed"] = ""
    selection_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    dense_layers: so many layers at the start keep a dense MLP.
    score: router logits become scores by `softmax` over all experts or by `sigmoid`.
    selection_bias: a bias for each expert that is added to the scores for the selection only (arXiv:2408.15664).
    groups, groups_kept: experts are chosen among the best groups, by the sum of each group's two highest scores.
    normalize: the weights of the chosen experts are divided by their sum.
    scaling: then multiplied by this.
    shared_size: width of the MLP that sees every token; 0: there is none.
    shared_gate: its output is multiplied by a sigmoid of a product of the token with a vector.
    """

    count: int
    top_k: int
    intermediate_size: int
    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scaling: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values from low-rank latents.

    q_rank: width of the query latent, None where queries are projected directly.
    kv_rank: that of keys and values.
    nope_dim + rope_dim: width of a query and key head without and with rotary positions.
    value_dim: of a value head.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (arXiv:2412.06464), a linear attention, in place of attention in some layers.

    key_heads, value_heads: value head h reads key head h // (value_heads / key_heads).
    key_dim, value_dim: widths of a query or key head, and of a value head.
    conv_width: tokens that the causal convolution of queries, keys and values sees, its own included.
    layers: for each layer of the model, whether it is one of these.
    woven: files hold what is projected of a token in two tensors, key head by key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]
    woven: bool = False

    @property
    def channels(self) -> int:
        """Of queries, keys and values together: what the convolution sees."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Values:
    """Value heads of grouped-query attention that are not as wide as its keys.

    scale: what values are multiplied by.
    """

    dim: int
    scale: float


@dataclass(frozen=True)
class Windowed:
    """What layers with a window have in place of what the others have: the fields of these names of `Architecture`."""

    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: Rope


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer.

    num_kv_heads: key/value heads (groups of query heads), a divisor of num_heads.
    head_dim: width of a query and key head; num_heads * head_dim need not equal hidden_size.
    softmax_scale: what the product of a query and a key is multiplied by; None: 1 / sqrt(head_dim).
    rotary_dim: channels of a head that are rotated.
    qkv_bias: q, k and v projections have a bias.
    linear_bias: so do all other projections, the router among them.
    qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
    joint_qk_norm: that norm is over the channels of all heads together.
    zero_centered_norm: every RMSNorm multiplies by 1 + its weight, but that inside of Gated DeltaNet.
    output_gate: attention's output is multiplied by a sigmoid, channel by channel, of a gate beside the queries.
    windows: for each layer, how many tokens a token sees, itself included; None: all. () means None everywhere.
    sinks: for each layer, whether the softmax of each head has one more, learned logit that no value belongs to. ()
        means False everywhere.
    sinks_name: what Hugging Face files call them, below `self_attn.`.
    values, windowed: attention whose values, or whose layers with a window, differ.
    keys_as_values: layers without a window project no values: theirs are the keys before norm and rotation.
    value_norm: RMSNorm over each value head, without a weight.
    clamped_swiglu: gpt-oss's activation instead of SwiGLU.
    geglu: GELU (by tanh) of the gate instead of SwiGLU.
    sandwich_norm: what attention and the MLP give is normed as well, before it is added to the residual stream.
    layer_scalar: what a layer gives is multiplied by a number of its own, which is not trained.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to the type of the weights.
    logit_softcap: logits z become c tanh(z / c).
    tie_embeddings: the output projection is the embedding matrix.
    max_positions: longest sequence that the model was made for.
    dtype: "float32", "bfloat16" or "float16": the type the weights were published in.
    critic: the output projection has one row, which gives an expected return instead of logits (`as_critic`).
    tensor_prefix, head_prefix: what Hugging Face files call the model without its output projection, and what they put
        before that one's name.
    text_class: of the text model of a multimodal one, how config.json calls it where it stands alone.
    left_out: beginnings of the names of other tensors that files may hold, such as those of a vision tower, which take
        no part in what the model computes and are not trained.
    mtp_layers: layers for multi-token prediction that files append after the last one. They take no part in what the
        model computes and are not trained.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_positions: int
    dtype: str
    rotary_dim: int
    linear_bias: bool = False
    joint_qk_norm: bool = False
    zero_centered_norm: bool = False
    output_gate: bool = False
    windows: tuple[int | None, ...] = ()
    sinks: tuple[bool, ...] = ()
    sinks_name: str = "sinks"
    values: Values | None = None
    windowed: Windowed | None = None
    softmax_scale: float | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    clamped_swiglu: bool = False
    geglu: bool = False
    sandwich_norm: bool = False
    layer_scalar: bool = False
    scaled_embedding: bool = False
    logit_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    delta: GatedDelta | None = None
    tensor_prefix: str = "model."
    head_prefix: str = ""
    text_class: str = field(default="", compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)
    mtp_layers: int = 0
    critic: bool = field(default=False, repr=False)

    def text_only(self) -> "Architecture":
        """The same model, called in files as a text model is that no multimodal one is around."""
        return replace(self, tensor_prefix="model.", head_prefix="")

    def as_critic(self) -> "Architecture":
        return replace(self, critic=True, tie_embeddings=False)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_sinks(self, layer: int) -> bool:
        return bool(self.sinks) and self.sinks[layer]

    def kv_heads(self, layer: int) -> int:
        return self.windowed.num_kv_heads if self.windowed and self.window(layer) else self.num_kv_heads

    def key_dim(self, layer: int) -> int:
        """Width of a query and key head."""
        return self.windowed.head_dim if self.windowed and self.window(layer) else self.head_dim

    def value_dim(self, layer: int) -> int:
        """Width of a value head."""
        if self.latent:
            return self.latent.value_dim
        return self.values.dim if self.values else self.key_dim(layer)

    def projects_values(self, layer: int) -> bool:
        return not self.keys_as_values or self.window(layer) is not None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Of layers without a window, and of those with one where they differ."""
        return (self.rope, self.windowed.rope) if self.windowed else (self.rope,)

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """Of each of `ropes`."""
        return (self.rotary_dim, self.windowed.rotary_dim) if self.windowed else (self.rotary_dim,)

    @property
    def differing_attention(self) -> bool:
        """Whether values differ from keys, or layers from each other, as Megatron-Core's attention has it not."""
        return self.values is not None or self.windowed is not None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def layers_differ(self) -> bool:
        """Whether they hold weights of other names or shapes."""
        some_dense = self.experts is not None and self.experts.dense_layers > 0
        return self.delta is not None or self.windowed is not None or some_dense

    def is_linear(self, layer: int) -> bool:
        """Whether Gated DeltaNet takes attention's place in this layer."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]
