"""Where samples are computed, and what of them once: a prompt of 90 tokens and four completions of 10."""

import torch

from isoloss.engine.batching.balance import CostModel
from isoloss.engine.batching.plan import place
from isoloss.engine.batching.prefixes import Piece
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Layout

PROMPT, BUDGET = torch.arange(90), 150


def samples() -> list[Sample]:
    tokens = [torch.cat([PROMPT, torch.arange(100 * k, 100 * k + 10)]) for k in range(1, 5)]
    return [Sample(each, torch.arange(100) >= 90) for each in tokens]


def test_a_shared_prompt_costs_the_plan_its_tokens_once():
    found = place(samples(), Layout(), BUDGET, CostModel(1.0, 0.0), share_prefixes=True)
    (together,) = found.plan.micro_batches[0]  # 90 + 4 * 10 <= BUDGET
    assert sorted(together) == [0, 1, 2, 3]
    assert found.pieces == [
        [[Piece((0, 1, 2, 3), 0, 90, -1), *(Piece((k,), 90, 100, 0) for k in range(4))]],
    ]


def test_apart_each_sample_is_a_piece():
    found = place(samples(), Layout(), BUDGET, CostModel(1.0, 0.0))
    assert [len(m) for m in found.plan.micro_batches[0]] == [1, 1, 1, 1]
    assert found.pieces == [[[Piece((0,), 0, 100, -1)]] * 4]
