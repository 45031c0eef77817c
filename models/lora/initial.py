"""Random factors of adapters: a function of the seed and the tensor's name, whatever the layout."""

import torch
from torch import Tensor

from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.weights.random_weights import generator_of


class InitialFactors:
    """A source of factors: A is uniform within 1 / sqrt(in), as PEFT's, and B is 0, so that an adapter adds nothing.

    random_b: B is as random as A, for proofs: with B = 0 the gradient of A is 0, whatever is wrong with it.
    """

    def __init__(self, seed: int, *, random_b: bool = False):
        self.seed, self.random_b = seed, random_b

    def whole(self, weight: Weight) -> Tensor:
        """float32, on the CPU."""
        return weight.mapping.merge([self._make(part) for part in weight.parts])

    def _make(self, part: Part) -> Tensor:
        if part.tensor.endswith(".lora_B.weight") and not self.random_b:
            return torch.zeros(part.shape)
        bound = part.shape[1] ** -0.5
        return torch.empty(part.shape).uniform_(-bound, bound, generator=generator_of(self.seed, part))
