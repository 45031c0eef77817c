"""Log-probabilities of prompts; runs on every rank."""

from collections.abc import Sequence
from pathlib import Path

import torch

from isoloss.engine.step.prompts import PromptLogprobs
from isoloss.parallel import top_tokens
from support.models.families import VOCAB
from support.models.transformers_parity import make_engine


def asked(folder: Path, parallel: dict, prompts: Sequence[Sequence[int]], top_k: int) -> list[PromptLogprobs]:
    """Of few positions at a time; without the most probable tokens the log-probabilities are the same."""
    engine = make_engine(folder, "fp64", max_tokens=64, **parallel)
    top_tokens.CHUNK_ELEMENTS = 3 * VOCAB
    found = engine.prompt_logprobs(prompts, top_k)
    for plain, kept in zip(engine.prompt_logprobs(prompts), found, strict=True):
        assert torch.equal(plain.logprobs_T[1:], kept.logprobs_T[1:]) and plain.top_ids_TK.shape[1] == 0
    return found
