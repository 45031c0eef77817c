"""What a dense decoder-only transformer is, apart from its weights: the one description that every builder reads.

Families (llama.py, qwen2.py, qwen3.py) make an `Architecture` from a Hugging Face config.json. All of them share
RMSNorm before attention and MLP, rotary positions over the whole head, grouped-query attention and a SwiGLU MLP
without biases; what differs is a field here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
class Rope:
    """Rotary position embedding over the whole head dimension."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None

    def inv_freq(self, head_dim: int) -> Tensor:
        """Inverse frequencies, float32 of shape [head_dim / 2].

        Each operation is the one of transformers' modeling_rope_utils.py, in the same order, so the result is
        bit-equal to it. Megatron-Core's own llama3 scaling fixes the constants 1, 4 and 8192; this one does not.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
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


@dataclass(frozen=True)
class Architecture:
    """A dense decoder-only transformer.

    num_kv_heads: key/value heads (groups of query heads), a divisor of num_heads.
    head_dim: width of one head; num_heads * head_dim need not equal hidden_size.
    qkv_bias: q, k and v projections have a bias (no other projection ever has one).
    qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
    tie_embeddings: the output projection is the embedding matrix.
    max_positions: longest sequence that the model was made for.
    dtype: "float32", "bfloat16" or "float16": the type the weights were published in.
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
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]


def num_parameters(arch: Architecture) -> int:
    """Number of weights, each counted once: a tied output projection adds nothing, vocabulary padding is left out."""
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.hidden_size * (q_size + 2 * kv_size) + q_size * arch.hidden_size
    if arch.qkv_bias:
        attention += q_size + 2 * kv_size
    if arch.qk_norm:
        attention += 2 * arch.head_dim
    mlp = 3 * arch.hidden_size * arch.intermediate_size
    layer = attention + mlp + 2 * arch.hidden_size
    vocabulary = arch.vocab_size * arch.hidden_size
    return arch.num_layers * layer + arch.hidden_size + vocabulary * (1 if arch.tie_embeddings else 2)
