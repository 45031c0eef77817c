"""Random weights for training from scratch: a function of the seed and the tensor's name, whatever the layout."""

import hashlib
import math

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.weights import weight_map


class RandomWeights:
    """A source of weights like `HFReader`, made up.

    Each tensor has a generator of its own, seeded from (seed, Hugging Face name): tensors do not depend on the order
    in which, or the rank on which, they are asked for. Matrices are normal(0, std); o_proj and down_proj, which write
    to the residual stream, are scaled by 1/sqrt(2 * num_layers) (GPT-2, section 2.3); norms are 1 and biases 0.
    """

    def __init__(self, arch: Architecture, seed: int, std: float = 0.02):
        self.seed, self.std = seed, std
        self._residual_scale = 1 / math.sqrt(2 * arch.num_layers)
        self._shapes = {n: shape for weight in weight_map(arch) for n, shape in zip(weight.hf_names, weight.hf_shapes)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        """float32, on the CPU."""
        shape = self._shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        std = self.std * (self._residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        return torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32)
