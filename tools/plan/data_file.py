"""Plan the rows of a data file: their lengths, and how the steps of a run divide them over ranks and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from isoloss.engine.batching.balance import CostModel, imbalance, make_plan
from isoloss.engine.config.schema import Config
from isoloss.engine.data.dataset import step_indices
from isoloss.engine.rl import setup
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.sft import loop
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout
from isoloss.tools.plan.estimate import sequences

STEPS = 20  # number of planned steps, from the first of the run


@dataclass(frozen=True)
class DataPlan:
    """rows: number of rows kept; in reinforcement learning, prompts. rejected: number of bad rows.
    dropped, truncated: numbers of rows over the limit. tokens: their number in the rows kept.
    histogram: (most tokens, rows) of each class of lengths, by powers of two.
    over_budget: number of rows of more than batch.max_tokens, which run alone.
    longest: tokens of the longest row that a step trains on, with its completion.
    micro_batches: fewest and most over the steps, on each data-parallel rank.
    filled: tokens of a step over micro-batches x batch.max_tokens, mean of the steps.
    imbalance: FLOPs of the costliest rank over the mean of all ranks, mean and worst of the steps.
    """

    rows: int
    dropped: int
    truncated: int
    rejected: int
    tokens: int
    histogram: Sequence[tuple[int, int]]
    over_budget: int
    longest: int
    micro_batches: tuple[int, int]
    filled: float
    imbalance: tuple[float, float]


def plan_data(config: Config, arch: Architecture, layout: Layout) -> DataPlan:
    """Plan data.train. In reinforcement learning every completion has rollout.max_new_tokens tokens.

    Raises UserError for a mistake in files, rows or tokenizer. Tokenized rows are cached, for the run as well.
    """
    if isinstance(config, RLConfig):
        prompts = setup.load_data(config, arch).train
        lengths = np.array([len(prompt.tokens) for prompt in prompts.prompts])
        dropped, truncated, rejected = prompts.dropped, 0, len(prompts.rejects)
        order = prompts.order
        trained, copies = lengths + config.rollout.max_new_tokens, config.rollout.num_generations
    else:
        rows = loop.load_data(config, arch).train
        lengths, dropped, truncated = rows.lengths, rows.stats.dropped, rows.stats.truncated
        rejected = len(rows.rejects)
        trained, copies, order = lengths, 1, rows.order
    costs, budget = CostModel.of(arch, config.lora), config.batch.max_tokens
    counts, fills, imbalances = [], [], []
    for step in range(STEPS):
        taken = step_indices(order, step, config.batch.global_size, config.train.seed)
        of_step = np.repeat(trained[taken], copies)[: sequences(config)]
        plan = make_plan(of_step, layout.dp, budget, costs, layout.pp if layout.vpp > 1 else 1)
        counts.append(plan.num_micro_batches)
        fills.append(of_step.sum() / (plan.num_micro_batches * layout.dp * budget))
        imbalances.append(imbalance(plan, of_step, costs))
    return DataPlan(
        len(lengths), dropped, truncated, rejected, int(lengths.sum()), histogram(lengths),
        int((trained > budget).sum()), int(trained.max()), (min(counts), max(counts)), float(np.mean(fills)),
        (float(np.mean(imbalances)), max(imbalances)),
    )  # fmt: skip


def histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Count rows by length: up to 16 tokens, 32, 64 and so on; leading classes without rows are left out."""
    top = max(4, int(np.ceil(np.log2(lengths.max()))))
    edges = [0, *(2**power for power in range(4, top + 1))]
    counts = [int(((lengths > low) & (lengths <= high)).sum()) for low, high in pairwise(edges)]
    first = next(index for index, count in enumerate(counts) if count)
    return list(zip(edges[1:], counts))[first:]
