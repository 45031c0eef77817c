"""A model on Transformer Engine's stand-in and on Megatron's local spec; runs on the ranks of te_pool.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config import rules
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.optimizer import global_grad_norm
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.grouped_query import GroupedQuery
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.gpt import unwrap
from support.models.transformers_parity import TOKEN_MEAN


def configuration(
    folder: Path, fused: bool, precision: Literal["fp32", "bf16"] = "fp32", moe: MoeConfig | None = None, **parallel
) -> Config:
    """With micro-batches of at most 128 tokens."""
    return Config(
        model=ModelConfig(path=str(folder), transformer_engine=fused),
        batch=BatchConfig(max_tokens=128),
        parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}),
        moe=moe or MoeConfig(),
        optim=OptimConfig(lr=1e-2, schedule="constant", weight_decay=0.1),
        train=TrainConfig(precision=precision),
    )


def make_engine(
    folder: Path, fused: bool, precision: Literal["fp32", "bf16"] = "fp32", moe: MoeConfig | None = None, **parallel
) -> Engine:
    """Only of what the table of compatibility admits, but for a kernel in fp32: users run that in bf16, on a release
    that splits packed rows, and so it is put to the table. The stand-in's attention is plain torch: it runs in fp32."""
    config = configuration(folder, fused, precision, moe, **parallel)
    if precision == "bf16" or config.parallel.cp_kernel == "isoloss":
        return Engine(config)
    newest = max(transformer_engine.SPLITS_PACKED_ROWS_SINCE.values())
    with mock.patch.object(transformer_engine, "installed", lambda: newest):
        in_bf16 = replace(config, train=TrainConfig(precision="bf16"))
        layout = config.parallel.layout().with_world(dist.get_world_size())
        rules.check(in_bf16, read_architecture(folder), layout)
    with mock.patch.object(rules, "check"):
        return Engine(config)


@dataclass(frozen=True)
class Evaluated:
    """terms: of the loss, by name. gradients: of this rank's share of the weights, by Megatron-Core name. arguments:
    those of the last call of Transformer Engine's attention in the first layer, where that is used."""

    logits: Tensor
    loss: float
    terms: dict[str, float]
    grad_norm: float
    gradients: dict[str, Tensor]
    arguments: dict[str, object]


def evaluate(
    folder: Path,
    samples: Sequence[Sample],
    fused: bool,
    parallel: dict,
    precision: Literal["fp32", "bf16"] = "fp32",
    moe: MoeConfig | None = None,
) -> Evaluated:
    """A step."""
    engine = make_engine(folder, fused, precision, moe, **parallel)
    layer = unwrap(engine.chunks[0]).decoder.layers[0]
    of_isoloss = not isinstance(engine.arch.layers[0].attention, GroupedQuery)
    some_module = layer.input_layernorm if of_isoloss else layer.self_attention.linear_proj
    assert type(some_module).__module__.endswith("transformer_engine") == fused
    logits = torch.cat(engine.logits(samples))
    metrics = engine.forward_backward(samples, TOKEN_MEAN)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients()}
    engine.optimizer.prepare_grads()
    arguments = getattr(getattr(layer.self_attention, "core_attention", None), "received", {})
    norm = global_grad_norm(engine.optimizer)
    return Evaluated(logits, metrics.loss, dict(metrics.terms), norm, gradients, arguments)


def train_and_save(folder: Path, out: Path, samples: Sequence[Sample], fused: bool, parallel: dict) -> None:
    """One step, then a checkpoint and a Hugging Face folder."""
    engine = make_engine(folder, fused, **parallel)
    engine.train_step(samples, TOKEN_MEAN)
    engine.save(out / "checkpoint")
    engine.export_hf(out / "hf")


def load_and_train(
    folder: Path, out: Path, samples: Sequence[Sample], fused: bool, parallel: dict
) -> dict[str, Tensor]:
    """The checkpoint of `train_and_save`, and one step more; this rank's weights, by Megatron-Core name."""
    engine = make_engine(folder, fused, **parallel)
    engine.load(out / "checkpoint")
    engine.train_step(samples, TOKEN_MEAN)
    return {name: weight.clone() for name, weight in engine.weights()}


def streamed(folder: Path, fused: bool, parallel: dict) -> dict[str, Tensor]:
    """All weights by Hugging Face name, as a rollout server gets them."""
    engine = make_engine(folder, fused, **parallel)
    return {name: t.clone() for bucket in engine.weight_stream(1 << 20, "every rank") for name, t in bucket}
