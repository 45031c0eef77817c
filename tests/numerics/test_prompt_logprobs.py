"""Log-probabilities of prompts and the most probable tokens, on every layout, are those of transformers in fp64."""

import sys
from pathlib import Path

import pytest
import torch
from support.models import transformers_fp64
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_engine
from support.ranks.prompts import asked
from torch import Tensor
from transformers import AutoModelForCausalLM

from isoloss.parallel import UserError
from isoloss.parallel.top_tokens import most_probable

LAYOUTS = {
    "one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "ulysses2": {"ulysses": 2}, "ring2": {"ring": 2}, "dp2": {},
}  # fmt: skip
RANDOM = torch.Generator().manual_seed(6)
PROMPTS = [torch.randint(VOCAB, (length,), generator=RANDOM).tolist() for length in (40, 7, 1, 23)]
TOP = 5


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> tuple[Path, list[Tensor]]:
    """A folder, and the log-probabilities of all tokens at each place behind the first, [T - 1, V]."""
    folder = write_folder("llama", tmp_path_factory.mktemp("llama"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    norm = type(model.model.norm)
    forward = transformers_fp64.doubled(norm.forward, sys.modules[norm.__module__])
    for module in model.modules():
        if isinstance(module, norm):
            module.forward = forward.__get__(module)
    with torch.no_grad():
        return folder, [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in PROMPTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_transformers(layout, wanted, pool):
    folder, logprobs = wanted
    for found in pool.run(1 if layout == "one" else 2, asked, folder, LAYOUTS[layout], PROMPTS, TOP):
        for tokens, of_prompt, whole_TV in zip(PROMPTS, found, logprobs, strict=True):
            assert of_prompt.logprobs_T[0].isnan() and of_prompt.top_ids_TK.shape == (len(tokens), TOP)
            assert of_prompt.top_ids_TK[0].tolist() == [-1] * TOP and of_prompt.top_logprobs_TK[0].isnan().all()
            theirs_T = whole_TV.gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(of_prompt.logprobs_T[1:], theirs_T, rtol=0, atol=1e-12)
            top_TK = whole_TV.topk(TOP)
            assert torch.equal(of_prompt.top_ids_TK[1:], top_TK.indices)
            torch.testing.assert_close(of_prompt.top_logprobs_TK[1:], top_TK.values, rtol=0, atol=1e-12)


def test_of_equal_tokens_the_earlier_comes_first(one_rank):
    """Also where more are asked for than one pass of few positions has logits of."""
    levels = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 9.0])  # the last row is padding
    group = torch.distributed.group.WORLD
    for num in range(1, 8):
        ids, logprobs = most_probable(torch.ones(4, 1), levels[:, None], num, 7, group, temperature=0.5)
        assert ids.tolist() == [[1, 3, 5, 2, 4, 6, 0][:num]] * 4
        assert torch.allclose(logprobs, (2 * levels[:7]).double().log_softmax(0)[ids], atol=1e-6)


def test_what_cannot_be_asked_is_refused(wanted, one_rank):
    engine = make_engine(wanted[0], "fp32")
    with pytest.raises(UserError, match="prompt 1 has no tokens"):
        engine.prompt_logprobs([[1], []])
    for top_k in (-1, VOCAB + 1):
        with pytest.raises(UserError, match=f"top_k={top_k} must be from 0 to the {VOCAB} tokens"):
            engine.prompt_logprobs([[1]], top_k)
    with pytest.raises(UserError, match=f"{VOCAB}"):
        engine.prompt_logprobs([[1, VOCAB]])
