"""Policies with other weights than a server has, and what their completions must look like."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import weight_sync
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError
from support.models import families
from support.ranks.rank0 import of_rank_0

VOCAB = 131
MODEL = {"gain": 1.0, "vocab_size": VOCAB, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2}


def policy(seed: int) -> PreTrainedModel:
    return families.make("qwen3", seed=seed, **MODEL).eval()


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


def on_two_ranks(url: str, way: str, model_folder: str, sync_dir: str) -> dict[str, Any]:
    """What a rank sees of an update, a generation, an update refused to each of the ranks that send, and a refused
    request."""
    config = RolloutConfig(backend="sglang", servers=(url,), weight_sync=way, timeout=60.0, sync_dir=sync_dir)
    backend = ServerBackend(config, model_folder, VOCAB, sync_dir, SGLangServer, weight_sync)
    model, seen = policy(5), {}
    drawn = []

    def mine(spoiled: Sequence[int] = ()) -> Iterator[Bucket]:
        """As the trainer makes them: every rank takes part in making each bucket, and some get none of it.

        spoiled: the ranks whose buckets the servers refuse.
        """
        for k, bucket in enumerate(buckets(model)):
            dist.barrier()
            drawn.append(len(bucket))
            holder = k % 2 if backend.receives == "owner" else 0
            has = backend.receives == "every rank" or dist.get_rank() == holder
            yield [(name, tensor[:-1] if holder in spoiled else tensor) for name, tensor in bucket] if has else []

    try:
        backend.update_weights(mine(), 3)
        seen["version"] = backend.weight_version()
        seen["completions"] = of_rank_0(backend.generate(requests(3), Sampling(6)))
        seen["mistakes"], seen["claimed"] = [], []
        for wrong in (
            lambda: backend.update_weights(mine(spoiled=(0, 1)), 4),
            lambda: backend.update_weights(mine(spoiled=(1,) if backend.receives == "owner" else (0,)), 4),
            lambda: backend.generate([Request("row:9", (1,) * 5000)], Sampling(6)),
        ):
            try:
                seen["mistakes"].append(wrong())
            except UserError as error:
                seen["mistakes"].append(str(error))
            seen["claimed"].append((backend.weight_version(), backend._servers[0].weight_version()))
            backend.update_weights(mine(), 5)
        seen["drawn"] = sum(drawn)
    finally:
        backend.close()
    return seen
