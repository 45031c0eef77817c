"""Where samples are computed, and what of them once: a prompt of 90 tokens and four completions of 10."""

import torch

from isoloss.engine.batching.balance import CostModel
from isoloss.engine.batching.plan import plan_step
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Layout
from isoloss.parallel.ops.prefix_tree import PrefixTree

PROMPT, BUDGET = torch.arange(90), 150


def samples() -> list[Sample]:
    tokens = [torch.cat([PROMPT, torch.arange(100 * k, 100 * k + 10)]) for k in range(1, 5)]
    return [Sample(each, torch.arange(100) >= 90) for each in tokens]


def test_a_shared_prompt_costs_the_plan_its_tokens_once():
    plan = plan_step(samples(), Layout(), BUDGET, CostModel(1.0, 0.0), share_prefixes=True)
    (together,) = plan.micro_batches[0]  # 90 + 4 * 10 <= BUDGET
    assert sorted(together) == [0, 1, 2, 3]
    assert plan.trees == ((PrefixTree((90, 10, 10, 10, 10), (-1, 0, 0, 0, 0), (1, 2, 3, 4)),),)


def test_apart_each_sample_is_a_piece():
    plan = plan_step(samples(), Layout(), BUDGET, CostModel(1.0, 0.0))
    assert [len(m) for m in plan.micro_batches[0]] == [1, 1, 1, 1]
    assert plan.trees == ((PrefixTree((100,), (-1,), (0,)),) * 4,)
