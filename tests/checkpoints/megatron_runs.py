"""Folders as a run of Megatron-LM or Megatron-Bridge leaves them: one step of plain Megatron-Core, then its own save.

What stands in them and how it is called: Megatron-LM, megatron/training/checkpointing.py (`generate_state_dict`,
`_build_sharded_state_dict_metadata`, `get_rng_state`); Megatron-Bridge, training/checkpointing.py and its docs.
"""

import argparse
import dataclasses
import enum
import inspect
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from support.models import plain_megatron
from support.models.transformers_parity import make_engine
from torch import Tensor, nn

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint.optimizer_state import complete_state
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout, Mesh

TRACKER = "latest_checkpointed_iteration.txt"


@dataclasses.dataclass(frozen=True)
class Held:
    """What plain Megatron-Core held when it saved: logits of `tokens`, without padded columns, and its parameters."""

    tokens: Tensor
    logits: Tensor
    parameters: dict[str, Tensor]


def train_and_save(hf: Path, folder: Path, iteration: int, options: dict[str, Any]) -> Held:
    """A step from the weights of `hf`, and the checkpoint after it in `folder` with its tracker.

    options: `prefix` of all keys; `metadata` of the sharded state dict; `optimizer`, how its state is
    sharded; `bridge`, to add what Megatron-Bridge adds; `vocab_multiple`, as --make-vocab-size-divisible-by.
    """
    mesh = Mesh.create(Layout().with_world(1))
    arch = read_architecture(hf)
    multiple = options.get("vocab_multiple", 128)
    padded = -(-arch.vocab_size // multiple) * multiple
    model = plain_megatron.build(arch, mesh, padded)
    plain_megatron.fill(model, arch, hf, mesh, padded)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, ddp_config, model, pg_collection=mesh.megatron)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    complete_state(optimizer)
    torch.manual_seed(iteration)
    for parameter in wrapped.parameters():
        vars(parameter)["main_grad"].normal_()
    optimizer.step()

    sharding = {
        "distrib_optim_sharding_type": options.get("optimizer", "fully_reshardable"), "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True, **options.get("metadata", {}),
    }  # fmt: skip
    metadata = {**sharding, "dp_cp_group": mesh.dp_context}
    state = {
        "args": _arguments(model),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "model": model.sharded_state_dict(prefix=options.get("prefix", ""), metadata=metadata),
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": iteration},
        "rng_state": ShardedObject("rng_state", [_rng_state()], (1, 1), (0, 0), replica_id=0),
        "rerun_state_machine": {"mode": "disabled"},
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    into = folder / f"iter_{iteration:07d}"
    into.mkdir(parents=True)
    strategy = get_default_save_sharded_strategy("torch_dist")
    dist_checkpointing.save(state, str(into), strategy, content_metadata=sharding)
    (folder / TRACKER).write_text(str(iteration))
    if options.get("bridge"):
        _add_bridge(folder, into, model, arch.vocab_size, iteration)
    tokens = torch.arange(24)[None] * 11 % arch.vocab_size
    return Held(tokens, _logits(model, tokens)[..., : arch.vocab_size], _parameters(model))


def logits(path: Path, tokens: Tensor) -> Tensor:
    """Of the model that isoloss trains with model.path=PATH, for the second token and those after it."""
    sample = Sample(tokens[0], torch.arange(tokens.shape[1]) > 0)
    return make_engine(path, "fp32").logits([sample])[0][1:].float()


def _arguments(model: GPTModel) -> argparse.Namespace:
    """Those of Megatron-LM that lead to this model, and some that are no plain values."""
    config = model.config
    same = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "normalization", "qk_layernorm", "add_qkv_bias", "add_bias_linear", "rotary_interleaved", "moe_ffn_hidden_size",
        "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk_scaling_factor", "softmax_type",
        "multi_latent_attention",
    )  # fmt: skip
    return argparse.Namespace(
        **{name: getattr(config, name) for name in same},
        norm_epsilon=config.layernorm_epsilon, num_experts=config.num_moe_experts, swiglu=config.gated_linear_unit,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights, group_query_attention=True,
        position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0, use_rope_scaling=False,
        rope_scaling_factor=8.0, rotary_seq_len_interpolation_factor=None, apply_layernorm_1p=False, vocab_size=None,
        params_dtype=torch.float32, attention_backend=AttnBackend.auto, activation=nn.functional.silu,
        weights=torch.ones(3), betas={0.9, 0.95}, path=Path("ckpt"), order=OrderedDict(first=1),
    )  # fmt: skip


def _rng_state() -> dict[str, Any]:
    return {"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}


@torch.no_grad()
def _logits(model: GPTModel, tokens: Tensor) -> Tensor:
    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    # Where Transformer Engine is missing, Megatron-Core's router asks for a name that it did not import.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        return model.eval()(tokens, torch.arange(length)[None], future)  # a tenth is dropped out in training


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _add_bridge(folder: Path, into: Path, model: GPTModel, vocab_size: int, iteration: int) -> None:
    for path in (into / "train_state.pt", folder / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(iteration)}, path)
    (into / "tokenizer").mkdir()
    (into / "tokenizer" / "tokenizer_config.json").write_text("{}")
    provider = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **{field.name: as_yaml(getattr(model.config, field.name)) for field in dataclasses.fields(model.config)},
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type, "vocab_size": vocab_size,
        "rotary_base": 10000, "rotary_percent": 1.0, "rope_scaling": False, "rope_scaling_factor": 1.0,
        "make_vocab_size_divisible_by": 128, "should_pad_vocab": True, "hf_model_id": "somebody/tiny",
    }  # fmt: skip
    container = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": provider,
        "train": {"_target_": "megatron.bridge.training.config.TrainingConfig", "train_iters": iteration},
    }
    (into / "run_config.yaml").write_text(yaml.safe_dump(container))


def as_yaml(value: Any) -> Any:
    """As Megatron's dump of a configuration writes it: functions, types and enumerations by their name."""
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, enum.Enum):
        return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}", "_args_": [value.value]}
    if inspect.isroutine(value) or inspect.isclass(value):
        module = inspect.getmodule(value)
        return {"_target_": f"{module.__name__ if module else '?'}.{value.__qualname__}", "_call_": False}
    if isinstance(value, list | tuple):
        return [as_yaml(each) for each in value]
    return value if isinstance(value, str | int | float | None) else {"_target_": type(value).__qualname__}
