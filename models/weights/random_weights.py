"""Random weights for training from scratch: a function of the seed and the tensor's name, whatever the layout."""

import hashlib
import math

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import RowParallel
from isoloss.models.kinds.weight import Part, Weight


class RandomWeights:
    """A source of weights, made up.

    Each tensor (of each expert) has a generator of its own, seeded from (seed, Hugging Face name): tensors do not
    depend on the order in which, or the rank on which, they are asked for. Matrices are normal(0, std); those that
    write to the residual stream are scaled by 1/sqrt(2 * num_layers) (GPT-2, section 2.3); norms multiply by 1, biases
    and sinks are 0. Of Gated DeltaNet: A is uniform(0, 16), dt_bias 1 (arXiv:2412.06464's code), the convolution
    uniform as torch's.
    """

    def __init__(self, arch: Architecture, seed: int, std: float = 0.02):
        self.seed, self.std = seed, std
        self._norm = 0.0 if arch.zero_centered_norm else 1.0
        self._residual_scale = 1 / math.sqrt(2 * arch.num_layers)

    def whole(self, weight: Weight) -> Tensor:
        """float32, on the CPU."""
        std = self.std * (self._residual_scale if isinstance(weight.mapping, RowParallel) else 1.0)
        return weight.mapping.merge([self._make(part, std) for part in weight.parts])

    def _make(self, part: Part, std: float) -> Tensor:
        generator = generator_of(self.seed, part)
        if ".linear_attn." in part.tensor:
            if part.tensor.endswith(".A_log"):
                return torch.empty(part.shape).uniform_(1e-3, 16.0, generator=generator).log()
            if len(part.shape) == 1:
                return torch.ones(part.shape)
            if part.tensor.endswith(".conv1d.weight"):
                bound = part.shape[-1] ** -0.5
                return torch.empty(part.shape).uniform_(-bound, bound, generator=generator)
        if part.tensor.endswith(("bias", "sinks")):
            return torch.zeros(part.shape)
        if len(part.shape) == 1:
            return torch.full(part.shape, self._norm)
        return torch.normal(0.0, std, part.shape, generator=generator, dtype=torch.float32)


def generator_of(seed: int, part: Part) -> torch.Generator:
    """Return the generator of a tensor, seeded by its Hugging Face name."""
    name = part.tensor if part.row is None else f"{part.tensor}/{part.row}"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
