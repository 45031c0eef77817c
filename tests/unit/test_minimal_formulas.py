"""The formulas that stand in recipes/minimal_rl.py, with numbers worked out by hand."""

import math
import statistics

import pytest
import torch

from isoloss.engine.rl.trajectory import Completion, Prompt
from isoloss.engine.step.losses import TokenInputs
from isoloss.recipes import minimal_rl

PROMPT = Prompt(id="p", tokens=(4, 5, 6), prompt="Sort the letters: cab", answer="abc", source="", extra={})


def completion(*tokens: int, finish: str = "stop") -> Completion:
    return Completion("p/0/0", tokens, tuple(-0.5 * (k + 1) for k in range(len(tokens))), (0,) * len(tokens), finish)


def test_advantages_are_of_a_group():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found_PG = minimal_rl.group_advantages(rewards_PG)
    for rewards_G, found_G in zip(rewards_PG.tolist(), found_PG.tolist()):
        mean, deviation = statistics.mean(rewards_G), statistics.stdev(rewards_G)
        assert found_G == pytest.approx([(reward - mean) / (deviation + 1e-6) for reward in rewards_G], abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -1.28 * 2.0),  # no more is gained above 1 + 0.28,
        (0.5, 2.0, -1.0),  # nor is a loss bounded
        (0.5, -2.0, 0.8 * 2.0),  # nor below 1 - 0.2,
        (1.5, -2.0, 3.0),
    ],
)
def test_the_loss_is_ppos(ratio, advantage, loss, one_rank):
    fields = {"advantages": torch.tensor([advantage]), "rollout_logprobs": torch.tensor([-1.0])}
    logprobs_N, document_N = torch.tensor([-1.0 + math.log(ratio)]), torch.zeros(1, dtype=torch.int64)
    inputs = TokenInputs(logprobs_N, None, None, fields, document_N, 1, one_rank)
    assert minimal_rl.clip_loss(inputs).item() == pytest.approx(loss, rel=1e-6)


def test_a_sample_learns_from_the_completion_alone():
    sample = minimal_rl.to_sample(PROMPT, completion(7, 8), 3.0)
    assert sample.tokens_T.tolist() == [4, 5, 6, 7, 8]
    assert sample.mask_T.tolist() == [False, False, False, True, True]
    assert sample.fields["advantages"].tolist() == [0, 0, 0, 3, 3]
    assert sample.fields["rollout_logprobs"].tolist() == [0, 0, 0, -0.5, -1.0]


def test_the_reward_is_for_a_right_answer_that_was_ended():
    assert minimal_rl.reward(" abc\n", completion(7), PROMPT) == 1
    assert minimal_rl.reward("acb", completion(7), PROMPT) == 0
    assert minimal_rl.reward("abc", completion(7, finish="length"), PROMPT) == 0
