"""A policy in transformers and torch alone, to hold the numbers of the reinforcement learning loop against."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def write_random(folder: Path, seed: int = 0) -> None:
    """Weights of transformers' making for the folder's config.json, spread so that tokens differ in probability."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)


class PlainPolicy:
    """The model of a Hugging Face folder, in fp64."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def distributions(self, tokens_T: Tensor, temperature: float) -> Tensor:
        """log p(. | tokens before it) of every token but the first, [T - 1, vocabulary]."""
        return torch.log_softmax(self.model(tokens_T[None]).logits[0, :-1].double() / temperature, -1)

    def logprobs(self, tokens_T: Tensor, start: int, temperature: float) -> Tensor:
        """log p(token | tokens before it) of the tokens from `start` on."""
        found = self.distributions(tokens_T, temperature)[start - 1 :]
        return found.gather(1, tokens_T[start:, None]).squeeze(1)

    def entropies(self, tokens_T: Tensor, start: int, temperature: float) -> Tensor:
        found = self.distributions(tokens_T, temperature)[start - 1 :]
        return -(found.exp() * found).sum(-1)
