"""Log-probabilities of the tokens of prompts, and of the most probable tokens in their places.

Shape suffixes: T tokens of a prompt, N targets of a row, K of the most probable tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.batching.sample import Sample
from isoloss.models.model import Model
from isoloss.parallel import UserError


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities at each place of a prompt, from the tokens before it; none at the first.

    logprobs_T: log-probability of each token, fp64; NaN for the first.
    top_ids_TK: ids of the most probable tokens, the most probable first, of equal ones the earlier in the vocabulary;
        -1 at the first place.
    top_logprobs_TK: their log-probabilities, fp64; NaN at the first place.
    """

    logprobs_T: Tensor
    top_ids_TK: Tensor
    top_logprobs_TK: Tensor


def prompt_samples(prompts: Sequence[Sequence[int]], top_k: int, vocab_size: int) -> list[Sample]:
    """Return a sample of each prompt, every token of which but the first is a target.

    Raises UserError for a prompt without tokens and for more tokens than the vocabulary has.
    """
    if not 0 <= top_k <= vocab_size:
        raise UserError(f"top_k={top_k} must be from 0 to the {vocab_size} tokens of the vocabulary")
    samples = []
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {index} has no tokens: leave it out")
        tokens_T = torch.tensor(list(prompt), dtype=torch.int64)
        samples.append(Sample(tokens_T, torch.arange(len(tokens_T)) > 0, id=f"prompt {index}"))
    return samples


def prompt_head(model: Model, top_k: int, row: PackedBatch, hidden: Tensor) -> Tensor:
    """Return for each target its log-probability, ids and log-probabilities, [N, 1 + 2K] fp64. Collective over tp."""
    logprobs_N = model.logprobs(hidden, row.labelled_N, row.targets_N)[0].double()
    if top_k == 0:
        return logprobs_N[:, None]
    ids_NK, logprobs_NK = model.most_probable(hidden, row.labelled_N, top_k)
    return torch.cat([logprobs_N[:, None], ids_NK.double(), logprobs_NK], 1)


def read_prompts(rows: Sequence[Tensor], top_k: int) -> Iterator[PromptLogprobs]:
    """Yield the results of `prompt_head` by prompt. rows: [T, 1 + 2K] each."""
    for row in rows:
        row[0] = torch.nan
        ids_TK = row[:, 1 : 1 + top_k].nan_to_num(-1.0).long()
        yield PromptLogprobs(row[:, 0], ids_TK, row[:, 1 + top_k :])
