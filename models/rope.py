"""Rotary positions: their frequencies, and how they are scaled."""

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
class Proportional:
    """A rotation of this fraction of the pairs of channels, the fastest, by the angles of a rotation of all."""

    fraction: float


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
    scaling: Llama3Scaling | LinearScaling | YarnScaling | Proportional | None = None
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
        if isinstance(self.scaling, Proportional):
            turning = int(self.scaling.fraction * rotary_dim // 2)
            return torch.cat([inv_freq[:turning], torch.zeros(len(inv_freq) - turning)])
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
