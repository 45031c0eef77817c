"""The nouns of a training step.

Shape suffix: T tokens of one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sequence, whole: never split, padded or shifted before `packing`.

    tokens_T: int64 token ids.
    mask_T: bool; True where the token itself is a target (predicted from the tokens before it). mask_T[0] is False: the
        first token has nothing before it.
    group: number of the prompt the sample belongs to; any, the same for all samples of a prompt (prompt-mean losses).
    fields: further per-token float tensors of shape [T] that a loss reads (advantages, old log-probabilities ...);
        fields[k][t] belongs to the prediction *of* token t, like mask_T.
    id: where the sample comes from, such as "file:line" of its row; nothing is computed from it.
    """

    tokens_T: Tensor
    mask_T: Tensor
    group: int = 0
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self):
        if self.tokens_T.ndim != 1 or self.tokens_T.numel() == 0:
            raise ValueError(f"tokens_T must be a non-empty vector, not of shape {tuple(self.tokens_T.shape)}")
        if self.mask_T.shape != self.tokens_T.shape or self.mask_T.dtype != torch.bool:
            raise ValueError(
                f"mask_T must be bool of shape {tuple(self.tokens_T.shape)}, not {self.mask_T.dtype} "
                f"{tuple(self.mask_T.shape)}"
            )
        if not self.mask_T.is_meta and bool(self.mask_T[0]):
            raise ValueError("mask_T[0] must be False: the first token of a sequence is not predicted from anything")
        for name, values in self.fields.items():
            if values.shape != self.tokens_T.shape:
                raise ValueError(
                    f"fields[{name!r}] must have shape {tuple(self.tokens_T.shape)}, not {tuple(values.shape)}"
                )

    def __len__(self) -> int:
        return self.tokens_T.numel()


def outline(sample: Sample) -> Sample:
    """The sample without its values: tensors of the same shapes and types, that are nowhere (torch's meta device)."""
    fields = {name: values_T.to("meta") for name, values_T in sample.fields.items()}
    return replace(sample, tokens_T=sample.tokens_T.to("meta"), mask_T=sample.mask_T.to("meta"), fields=fields)


def grouped_by_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, in their order, with a group for each prompt: the same tokens before the first target.

    A single token there is no prompt: every plain text has its first one. Such a sample is a group of its own.
    """
    groups: dict[object, int] = {}
    grouped = []
    for index, sample in enumerate(samples):
        first = int(sample.mask_T.int().argmax())
        prompt = sample.tokens_T[:first].numpy().tobytes() if first > 1 else index
        grouped.append(replace(sample, group=groups.setdefault(prompt, len(groups))))
    return grouped
