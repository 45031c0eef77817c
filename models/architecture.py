"""What a decoder-only transformer is, apart from its weights: the one description that every builder reads.

Families (families/llama.py, ...) make an `Architecture` from a Hugging Face config.json. All of them share RMSNorm
before attention and MLP, rotary positions and a gated MLP; what differs is a field here.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

# Fields of config.json for the layers that files append for multi-token prediction: four spellings.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): frequencies that turn fewer than beta_slow times over the original length are divided
    by `factor`, those that turn more than beta_fast times are kept, with a linear ramp over the channels between.

    truncate: round the ends of the ramp outwards to whole channels.
    cos_sin_factor: multiplies cosine and sine.
    softmax_factor: multiplies the scale of the attention logits.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    cos_sin_factor: float
    softmax_factor: float


@dataclass(frozen=True)
class QueryScaling:
    """Llama 4's: queries times 1 + beta log(1 + n), where n original lengths lie before the token."""

    beta: float
    original_max_position_embeddings: int

    def factors(self, positions_R: Tensor) -> Tensor:
        """[R], in fp32 by the operations of transformers in their order, so that they are bit-equal."""
        lengths = torch.floor(positions_R / self.original_max_position_embeddings)
        return 1 + self.beta * torch.log(1 + lengths)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864).

    interleaved: pairs of channels that turn together are neighbours, else they are half the width apart.
    query_scaling: queries, rotated, also grow with their position.
    """

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None
    interleaved: bool = False
    query_scaling: QueryScaling | None = None

    @property
    def cos_sin_factor(self) -> float:
        return self.scaling.cos_sin_factor if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def softmax_factor(self) -> float:
        return self.scaling.softmax_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def inv_freq(self, rotary_dim: int) -> Tensor:
        """Inverse frequencies, float32 of shape [rotary_dim / 2].

        Each operation is the one of transformers' modeling_rope_utils.py, in the same order, so the result is
        bit-equal to it. Megatron-Core's own llama3 scaling fixes the constants 1, 4 and 8192; this one does not.
        """
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        if isinstance(self.scaling, YarnScaling):
            return _yarn(self.theta**exponents, self.theta, self.scaling)
        inv_freq = 1.0 / (self.theta**exponents)
        if isinstance(self.scaling, LinearScaling):
            return inv_freq / self.scaling.factor
        if isinstance(self.scaling, Llama3Scaling):
            return _llama3(inv_freq, self.scaling)
        return inv_freq


def _llama3(inv_freq: Tensor, s: Llama3Scaling) -> Tensor:
    old_length = s.original_max_position_embeddings
    low_freq_wavelength = old_length / s.low_freq_factor
    high_freq_wavelength = old_length / s.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > low_freq_wavelength, inv_freq / s.factor, inv_freq)
    smooth = (old_length / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smoothed = (1 - smooth) * scaled / s.factor + smooth * scaled
    between = ~(wavelength < high_freq_wavelength) & ~(wavelength > low_freq_wavelength)
    return torch.where(between, smoothed, scaled)


def _yarn(pos_freqs: Tensor, theta: float, s: YarnScaling) -> Tensor:
    dim = 2 * pos_freqs.numel()

    def channel(turns: float) -> float:
        """The channel that turns this often over the original length."""
        return dim * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (s.factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept


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
class Architecture:
    """A decoder-only transformer.

    num_kv_heads: key/value heads (groups of query heads), a divisor of num_heads.
    head_dim: width of a query and key head; num_heads * head_dim need not equal hidden_size.
    rotary_dim: channels of a head that are rotated.
    qkv_bias: q, k and v projections have a bias.
    linear_bias: so do all other projections, the router among them.
    qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
    joint_qk_norm: that norm is over the channels of all heads together.
    zero_centered_norm: every RMSNorm multiplies by 1 + its weight, but that inside of Gated DeltaNet.
    output_gate: attention's output is multiplied by a sigmoid, channel by channel, of a gate beside the queries.
    windows: for each layer, how many tokens a token sees, itself included; None: all. () means None everywhere.
    sinks: the softmax of each head has one more, learned logit that no value belongs to.
    clamped_swiglu: gpt-oss's activation instead of SwiGLU.
    tie_embeddings: the output projection is the embedding matrix.
    max_positions: longest sequence that the model was made for.
    dtype: "float32", "bfloat16" or "float16": the type the weights were published in.
    critic: the output projection has one row, which gives an expected return instead of logits (`as_critic`).
    tensor_prefix: what Hugging Face files call the model without its output projection.
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
    sinks: bool = False
    clamped_swiglu: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    delta: GatedDelta | None = None
    tensor_prefix: str = "model."
    left_out: tuple[str, ...] = ()
    mtp_layers: int = 0
    critic: bool = field(default=False, repr=False)

    def text_only(self) -> "Architecture":
        """The same model, called in files as a text model is that no multimodal one is around."""
        return replace(self, tensor_prefix="model.")

    def as_critic(self) -> "Architecture":
        return replace(self, critic=True, tie_embeddings=False)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Whether Gated DeltaNet takes attention's place in this layer."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]
