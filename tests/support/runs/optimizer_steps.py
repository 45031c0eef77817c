"""The same optimizer steps twice: by the engine, on every rank, and by transformers and torch.optim alone."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from support.models import transformers_fp64
from support.models.transformers_parity import weights_by_hf_name


@dataclass(frozen=True)
class Steps:
    """losses, norms: of each step, before it and before clipping. weights: after the last, by Hugging Face name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def by_the_engine(
    folder: Path,
    optim: OptimConfig,
    precision: str,
    batches: Sequence[Sequence[Sample]],
    rates: Sequence[float],
    parallel: dict,
    own: Sequence[dict] = (),
) -> Steps:
    """On every rank; `weights` are those of its stage. own: AdamW's numbers of each step, if not those of `optim`."""
    config = Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=64),
        parallel=ParallelConfig(**parallel),
        optim=optim,
        train=TrainConfig(precision=precision),
    )
    engine, done = Engine(config), []
    for samples, rate, numbers in zip(batches, rates, own or [{}] * len(rates), strict=True):
        metrics = engine.forward_backward(samples, cross_entropy(LossConfig()))
        done.append((metrics, engine.optim_step(rate, **numbers)))
    assert all(result.applied for _, result in done)
    return Steps([m.loss for m, _ in done], [r.grad_norm for _, r in done], weights_by_hf_name(engine))


def by_torch(
    folder: Path,
    optim: OptimConfig,
    batches: Iterable[Sequence[Sample]],
    rates: Sequence[float],
    own: Sequence[dict] = (),
) -> Steps:
    """In fp64. Every sequence runs alone; the loss is the mean over all targets of the step."""
    with fp64_model(folder) as model:
        optimizer, losses, norms = adamw(model, optim), [], []
        for samples, rate, numbers in zip(batches, rates, own or [{}] * len(rates), strict=True):
            loss = mean_loss(model, samples)
            for group, decays in zip(optimizer.param_groups, (1, 0)):
                group["betas"], group["eps"] = numbers.get("betas", optim.betas), numbers.get("eps", optim.eps)
                group["weight_decay"] = decays * numbers.get("weight_decay", optim.weight_decay)
            norms.append(step(model, optimizer, loss, rate, numbers.get("clip", optim.clip)))
            losses.append(loss.item())
        return Steps(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


@contextlib.contextmanager
def fp64_model(folder: Path) -> Iterator[nn.Module]:
    """Of transformers, which computes norms and the attention's softmax in fp32 whatever the model's type is: in here
    they are replaced. Rotary angles stay fp32, as they do in the engine."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).double()
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patches:
        transformers_fp64.compute_in(module, patches)
        yield model


def adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Matrices decay; norms and biases, the vectors, do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)


def step(model: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor, rate: float, clip: float) -> float:
    """Backward, clip, step. Returns the norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    if clip > 0 and norm > clip:
        for gradient in gradients:
            gradient *= clip / norm
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm.item()


def mean_loss(model: nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Cross-entropy in nats, averaged over the targets of all samples together."""
    summed, targets = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        logits = model(sample.tokens_T[None]).logits[0, :-1]
        of_tokens = nn.functional.cross_entropy(logits, sample.tokens_T[1:], reduction="none")
        summed = summed + of_tokens[sample.mask_T[1:]].sum()
        targets += int(sample.mask_T.sum())
    return summed / targets


def tokenized(row: dict, tokenizer) -> SimpleNamespace:
    """The chat template of the tiny model written out; the targets are the answer and the token that ends it."""
    question, answer = (message["content"] for message in row["messages"])
    head = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    encoded = tokenizer(
        f"{head}{answer}<|im_end|>\n", return_offsets_mapping=True, return_tensors="pt", add_special_tokens=False
    )
    start_T = encoded["offset_mapping"][0, :, 0]
    mask_T = (start_T >= len(head)) & (start_T < len(head) + len(answer) + len("<|im_end|>"))
    return SimpleNamespace(tokens_T=encoded["input_ids"][0], mask_T=mask_T)
