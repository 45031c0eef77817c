"""Compute advantages from rewards: pure functions, in fp64.

Shape suffixes: S completions of the batch, C tokens of one completion.
A completion whose reward is not valid takes no part: not in a mean, not in a deviation, and its advantage is 0.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Added to a standard deviation, as verl does; keeps a group of nearly equal rewards finite.
EPSILON = 1e-6


def group_mean(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return the mean reward of each completion's group, [S]."""
    return _of_groups(rewards_S * valid_S, group_S) / _of_groups(valid_S.double(), group_S).clamp(min=1)


def group_std(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return the standard deviation (unbiased, over n - 1) of each completion's group, [S]; 0 in a group of one."""
    centred_S = dr_grpo(rewards_S, group_S, valid_S)
    count_S = _of_groups(valid_S.double(), group_S)
    return (_of_groups(centred_S.square(), group_S) / (count_S - 1).clamp(min=1)).sqrt()


def grpo(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return (reward - mean) / (deviation + 1e-6) of the group: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300."""
    centred_S = dr_grpo(rewards_S, group_S, valid_S)
    return centred_S / (group_std(rewards_S, group_S, valid_S) + EPSILON)


def dr_grpo(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return reward - mean of the group: division by its deviation favours very easy and very hard prompts (Liu et al.
    2025, "Understanding R1-Zero-like training", arXiv 2503.20783)."""
    # Differences from the smallest of the group: equal rewards, such as 0.1, give 0 and not a rounding error.
    above_S = torch.where(valid_S, rewards_S - _lowest(rewards_S, group_S, valid_S), 0.0)
    return (above_S - group_mean(above_S, group_S, valid_S)) * valid_S


def rloo(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return reward - mean of the others of the group: Ahmadian et al. 2024, arXiv 2402.14740, section 3.2."""
    count_S = _of_groups(valid_S.double(), group_S)
    return dr_grpo(rewards_S, group_S, valid_S) * count_S / (count_S - 1).clamp(min=1)


def discounted_returns(rewards_C: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each token on: R_t = r_t + gamma * R_(t+1)."""
    backwards, later = [], 0.0
    for reward in reversed(rewards_C.tolist()):
        later = reward + gamma * later
        backwards.append(later)
    return torch.tensor(backwards[::-1], dtype=torch.float64)


def gae(rewards_C: Tensor, values_C: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Return the generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438, eq. 16) and the returns that
    the critic learns. values_C[t]: expected return before token t; it is 0 after the last token."""
    next_values_C = torch.cat([values_C[1:], values_C.new_zeros(1)])[: len(values_C)]
    advantages_C = discounted_returns(rewards_C + gamma * next_values_C - values_C, gamma * gae_lambda)
    return advantages_C, advantages_C + values_C


def whiten(per_completion: Sequence[Tensor]) -> list[Tensor]:
    """Shift and scale the values to mean 0 and (unbiased) variance 1 over all tokens of the batch."""
    flat = torch.cat([*per_completion, torch.zeros(0, dtype=torch.float64)])
    if len(flat) < 2:
        return [torch.zeros_like(values_C) for values_C in per_completion]
    scale = (flat.var() + 1e-8).rsqrt()
    return [(values_C - flat.mean()) * scale for values_C in per_completion]


def overlong_punishment(lengths_S: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """Return 0 up to max_new_tokens - buffer, then linearly to -1 at max_new_tokens (DAPO, arXiv 2503.14476, 3.4)."""
    if buffer == 0:
        return torch.zeros(len(lengths_S), dtype=torch.float64)
    return ((max_new_tokens - buffer - lengths_S).double() / buffer).clamp(-1, 0)


def _of_groups(values_S: Tensor, group_S: Tensor) -> Tensor:
    """Return the sum over each completion's group, [S]."""
    sums = torch.zeros(int(group_S.max()) + 1 if len(group_S) else 0, dtype=torch.float64)
    return sums.index_add(0, group_S, values_S.double())[group_S]


def _lowest(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Return the smallest valid reward of each completion's group, [S]; infinity where the group has none."""
    lowest = torch.full((int(group_S.max()) + 1 if len(group_S) else 0,), math.inf, dtype=torch.float64)
    return lowest.scatter_reduce(0, group_S, torch.where(valid_S, rewards_S.double(), math.inf), "amin")[group_S]
