"""Runs that cannot be, and what is said of each: the rows that every rule of engine/config/rules.py is tested by.

A row is a model, overrides on top of a run that works, and the words that the one line must have: the key with its
value (the first override, unless `shown` says how it is written), the reason, and a value that would do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.models.families import published, write_config

WIDE = {"num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 256}
MODELS: dict[str, dict[str, Any]] = {
    "dense": published("qwen3", **WIDE | {"num_hidden_layers": 6, "hidden_size": 50, "num_key_value_heads": 4,
                                          "head_dim": 6, "intermediate_size": 76}),
    "tied": published("qwen2", **WIDE | {"num_attention_heads": 12, "num_key_value_heads": 4}),
    "latent": published("deepseek-v3", **WIDE | {"num_key_value_heads": 8, "n_shared_experts": 1}),
    "moe": published("qwen3-moe", **WIDE | {"head_dim": 6, "num_experts_per_tok": 2}),
    "gpt-oss": published("gpt-oss", **WIDE),
    "mistral": published("mistral"),
    "mistral4": published("mistral-4"),
    "delta": published("qwen3.5", **WIDE | {"num_key_value_heads": 4, "linear_num_key_heads": 6,
                                            "linear_num_value_heads": 12}),
    "minimax-m2": published("minimax-m2", **WIDE | {"num_key_value_heads": 2}),
    "mimo-v2-flash": published("mimo-v2-flash", **WIDE | {"num_key_value_heads": 2}),
    "gemma-4": published("gemma-4", **WIDE | {"num_key_value_heads": 8}),
}  # fmt: skip


@dataclass(frozen=True)
class Impossible:
    """world: so many ranks. recipe: `sft`, or `grpo` for what only a critic has."""

    model: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]
    world: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.model} {' '.join(self.overrides)}"


def no(
    model: str, overrides: str, *says: str, shown: str | None = None, world: int = 1, recipe: str = "sft"
) -> Impossible:
    """overrides: with spaces between, the impossible one first."""
    listed = tuple(overrides.split())
    return Impossible(model, listed, (shown or listed[0], *says), world, recipe)


LAYOUT = (
    no("dense", "parallel.tp=0", "at least 1"),
    no("dense", "parallel.pp=-1", "at least 1"),
    no("dense", "parallel.tp=3", "8 attention heads", "[1, 2, 4, 8]", world=3),
    no("latent", "parallel.tp=5", "8 attention heads", "[1, 2, 4, 8]", world=5),
    no("tied", "parallel.tp=6", "4 key/value heads", "[1, 2, 4]", world=6),
    no("minimax-m2", "parallel.tp=4", "2 key/value heads, which are normed together", "[1, 2]", world=4),
    no("mimo-v2-flash", "parallel.tp=4", "2 key/value heads of some of the model's layers", "[1, 2]", world=4),
    no("gemma-4", "parallel.tp=4", "2 key/value heads of some of the model's layers", "[1, 2]", world=4),
    no("dense", "parallel.tp=8", "intermediate_size 76", "[1, 2, 4, 19, 38, 76]", world=8),
    no("dense", "parallel.tp=4 algorithm.advantage=gae rollout.num_generations=1", "hidden_size 50", "value head",
       "[1, 2, 5, 10, 25, 50]", world=4, recipe="grpo"),
    no("dense", "parallel.ulysses=3", "8 attention heads", "[1, 2, 4, 8]", "parallel.ring", world=3),
    no("tied", "parallel.ulysses=8 parallel.tp=2", "6 attention heads of a TP rank", "[1, 2, 3, 6]", world=16),
    no("gpt-oss", "parallel.ulysses=16", "8 attention heads", "[1, 2, 4, 8]", world=16),
    no("delta", "parallel.tp=4", "6 key heads", "Gated DeltaNet", "[1, 2, 3, 6]", world=4),
    no("delta", "parallel.ring=4 parallel.tp=2", "x ulysses=1", "6 value heads of a TP rank", "[1, 2, 3, 6]", world=8),
    no("delta", "parallel.ulysses=8", "x ring=1", "12 value heads of a TP rank", "parallel.ulysses x", world=8),
    no("dense", "parallel.sequence_parallel=true", "parallel.tp of at least 2", "null"),
    no("dense", "parallel.tp=2", "world size 3", "start a multiple", shown="tp 2", world=3),
    no("moe", "parallel.ep=3", "does not divide the 4 ranks", "lower one of them", world=4),
)  # fmt: skip

STAGES = (
    no("dense", "parallel.vpp=2", "parallel.pp of at least 2", "parallel.vpp=1"),
    no("dense", "parallel.pp=7", "6 layers", "at most 6 stages", world=7),
    no("tied", "parallel.pp=4 parallel.vpp=2", "x vpp=2", "4 layers", "at most 4 stages", world=4),
    no("latent", "parallel.pp=2 parallel.vpp=3", "x vpp=3", "4 layers", "at most 4 stages", world=2),
    no("dense", "parallel.stage_layers=[3,3]", "names 2 stages", "makes 1", "leave it at []"),
    no("dense", "parallel.stage_layers=[3,3] parallel.pp=3", "names 2 stages", "makes 3", "leave it at []", world=3),
    no("dense", "parallel.stage_layers=[3,3] parallel.pp=2 parallel.vpp=2", "pp=2 x vpp=2", "makes 4", "[]", world=2),
    no("dense", "parallel.stage_layers=[6,6] parallel.pp=2", "adds up to 12", "6 layers", "leave it at []", world=2),
    no("moe", "parallel.stage_layers=[1,2] parallel.pp=2", "adds up to 3", "4 layers", "leave it at []", world=2),
    no("dense", "parallel.stage_layers=[0,6] parallel.pp=2", "each be at least", shown="stage_layers=(0, 6)", world=2),
)

EXPERTS = (
    no("dense", "parallel.ep=2", "this one is dense", "set it to 1", world=2),
    no("tied", "parallel.etp=2 parallel.tp=2", "this one is dense", "set it to 1", world=2),
    no("moe", "parallel.sequence_parallel=false parallel.tp=2", "experts and parallel.tp > 1", "null", world=2),
    no("latent", "parallel.sequence_parallel=false parallel.tp=4", "experts and parallel.tp > 1", "null", world=4),
    no("moe", "parallel.ep=4", "6 experts", "[1, 2, 3, 6]", world=4),
    no("latent", "parallel.ep=3", "8 experts", "[1, 2, 4, 8]", world=3),
    no("moe", "parallel.etp=8 parallel.tp=8", "expert width 28", "[1, 2, 4, 7, 14, 28]", world=8),
    no("latent", "parallel.tp=8", "shared expert's width 28", "[1, 2, 4, 7, 14, 28]", world=8),
    no("gpt-oss", "parallel.etp=2 parallel.tp=2", "biases in the experts", "set it to 1", world=2),
)

BALANCE = (
    no("dense", "moe.aux_loss=sequence moe.aux_loss_coef=1e-4", "this one is dense", "leave it at none"),
    no("tied", "moe.z_loss_coef=0.001", "this one is dense", "leave it at 0"),
    no("dense", "rollout.routing_replay=true rollout.backend=megatron", "this one is dense", "set it to false",
       recipe="grpo"),
    no("dense", "moe.bias_update_rate=0.001", "this one is dense", "leave it at 0"),
    no("dense", "moe.dispatcher=deepep", "this one is dense", "leave it at alltoall"),
    no("moe", "moe.dispatcher=deepep", "every rank has all experts", "moe.dispatcher=alltoall"),
    no("moe", "moe.dispatcher=hybridep parallel.ep=2 train.precision=fp32", "train.precision=fp32", "alltoall",
       world=2),
    no("moe", "moe.dispatcher=deepep parallel.ep=2 train.precision=bf16", "package deep_ep", "install it", world=2),
    no("dense", "moe.dispatch_bound=1.5", "this one is dense", "leave it at null"),
    no("moe", "moe.dispatch_bound=0.5 parallel.ep=2", "at least 1", world=2),
    no("moe", "moe.dispatch_bound=1.5 parallel.ep=2 moe.dispatcher=deepep train.precision=bf16",
       "messages of its own", "leave it at null", world=2),
    no("moe", "moe.dispatch_bound=1.5", "here it is 1", "leave it at null"),
    no("moe", "moe.dispatch_bound=1.5 parallel.ep=2 kernels.grouped_experts=false", "kernels.grouped_experts=true",
       world=2),
    no("gpt-oss", "moe.dispatch_bound=1.5 parallel.ep=2", "run one by one", "leave it at null", world=2),
    no("moe", "moe.bias_update_rate=0.001", "qwen3_moe have none", "moe.aux_loss=sequence"),
    no("gpt-oss", "moe.bias_update_rate=0.001", "gpt_oss have none", "moe.aux_loss=sequence"),
    no("moe", "moe.aux_loss=seq_aux_loss moe.aux_loss_coef=1e-3", "a packed row for one sequence", "none, sequence",
       shown="moe.aux_loss='seq_aux_loss'"),
    no("moe", "moe.aux_loss=aux_loss moe.aux_loss_coef=1e-3", "within each micro-batch", "none, sequence",
       shown="moe.aux_loss='aux_loss'"),
    no("latent", "moe.aux_loss=global_aux_loss moe.aux_loss_coef=1e-3", "those before it", "none, sequence",
       shown="moe.aux_loss='global_aux_loss'"),
    no("moe", "moe.aux_loss=sinkhorn", "other experts", "none, sequence", shown="moe.aux_loss='sinkhorn'"),
    no("moe", "moe.aux_loss=balanced", "unknown", "none, sequence", shown="moe.aux_loss='balanced'"),
    no("moe", "moe.aux_loss_coef=0.001", "moe.aux_loss=sequence", "leave it at 0"),
    no("moe", "moe.aux_loss=sequence", "set it", "moe.aux_loss=none", shown="moe.aux_loss_coef=0.0"),
    no("moe", "moe.z_loss_coef=-1", "not be negative", shown="moe.z_loss_coef=-1.0"),
)  # fmt: skip

PRECISION_AND_OPTIMIZER = (
    no("dense", "train.precision=fp16", "fp32, bf16, fp64", shown="train.precision='fp16'"),
    no("moe", "parallel.distributed_optimizer=true train.precision=fp64", "train.precision=fp64", "leave it at null"),
    no("dense", "parallel.gradient_accumulation_fusion=true train.precision=fp64", "fp64", "leave it at null"),
    no("moe", "parallel.overlap_param_gather=true train.precision=fp64", "distributed optimizer", "leave it at null"),
    no("dense", "parallel.grad_reduce_dtype=bf16", "train.precision=fp32", "use train.precision=bf16"),
    no("dense", "optim.min_lr=1e-3 optim.lr=1e-4", "between 0 and optim.lr=0.0001", shown="optim.min_lr=0.001"),
    no("dense", "optim.clip=-1", "0 switches clipping off", shown="optim.clip=-1.0"),
    no("dense", "optim.betas=[0.9,1]", "in [0, 1)", shown="optim.betas=(0.9, 1.0)"),
    no("dense", "optim.schedule=step", "constant, linear, cosine", shown="optim.schedule='step'"),
)

KERNELS = (
    no("dense", "kernels.attention=fa3", "flash_attn_interface", "auto"),
    no("dense", "kernels.attention=fa4", "auto, fa2, fa3, blocks", shown="kernels.attention='fa4'"),
)

# What else its rules refuse takes an installed one: tests/te/test_te_rules.py.
TRANSFORMER_ENGINE = (
    no("dense", "model.transformer_engine=true", "does not import here", "model.transformer_engine=false"),
    no("dense", "parallel.cp_kernel=p2p train.precision=bf16", "a kernel of Transformer Engine", "cp_kernel=isoloss"),
)

MEMORY = (
    no("dense", "memory.offload_optimizer=0.5 parallel.grad_reduce_dtype=bf16 train.precision=bf16", "fp32 gradients",
       "use parallel.grad_reduce_dtype=fp32, or 0"),
    no("dense", "parallel.overlap_param_gather=true memory.offload_optimizer=0.5 train.precision=bf16",
       "memory.offload_optimizer", "leave it at null"),
    no("dense", "memory.recompute=some", "none, selective, full", shown="memory.recompute='some'"),
    no("dense", "memory.recompute_modules=[mlp]", "memory.recompute=selective", shown="recompute_modules=('mlp',)"),
    no("dense", "memory.recompute_modules=[mlp] memory.recompute=full", "memory.recompute=selective",
       shown="recompute_modules=('mlp',)"),
    no("dense", "memory.recompute_modules=[attention] memory.recompute=selective", "core_attn",
       shown="recompute_modules=('attention',)"),
    no("moe", "memory.recompute_modules=[moe_act] memory.recompute=selective", "core_attn, mlp, moe",
       shown="recompute_modules=('moe_act',)"),
    no("dense", "memory.recompute_modules=[experts] memory.recompute=selective", "names experts", "no experts",
       "core_attn, mlp, layernorm"),
    no("dense", "memory.recompute_modules=[moe,mlp] memory.recompute=selective", "names moe", "no experts",
       "core_attn, mlp, layernorm"),
    no("tied", "memory.recompute_modules=[shared_experts] memory.recompute=selective", "no shared experts",
       "core_attn, mlp, layernorm"),
    no("moe", "memory.recompute_modules=[shared_experts] memory.recompute=selective", "no shared experts",
       "core_attn, moe, layernorm"),
    no("moe", "memory.recompute_modules=[mlp] memory.recompute=selective", "experts in every layer",
       "core_attn, moe, layernorm"),
    no("moe", "memory.recompute_modules=[mlp_act] memory.recompute=selective", "experts in every layer",
       "core_attn, moe, layernorm"),
    no("gpt-oss", "memory.recompute_modules=[core_attn,mlp] memory.recompute=selective", "names mlp",
       "core_attn, moe, layernorm"),
    no("dense", "memory.recompute_modules=[mla_up_proj] memory.recompute=selective", "no latent attention",
       "core_attn, mlp, layernorm"),
    no("gpt-oss", "memory.recompute_modules=[mla_up_proj] memory.recompute=selective", "no latent attention",
       "core_attn, moe, layernorm"),
    no("dense", "memory.recompute_layers=2", "memory.recompute=full"),
    no("dense", "memory.recompute_layers=2 memory.recompute=selective", "memory.recompute=full"),
    no("dense", "memory.recompute_layers=0 memory.recompute=full", "at least 1, or null"),
    no("dense", "memory.recompute_layers=7 memory.recompute=full", "6 layers", "null for all"),
    no("latent", "memory.recompute_layers=4 memory.recompute=full parallel.pp=2 parallel.stage_layers=[3,1]",
       "3 layers of the largest", "null for all", world=2),
    no("dense", "memory.offload_optimizer=1.5 train.precision=bf16", "in [0, 1]"),
    no("dense", "memory.offload_optimizer=-0.5 train.precision=bf16", "in [0, 1]"),
    no("dense", "memory.offload_optimizer=0.5", "train.precision=fp32", "train.precision=bf16"),
    no("moe", "memory.offload_optimizer=1.0 train.precision=fp64", "train.precision=fp64", "train.precision=bf16"),
    no("tied", "memory.offload_optimizer=1.0 train.precision=bf16 parallel.distributed_optimizer=false",
       "parallel.distributed_optimizer at null"),
    no("dense", "memory.offload_layers=-1", "not be negative"),
    no("dense", "memory.offload_layers=6", "6 layers", "at most 5"),
    no("dense", "memory.offload_layers=2 parallel.pp=2", "parallel.pp=2", "parallel.pp=1", world=2),
    no("moe", "memory.offload_layers=2 memory.recompute=full", "memory.recompute=full", "memory.recompute=none"),
    no("dense", "memory.offload_layers=2 memory.recompute=selective", "recompute=selective", "memory.recompute=none"),
    no("dense", "memory.offload_layers=2 model.transformer_engine=false", "Transformer Engine", "use 0"),
)  # fmt: skip

LOSS = (
    no("dense", "loss.aggregation=mean", "token-mean, seq-mean-token-mean", shown="loss.aggregation='mean'"),
    no("dense", "loss.norm_length=64", "seq-mean-token-sum-norm"),
    no("moe", "loss.aggregation=seq-mean-token-sum-norm", "loss.norm_length", shown="seq-mean-token-sum-norm"),
    no("dense", "loss.norm_length=0 loss.aggregation=seq-mean-token-sum-norm", "positive"),
)

PREFIXES = (
    no("dense", "batch.share_prefixes=true parallel.cp_kernel=p2p", "parallel.cp_kernel=p2p", "whole documents",
       "parallel.cp_kernel=isoloss"),
)  # fmt: skip

GENERATION = (
    no(
        "dense",
        "rollout.backend=megatron parallel.cp_kernel=p2p",
        "parallel.cp_kernel=p2p",
        "transformers",
        recipe="grpo",
    ),
    no(
        "mistral",
        "rollout.backend=sglang rollout.servers=[http://127.0.0.1:9] data.max_length=64",
        "up to 64 tokens",
        "sliding_window is 11",
        "data.max_length to 11",
        recipe="grpo",
    ),
    no(
        "mistral4",
        "rollout.backend=sglang rollout.servers=[http://127.0.0.1:9] data.max_length=64",
        "no class for mistral4",
        "rollout.backend=megatron",
        recipe="grpo",
    ),
)


ROWS = (
    *LAYOUT, *PREFIXES, *GENERATION, *STAGES, *EXPERTS, *BALANCE, *PRECISION_AND_OPTIMIZER, *KERNELS,
    *TRANSFORMER_ENGINE, *MEMORY, *LOSS,
)  # fmt: skip


def write_models(folder: Path) -> None:
    """A folder with config.json for each of MODELS; no weights are needed to refuse."""
    for name, values in MODELS.items():
        write_config(folder / name, values)
