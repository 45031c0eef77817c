"""Every knob of a run: frozen dataclasses, checked once, before any process group exists.

Hydra selects presets and overrides keys (recipes/launch.py); `config_tree.build` turns the composed tree into these
classes and refuses what it does not know, with the nearest name. Cross-field rules that need no model are in
`__post_init__`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isoloss.models.activation_memory import ActivationMemory
from isoloss.parallel import Layout, UserError
from isoloss.parallel.normalizer import Aggregation


def require(holds: bool, key: str, value: object, mend: str) -> None:
    if not holds:
        raise UserError(f"{key}={value!r} {mend}")


@dataclass(frozen=True)
class ModelConfig:
    """path: a Hugging Face folder (config.json, tokenizer, safetensors), or a checkpoint. tokenizer: another folder to
    take it from. from_scratch: random weights from config.json, the same for every layout for a given train.seed.
    transformer_engine: its fused layers; null means where it imports, a GPU is there and the precision is bf16."""

    path: str = ""
    tokenizer: str | None = None
    from_scratch: bool = False
    transformer_engine: bool | None = None

    def __post_init__(self):
        require(bool(self.path), "model.path", self.path, "must name a Hugging Face folder or a checkpoint")


@dataclass(frozen=True)
class DataConfig:
    """train, eval: JSONL or Parquet files. max_length: tokens; overlong: what happens to a longer row.
    template_kwargs: variables for the chat template, such as {enable_thinking: false}. cache_dir: where tokenized rows
    are kept; default `.cache` beside output_dir."""

    train: tuple[str, ...] = ()
    eval: tuple[str, ...] = ()
    max_length: int = 2048
    overlong: Literal["error", "drop", "truncate"] = "error"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str | None = None

    def __post_init__(self):
        require(self.max_length >= 2, "data.max_length", self.max_length, "must be at least 2 tokens")


@dataclass(frozen=True)
class BatchConfig:
    """global_size: sequences in an optimizer step. max_tokens: token budget of a micro-batch on one model replica,
    before it is sharded over ulysses x ring."""

    global_size: int = 32
    max_tokens: int = 8192

    def __post_init__(self):
        require(self.global_size >= 1, "batch.global_size", self.global_size, "must be at least 1")
        require(self.max_tokens >= 2, "batch.max_tokens", self.max_tokens, "must be at least 2")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees; what is left of the world is data parallelism. sequence_parallel: null means on with tp > 1.
    stage_layers: layers of each of the pp x vpp stages, in the order of the model; empty means balanced by FLOPs, the
    output projection counted. cp_kernel: who exchanges tokens inside attention: isoloss (Ulysses and ring), or a kernel
    of Transformer Engine over ulysses x ring ranks. distributed_optimizer: null means on, except in fp64.
    overlap_grad_reduce: reduce gradients during the backward of the last micro-batch (`Engine.train_step` only)."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ulysses: int = 1
    ring: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] = ()
    cp_kernel: Literal["isoloss", "p2p", "all_gather", "a2a", "a2a+p2p"] = "isoloss"
    sequence_parallel: bool | None = None
    distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool = False

    def __post_init__(self):
        self.layout()
        stages = self.stage_layers
        require(all(count >= 1 for count in stages), "parallel.stage_layers", stages, "must give each at least 1 layer")

    def layout(self) -> Layout:
        """The layout of one model replica (dp = 1)."""
        sequence_parallel = self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel
        return Layout(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ulysses=self.ulysses,
            ring=self.ring,
            ep=self.ep,
            etp=self.etp,
            sequence_parallel=sequence_parallel,
        )


RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj")


@dataclass(frozen=True)
class MemoryConfig(ActivationMemory):
    """What is computed again or kept elsewhere to save memory of the device; all of it Megatron-Core's own mechanisms.

    For activations see ActivationMemory. offload_optimizer: the share of the optimizer's state (moments and fp32
    weights) that lives, and is stepped, in host memory."""

    offload_optimizer: float = 0.0

    def __post_init__(self):
        modules, layers, share = self.recompute_modules, self.recompute_layers, self.offload_optimizer
        known = set(modules) <= set(RECOMPUTE_MODULES)
        require(known, "memory.recompute_modules", modules, f"may only name {', '.join(RECOMPUTE_MODULES)}")
        selective, full = self.recompute == "selective", self.recompute == "full"
        require(selective or not modules, "memory.recompute_modules", modules, "needs memory.recompute=selective")
        require(full or layers is None, "memory.recompute_layers", layers, "needs memory.recompute=full")
        require(layers is None or layers >= 1, "memory.recompute_layers", layers, "must be at least 1, or null for all")
        require(0 <= share <= 1, "memory.offload_optimizer", share, "must be between 0 (none of it) and 1 (all of it)")
        require(self.offload_layers >= 0, "memory.offload_layers", self.offload_layers, "must not be negative")


AUX_LOSSES = ("none", "sequence")
# Names of Megatron-Core's, and why a loss that depends on the samples alone cannot have them.
REFUSED_AUX_LOSSES = {
    "aux_loss": "is balance within each micro-batch: splitting the step otherwise changes it",
    "seq_aux_loss": "takes a packed row for one sequence: packing the samples otherwise changes it",
    "global_aux_loss": "compares each micro-batch with the counts of those before it: their order changes it",
    "sinkhorn": "iterates over the tokens that a rank happens to hold: every layout chooses other experts",
}


@dataclass(frozen=True)
class MoeConfig:
    """Balancing the load of a mixture of experts (docs/moe.md tells which ways keep the promise, and why).

    aux_loss: `sequence` is DeepSeek-V3's loss over each document, weighed by aux_loss_coef. z_loss_coef: of the squared
    log-sum-exp of the router's logits (ST-MoE). bias_update_rate: how far an expert's selection bias moves in a step
    towards balance (aux-loss-free balancing)."""

    aux_loss: str = "none"
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self):
        valid = f"use one of {', '.join(AUX_LOSSES)}"
        why = REFUSED_AUX_LOSSES.get(self.aux_loss, "is unknown")
        require(self.aux_loss in AUX_LOSSES, "moe.aux_loss", self.aux_loss, f"{why}; {valid}")
        for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            value = getattr(self, key)
            require(0 <= value < math.inf, f"moe.{key}", value, "must be a number of at least 0")
        if self.aux_loss == "none":
            mend = "weighs no loss: set moe.aux_loss=sequence, or leave it at 0"
            require(self.aux_loss_coef == 0, "moe.aux_loss_coef", self.aux_loss_coef, mend)
        else:
            mend = f"leaves moe.aux_loss={self.aux_loss} without effect: set it, as to 0.0001, or moe.aux_loss=none"
            require(self.aux_loss_coef > 0, "moe.aux_loss_coef", self.aux_loss_coef, mend)


@dataclass(frozen=True)
class LossConfig:
    """How the loss of a step is aggregated (docs/normalization.md)."""

    aggregation: str = "token-mean"
    norm_length: int | None = None
    count_fully_masked: bool = False

    def __post_init__(self):
        self.weighting()

    def weighting(self) -> Aggregation:
        """Raises UserError where the keys do not fit together."""
        return Aggregation(self.aggregation, self.norm_length, self.count_fully_masked)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. schedule runs from lr (after warmup_steps of linear warm-up) to min_lr at train.steps.
    clip: global gradient norm; 0 switches clipping off."""

    lr: float = 1e-5
    min_lr: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0

    def __post_init__(self):
        require(self.lr >= 0, "optim.lr", self.lr, "must not be negative")
        require(0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"must be between 0 and optim.lr={self.lr}")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "must not be negative")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative")
        require(self.eps > 0, "optim.eps", self.eps, "must be positive")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "must both be in [0, 1)")
        require(self.clip >= 0, "optim.clip", self.clip, "must not be negative (0 switches clipping off)")


