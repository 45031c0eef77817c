"""The models of the covering array: tiny ones, one for each kind of layer that has code of its own."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import family_of
from isoloss.parallel import Layout
from isoloss.tools.prove.parity import Case
from isoloss.tools.prove.proof import on_layout
from isoloss.tools.prove.synthetic_rollouts import rollout_fields
from support.covering import Row
from support.covering_steps import Trial
from support.families import GATED_DELTA, VOCAB, published, write_config, write_folder
from support.invariance import QWEN3, WIDE

# Coefficients that give the losses of the routers a weight like that of the cross-entropy.
ROUTER_LOSSES = MoeConfig("sequence", 0.5, 0.1)
# Of each kind what differs from families' model of that name, and how its experts are balanced.
KINDS = {
    "qwen3": (QWEN3, MoeConfig()),
    "qwen2": (WIDE | {"num_key_value_heads": 2}, MoeConfig()),  # tied embeddings, biases, few key/value heads
    "qwen3.5": (GATED_DELTA | QWEN3 | {"full_attention_interval": 2, "head_dim": 20}, MoeConfig()),  # Gated DeltaNet
    "gemma-4": ({"num_key_value_heads": 8, "num_global_key_value_heads": 4}, MoeConfig()),
    "qwen3-moe": (QWEN3 | {"num_experts": 8}, ROUTER_LOSSES),
    "gpt-oss": ({"num_attention_heads": 8, "num_key_value_heads": 4}, ROUTER_LOSSES),  # windows, sinks, biases
    "deepseek-v3": (  # latent attention, a dense layer, shared experts, selection biases
        {"num_attention_heads": 8, "num_key_value_heads": 8},
        MoeConfig("sequence", 0.3, bias_update_rate=0.003),
    ),
    "minimax-m2": (QWEN3 | {"intermediate_size": 28, "head_dim": 8, "rotary_dim": 4}, MoeConfig(z_loss_coef=0.1)),
}


def depth(layout: Layout) -> int:
    """Layers of a model there: two, one of each kind where a model has two kinds of them; and one a stage."""
    return max(2, layout.pp * layout.vpp)


def sizes(kind: str, layers: int) -> dict[str, Any]:
    found = KINDS[kind][0] | {"num_hidden_layers": layers}
    if kind == "gemma-4":
        found["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return found


@cache
def architecture(kind: str, layers: int) -> Architecture:
    config = published(kind, **sizes(kind, layers))
    return family_of(config["architectures"][0]).architecture(config)


def write_model(kind: str, layers: int, path: Path) -> Path:
    """A Hugging Face folder. Gemma's weights are of a file and random: made up its norms and the scalars of its layers
    would be 1, which nobody could tell from left out."""
    if kind == "gemma-4":
        return write_folder(kind, path, **sizes(kind, layers))
    return write_config(path, published(kind, **sizes(kind, layers)))


LOSSES = {
    "clip": AlgorithmConfig(kl_coef=0.2, entropy_coef=0.05, kl_aggregation="seq-mean-token-mean"),
    "cispo": AlgorithmConfig(loss="cispo", clip_low=1.0, clip_high=0.1),
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.03),
    "reinforce": AlgorithmConfig(loss="reinforce", importance="sequence", importance_cap=3.0),
}
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
        # So that a step is about in proportion to the gradient, not its sign, which rounding decides where it is near 0.
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
    of_steps = replace(
        parallel, distributed_optimizer=dealt, overlap_param_gather=row.optimizer == "gathered-late"
    )
    in_fp32 = replace(config, parallel=of_steps, train=replace(config.train, precision="fp32"))
    return Trial(case, config, in_fp32 if stepped else None)
