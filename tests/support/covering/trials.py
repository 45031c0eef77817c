"""What a row of the covering array runs: its configuration, its loss, and the samples of them all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.parallel import Layout
from isoloss.tools.prove.parity import Case
from isoloss.tools.prove.proof import on_layout, rollout_fields
from support.covering.kinds import KINDS, architecture
from support.covering.rows import Row
from support.covering.steps import Trial
from support.models.families import VOCAB

LOSSES = {
    "clip": AlgorithmConfig(kl_coef=0.2, entropy_coef=0.05, kl_aggregation="seq-mean-token-mean"),
    "cispo": AlgorithmConfig(loss="cispo", clip_low=1.0, clip_high=0.1),
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.03),
    "reinforce": AlgorithmConfig(loss="reinforce", importance="sequence", importance_cap=3.0),
}
WITH_EXPERTS = [kind for kind in KINDS if architecture(kind, 2).experts]
ROUTED = ("clip", "gspo")  # losses with which samples name the experts of their tokens
LONGEST, SOME = 72, 120
BUDGETS = {"single": LONGEST, "several": SOME, "all": 0}
BOUNDS = {"exact": None, "bounded": 2.0, "too-small": 1.0}
RECOMPUTE = {"keep": MemoryConfig(), "full": MemoryConfig("full"), "first": MemoryConfig("full", recompute_layers=1)}
PARTS = ("core_attn", "layernorm")
PARTS_OF_KIND = {
    "qwen3": ("mlp",), "qwen2": ("mlp_act",), "qwen3.5": ("mlp_act",), "gemma-4": ("mlp_act",),
    "qwen3-moe": ("experts",), "gpt-oss": ("moe",), "deepseek-v3": ("mla_up_proj", "shared_experts", "experts"),
    "minimax-m2": ("moe",),
}  # fmt: skip


def samples() -> list[Sample]:
    """Completions of three prompts, one that goes on from the first half of another; one that is masked, one with a
    single target; one that shares nothing and is longer than a chunk of the delta rule; and one of two tokens."""
    rng = np.random.default_rng(5)
    drawn = lambda count: torch.from_numpy(rng.integers(0, VOCAB, count))
    rows: list[tuple[Tensor, int, int]] = []  # tokens, first target, group
    for group, (size, lengths) in enumerate(((3, (20, 1)), (17, (9, 26)), (9, (13, 5)))):
        prompt = drawn(size)
        bodies = [drawn(length) for length in lengths]
        bodies.append(torch.cat([bodies[0][: len(bodies[0]) // 2 + 1], drawn(4)]))
        rows += [(torch.cat([prompt, body]), size, group) for body in bodies]
    rows += [(drawn(LONGEST), 2, 3), (drawn(2), 1, 3)]
    found = []
    for index, (tokens, first, group) in enumerate(rows):
        mask = (torch.arange(len(tokens)) >= first) & (index != 4)
        if index == 6:
            mask[:-1] = False
        near = rng.normal(-np.log(VOCAB), 0.3, len(tokens))  # about what random weights give
        found.append(Sample(tokens, mask, group, rollout_fields(near, mask, rng)))
    return found


def trial(row: Row, model: Path, *, stepped: bool) -> Trial:
    """stepped: with steps in fp32."""
    loss = LossConfig(row.aggregation, LONGEST if row.aggregation == "seq-mean-token-sum-norm" else None)
    moe = KINDS[row.kind][1]
    memory = RECOMPUTE.get(row.recompute) or MemoryConfig("selective", (*PARTS, *PARTS_OF_KIND[row.kind]))
    budget = BUDGETS[row.budget] or sum(map(len, samples()))
    config = RLConfig(
        ModelConfig(str(model), from_scratch=row.kind != "gemma-4"),
        batch=BatchConfig(max_tokens=budget, share_prefixes=row.prefixes == "shared"),
        memory=memory,
        moe=replace(moe, dispatch_bound=BOUNDS[row.messages]),
        loss=loss,
        # A step in proportion to the gradient, not to its sign, which rounding decides where it is near 0.
        optim=OptimConfig(lr=1.0, eps=1.0, clip=1.0, schedule="constant"),
        train=TrainConfig(seed=3),
        rollout=RolloutConfig(max_new_tokens=LONGEST, temperature=0.8),
    )
    policy = None if row.loss == "sft" else replace(config, algorithm=LOSSES[row.loss])
    case = Case(budget, loss, policy)
    config = on_layout(config, Layout.parse(row.layout), "fp64")
    parallel = replace(config.parallel, overlap_grad_reduce=row.reduction == "overlapped")
    config = replace(config, parallel=parallel)
    dealt = row.optimizer != "plain"
    of_steps = replace(parallel, distributed_optimizer=dealt, overlap_param_gather=row.optimizer == "gathered-late")
    in_fp32 = replace(config, parallel=of_steps, train=replace(config.train, precision="fp32"))
    return Trial(case, config, in_fp32 if stepped else None, row.kind in WITH_EXPERTS and row.loss in ROUTED)