@dataclass(frozen=True)
class TrainConfig:
    """steps wins over epochs and goes round the data, reshuffled by (seed, epoch).
    eval_every: steps between evaluations, besides one before the first step and one after the last (0: only those).
    max_bad_steps: consecutive steps with a non-finite loss or gradient (never applied) after which the run ends."""

    steps: int | None = None
    epochs: int = 1
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    deterministic: bool = False
    eval_every: int = 0
    max_bad_steps: int = 3

    def __post_init__(self):
        require(self.steps is None or self.steps >= 1, "train.steps", self.steps, "must be at least 1, or null")
        require(self.seed >= 0, "train.seed", self.seed, "must not be negative")
        require(self.epochs >= 1, "train.epochs", self.epochs, "must be at least 1")
        require(self.eval_every >= 0, "train.eval_every", self.eval_every, "must not be negative (0 switches it off)")
        require(self.max_bad_steps >= 1, "train.max_bad_steps", self.max_bad_steps, "must be at least 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints, besides one after the last step (0: only that one). keep: how many stay.
    resume: go on from the newest checkpoint of output_dir. export_hf: leave a Hugging Face folder at the end."""

    every: int = 0
    keep: int = 2
    resume: bool = False
    export_hf: bool = True

    def __post_init__(self):
        require(self.every >= 0, "checkpoint.every", self.every, "must not be negative (0: only after the last step)")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "must be at least 1")


@dataclass(frozen=True)
class Config:
    """A whole run. `Engine` reads model, batch, parallel, optim and train; the recipes read the rest."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output_dir: str | None = None

    @property
    def distributed_optimizer(self) -> bool:
        chosen = self.parallel.distributed_optimizer
        return self.train.precision != "fp64" if chosen is None else chosen

    def identity(self) -> dict[str, object]:
        """What must not change when a run goes on, by key: what the state in its checkpoints means, and which rows a
        step takes (what is in them: `output.Fingerprint`). Plain values, as a checkpoint holds them."""
        return {
            "train.precision": self.train.precision,
            "parallel.distributed_optimizer": self.distributed_optimizer,
            "train.seed": self.train.seed,
            "batch.global_size": self.batch.global_size,
        }
