"""Random weights for training from scratch: a function of the seed and the tensor's name, whatever the layout."""

import hashlib
import math

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.weights.mappings import RowParallel
from isoloss.models.weights.weight_map import Part, Weight


class RandomWeights:
    """A source of weights, made up.

    Each tensor (of each expert) has a generator of its own, seeded from (seed, Hugging Face name): tensors do not
    depend on the order in which, or the rank on which, they are asked for. Matrices are normal(0, std); those that
    write to the residual stream are scaled by 1/sqrt(2 * num_layers) (GPT-2, section 2.3); norms are 1, biases and
    sinks 0.
    """

    def __init__(self, arch: Architecture, seed: int, std: float = 0.02):
        self.seed, self.std = seed, std
        self._residual_scale = 1 / math.sqrt(2 * arch.num_layers)

    def whole(self, weight: Weight) -> Tensor:
        """float32, on the CPU."""
        std = self.std * (self._residual_scale if isinstance(weight.mapping, RowParallel) else 1.0)
        return weight.mapping.merge([self._make(part, std) for part in weight.parts])

    def _make(self, part: Part, std: float) -> Tensor:
        if part.tensor.endswith(("bias", "sinks")):
            return torch.zeros(part.shape)
        if len(part.shape) == 1:
            return torch.ones(part.shape)
        name = part.tensor if part.row is None else f"{part.tensor}/{part.row}"
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        return torch.normal(0.0, std, part.shape, generator=generator, dtype=torch.float32)
