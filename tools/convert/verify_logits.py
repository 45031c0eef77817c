"""Check that isoloss, from the checkpoint, and transformers, from the Hugging Face folder, compute the same logits.

Both compute in fp32, one model in memory at a time, on a text and on random tokens. The distance of two correct
evaluations depends on the model (its depth, its outliers), so it is measured: transformers evaluates the same model
once more with other kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isoloss.engine.data.chat import VOCABULARY_FILES, encode, load_tokenizer
from isoloss.models.architecture import Architecture
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.tools.convert.verify_models import TransformersModel, Unverified, isoloss_model

# The first is long enough to distinguish the usual scalings of rotary positions, and sliding windows from none.
LENGTHS = (2048, 257, 64)
# More sequences of the first length, until a token was sent to every expert.
EXTRA_SEQUENCES = 16
# Positions compared in a sequence: with a large vocabulary the logits of all would not fit.
MAX_TARGETS = 512
TEXT = (
    "The loss and the gradient of an optimizer step depend on the samples in it and on nothing else. In 1905, at 26, "
    'she wrote: "f(x) = x^2 + 3x - 7"; and then, naïvely, she asked whether 12,345.67 was a lot.\n'
)
# Relative to the spread (standard deviation) of the logits. On random models of four layers two correct evaluations are
# 1e-5 apart, of twelve up to 2.5e-5; planted faults (exchanged experts, rope scaling ignored, ...) make 2.5 and more.
FLOOR, CEILING = 2e-5, 5e-4
NOISE_FACTOR = 4.0


@dataclass(frozen=True)
class LogitsEvidence:
    """The comparison of logits with transformers.

    lengths: number of tokens of each sequence. text_tokens: number in the first sequence if it is a text, else 0.
    compared: number of logits. max_difference: the largest |isoloss - transformers|. spread: the standard deviation of
    the logits. noise: the largest difference between two evaluations by transformers. tolerance: the limit of
    max_difference. experts: number in all layers together. experts_visited: number of experts that got a token.
    """

    lengths: tuple[int, ...]
    text_tokens: int
    compared: int
    max_difference: float
    spread: float
    noise: float
    tolerance: float
    experts: int
    experts_visited: int


@dataclass(frozen=True)
class Probe:
    """Tokens of a sequence, and the targets whose logits are compared: tokens_T[t] is predicted for t in targets_N."""

    tokens_T: Tensor
    targets_N: Tensor


def compare_logits(
    arch: Architecture, source: WeightSource, hf: Path, dtype: torch.dtype | None = None
) -> LogitsEvidence:
    """Compare the logits of a checkpoint with those of transformers. Raise Unverified if they differ, an expert saw no
    token, or transformers finds other tensors.

    source: the weights of the checkpoint. dtype: their type, if the weights of the folder `hf` are wider.
    """
    text = _text(arch, hf)
    questions, ours, visited = _ask_isoloss(arch, source, text)
    model = TransformersModel(hf, dtype)
    theirs = [model.logits(q.tokens_T, q.targets_N) for q in questions]
    model.other_kernels()
    noise = max(
        _largest(model.logits(q.tokens_T, q.targets_N), wanted)
        for q, wanted in zip(questions, theirs)
        if len(q.tokens_T) <= max(LENGTHS[1], len(text))
    )
    spread = float(torch.cat([wanted.flatten() for wanted in theirs]).std())
    evidence = LogitsEvidence(
        lengths=tuple(len(q.tokens_T) for q in questions),
        text_tokens=len(text),
        compared=sum(wanted.numel() for wanted in theirs),
        max_difference=max(_largest(*pair) for pair in zip(ours, theirs)),
        spread=spread,
        noise=noise,
        tolerance=max(FLOOR * spread, NOISE_FACTOR * noise),
        experts=sum(len(layer) for layer in visited.values()),
        experts_visited=sum(int(layer.sum()) for layer in visited.values()),
    )
    _judge(evidence, visited)
    return evidence


def _judge(evidence: LogitsEvidence, visited: Mapping[int, Tensor]) -> None:
    numbers = f"spread {evidence.spread:.3g}, tolerance {evidence.tolerance:.1e}"
    if not evidence.max_difference <= evidence.tolerance:
        raise Unverified(
            f"logits: isoloss and transformers differ by {evidence.max_difference:.1e} ({numbers}, noise "
            f"{evidence.noise:.1e})"
        )
    if not 0 < evidence.tolerance <= CEILING * evidence.spread:
        raise Unverified(
            f"logits: two evaluations by transformers differ by {evidence.noise:.1e} ({numbers}): too much"
        )
    for layer, experts in visited.items():
        if not experts.all():
            others = evidence.experts - evidence.experts_visited - 1
            raise Unverified(
                f"logits: expert {int(experts.int().argmin())} of layer {layer} (and {others} more of all "
                f"{evidence.experts}) saw none of {sum(evidence.lengths):,} tokens, so nothing is known of what it does"
            )


def _ask_isoloss(
    arch: Architecture, source: WeightSource, text: Tensor
) -> tuple[list[Probe], list[Tensor], Mapping[int, Tensor]]:
    """Return sequences, their logits by isoloss, and the experts of each layer to which they were sent."""
    random = torch.Generator().manual_seed(0)
    lengths = [min(length, arch.max_positions) for length in LENGTHS]
    questions = [_question(tokens_T) for tokens_T in ([text] if len(text) else [])]
    ours: list[Tensor] = []
    with isoloss_model(arch, source) as model:
        lengths += [lengths[0]] * (EXTRA_SEQUENCES if model.visited else 0)
        for number, length in enumerate(lengths):
            if number >= len(LENGTHS) and all(bool(layer.all()) for layer in model.visited.values()):
                break
            questions.append(_question(torch.randint(arch.vocab_size, (length,), generator=random)))
            ours += [model.logits(q.tokens_T, q.targets_N) for q in questions[len(ours) :]]
        return questions, ours, model.visited


def _question(tokens_T: Tensor) -> Probe:
    return Probe(tokens_T, torch.linspace(1, len(tokens_T) - 1, min(len(tokens_T) - 1, MAX_TARGETS)).long().unique())


def _text(arch: Architecture, hf: Path) -> Tensor:
    """Return token ids of a text, or none if the folder has no tokenizer."""
    if not any((hf / name).is_file() for name in VOCABULARY_FILES):
        return torch.zeros(0, dtype=torch.int64)
    tokens = encode(load_tokenizer(str(hf), arch.vocab_size), TEXT)[: arch.max_positions]
    return torch.tensor(tokens if len(tokens) > 1 else [], dtype=torch.int64)


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; NaN, which no tolerance admits, if either holds a NaN."""
    return float((one - other).abs().max())
