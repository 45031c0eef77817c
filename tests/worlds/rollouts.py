"""Policies with other weights than a server has, and what their completions must look like."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from isoloss.engine.rl.backend import Bucket
from isoloss.engine.rl.trajectory import Completion, Request
from worlds import tiny_models

ARCHITECTURE, CHANGES = "Qwen3ForCausalLM", {"num_hidden_layers": 2}
VOCAB = tiny_models.SIZES["vocab_size"]


def policy(seed: int) -> PreTrainedModel:
    return tiny_models.make(ARCHITECTURE, seed=seed, **CHANGES).eval()


def buckets(model: PreTrainedModel, size: int = 7) -> Iterator[Bucket]:
    """The weights of `model` under their Hugging Face names, `size` tensors at a time."""
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    for start in range(0, len(named), size):
        yield named[start : start + size]


def requests(number: int, length: int = 6) -> list[Request]:
    return [Request(f"row:{i}", tuple((7 * i + 11 * t) % VOCAB for t in range(length))) for i in range(number)]


@torch.no_grad()
def logprobs(model: PreTrainedModel, request: Request, tokens: Sequence[int], temperature: float = 1.0):
    """log p of each token of a completion under softmax(logits / temperature): [T]."""
    context = [*request.prompt_tokens, *tokens]
    logits = model(torch.tensor([context])).logits[0].float() / (temperature or 1.0)
    chosen = torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(context[1:])[:, None])[:, 0]
    return chosen[len(request.prompt_tokens) - 1 :]


def worst(
    model: PreTrainedModel,
    request: Request,
    completion: Completion,
    temperature: float = 1.0,
    version: int | None = None,
) -> float:
    """The largest difference between a completion's log-probabilities and the model's; of one version's tokens."""
    wanted = logprobs(model, request, completion.tokens, temperature)
    gap = (torch.tensor(completion.logprobs) - wanted).abs()
    if version is not None:
        gap = gap[torch.tensor(completion.versions) == version]
    assert gap.numel()
    return float(gap.max())


@torch.no_grad()
def greedy(model: PreTrainedModel, request: Request, length: int) -> tuple[int, ...]:
    context = list(request.prompt_tokens)
    for _ in range(length):
        context.append(int(model(torch.tensor([context])).logits[0, -1].argmax()))
    return tuple(context[len(request.prompt_tokens) :])
