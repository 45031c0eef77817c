"""Define every key of a run in frozen dataclasses, which are checked once, before any process group exists.

Hydra selects presets and overrides keys (recipes/launch.py). `parse.build` turns the composed tree into these classes
and refuses unknown keys with the nearest name. A key is defined with its meaning and bounds. Rules between keys that
need no model are in `__post_init__`.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, cast

from isoloss.engine.config.parse import build
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.kernels import Kernels
from isoloss.parallel import UserError
from isoloss.parallel.aggregation import MODES, Aggregation
from isoloss.parallel.layout import MODEL_AXES, Degrees, Layout
from isoloss.parallel.runtime.config_key import Keys, key, require, typed

DATE = "strftime_now"  # transformers' name for the clock that chat templates may call


@dataclass(frozen=True)
class ModelConfig(Keys, group="model"):
    """The model that is trained."""

    path: str = key(
        "",
        "A Hugging Face folder (config.json, tokenizer, safetensors), a checkpoint of isoloss or of Megatron-Core, or "
        "the folder of a run: then its newest checkpoint.",
        required=True,
        refusal="must name a Hugging Face folder or a checkpoint",
    )
    tokenizer: str | None = key(None, "Folder to take the tokenizer from; null: model.path.")
    from_scratch: bool = key(
        False,
        "Start from random weights, not from those in model.path. The same train.seed gives the same on every layout.",
    )
    transformer_engine: bool = key(
        False, "Build the layers from Transformer Engine's modules (docs/transformer_engine.md); for bf16 on a GPU."
    )


@dataclass(frozen=True)
class WeightedFile:
    """A file of a mixture. weight: its rows' part of all rows drawn, next to the weights of the other files."""

    path: str
    weight: float

    def __post_init__(self):
        holds = math.isfinite(self.weight) and self.weight > 0
        require(holds, f"data.train: weight of {self.path}", self.weight, "must be positive and finite")

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class DataConfig(Keys, group="data"):
    """The rows to train on and to evaluate."""

    train: tuple[str | WeightedFile, ...] = key(
        (),
        "Files, folders, globs or names of the hub to train on (docs/data.md); a recipe needs at least one. With "
        "weights, as [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}], rows are drawn in these proportions "
        "(docs/train.md).",
    )
    eval: tuple[str, ...] = key((), "The same for held-out rows, for evaluations, without weights; []: none.")
    max_length: int = key(
        2048,
        "Most tokens of a row; in reinforcement learning, of prompt and completion together.",
        at_least=2,
    )
    overlong: Literal["error", "drop", "truncate"] = key(
        "error",
        "What happens to a longer row: the run stops and names it, or the row is dropped, or its end is cut off. "
        "Prompts are never truncated.",
    )
    max_rejects: int = key(
        0,
        "Bad rows of data.train, and as many of data.eval, that may be left out; output_dir/rejects.jsonl names each "
        "with its file, line and reason. 0: the first one ends the run.",
        at_least=0,
    )
    show_rows: int | None = key(
        None,
        "How many of the first rows are printed as the model gets them, with the tokens that are trained marked; null: "
        "2 on a terminal, none elsewhere.",
        at_least=0,
    )
    columns: Mapping[str, Any] = key(
        {},
        "The columns to read, by isoloss's names of them, such as {question: problem, answer: reward_model.answer}. "
        "Then no other column makes the form of a row (docs/data.md).",
    )
    system: str | None = key(
        None, "A system message for the rows without one. Rows that have one keep it, and the banner counts them."
    )
    template_kwargs: Mapping[str, Any] = key(
        {}, "Variables for the chat template, such as {enable_thinking: false}. A row's own tools reach it as `tools`."
    )
    date: str | None = key(
        None,
        "The day for chat templates that ask for the date (strftime_now), as YYYY-MM-DD. null: the day of the run's "
        "first start, which its checkpoints keep.",
    )
    cache_dir: str | None = key(
        None, "Folder that keeps tokenized rows for the next run; null: .cache next to output_dir."
    )

    def __post_init__(self):
        super().__post_init__()
        try:
            valid = self.date is None or str(date.fromisoformat(self.date)) == self.date
        except ValueError:
            valid = False
        require(valid, "data.date", self.date, "must be a day such as 2026-11-28")
        if not self.is_mixture:
            return
        plain = [file for file in self.train if isinstance(file, str)]
        require(not plain, "data.train", plain, "has no weight, as others have: write {path: FILE, weight: NUMBER}")
        real = Counter(os.path.realpath(path) for path in self.paths("train"))
        twice = [path for path in self.paths("train") if real[os.path.realpath(path)] > 1]
        require(not twice, "data.train", twice, "is one file twice in a mixture: add its weights up")

    @property
    def is_mixture(self) -> bool:
        """Return whether the files of data.train have weights."""
        return any(isinstance(file, WeightedFile) for file in self.train)

    def paths(self, split: Literal["train", "eval"]) -> tuple[str, ...]:
        """Return the files of a split, in their order."""
        return tuple(map(str, self.train if split == "train" else self.eval))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Return the variables for chat templates: data.template_kwargs, and under DATE the day for `strftime_now`."""
        return self.template_kwargs if self.date is None else {**self.template_kwargs, DATE: self.date}


@dataclass(frozen=True)
class BatchConfig(Keys, group="batch"):
    """Sizes of a step. Only global_size changes what is learned."""

    global_size: int = key(
        32,
        "Sequences in an optimizer step, over all ranks; in reinforcement learning, prompts in a generated batch.",
        at_least=1,
    )
    max_tokens: int = key(
        8192,
        "Most tokens in a micro-batch of one model replica, shared by its ulysses x ring ranks. A longer sequence runs "
        "alone. Lower it when memory runs out: the number of micro-batches follows from it.",
        at_least=2,
    )
    share_prefixes: bool | None = key(
        None,
        "Compute once what several samples of a micro-batch begin with alike, such as the prompt of a group. Nothing "
        "but time and memory depends on it. null: in reinforcement learning, but not with kernels of "
        "parallel.cp_kernel that take whole documents.",
    )


@dataclass(frozen=True)
class ParallelConfig(Degrees, group="parallel"):
    """Degrees of parallelism (docs/parallelism.md). The remaining ranks form the data-parallel dimension. None of these
    keys changes the loss.
    """

    stage_layers: tuple[int, ...] = key(
        (),
        "Layers of each of the pp x vpp stages, in the order of the model; []: split so that the stages cost about the "
        "same FLOPs, with the output projection.",
        at_least=1,
    )
    cp_kernel: Literal["isoloss", "p2p", "all_gather", "a2a", "a2a+p2p"] = key(
        "isoloss",
        "What runs attention over ulysses x ring ranks: isoloss, or a kernel of Transformer Engine "
        "(docs/transformer_engine.md).",
    )
    sequence_parallel: bool | None = key(
        None, "Megatron's sequence parallelism: activations between the matrices are split over tp; null: if tp > 1."
    )
    distributed_optimizer: bool | None = key(
        None, "Split the optimizer's state over data-parallel ranks (ZeRO-1); null: unless train.precision is fp64."
    )
    overlap_grad_reduce: bool | None = key(
        None,
        "Reduce gradients during the backward of the last micro-batch, where one call takes the whole step, as in "
        "the recipes (Engine.train_step); null: on a GPU.",
    )
    overlap_param_gather: bool | None = key(
        None,
        "The distributed optimizer's ranks send each other the weights that they stepped during the forward of the "
        "next pass, which waits for each bucket of weights where it first needs one; null: on a GPU, with the "
        "distributed optimizer and memory.offload_optimizer=0.",
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "The type in which gradients are summed, over micro-batches and ranks. bf16 takes half of the memory and of "
        "the exchange, and rounds at every micro-batch: layouts then agree up to the rounding of bf16 only. Needs "
        "train.precision=bf16.",
    )
    gradient_accumulation_fusion: bool | None = key(
        None,
        "Matrix products add weight gradients to the buffer of gradients themselves; null: on a GPU, unless "
        "train.precision is fp64.",
    )

    def __post_init__(self):
        super().__post_init__()
        self.layout()

    def layout(self) -> Layout:
        """Return the layout of one model replica (dp = 1)."""
        sequence_parallel = self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel
        degrees = {axis: getattr(self, axis) for axis in MODEL_AXES}
        return Layout(**degrees, sequence_parallel=sequence_parallel)


@dataclass(frozen=True)
class MemoryConfig(ActivationMemory):
    """Recomputation, and offloading to CPU memory, to save device memory (docs/memory.md). None of these keys changes
    the loss.

    All but check are Megatron-Core's own; the keys of activations are in ActivationMemory."""

    offload_optimizer: float = key(
        0.0,
        "Share of the optimizer's state (moments and fp32 weights) that is kept and stepped in CPU memory. Needs "
        "train.precision=bf16.",
        at_least=0,
        at_most=1,
    )
    check: bool = key(True, "Refuse a run whose planned memory exceeds that of its GPUs (docs/plan.md).")

    def __post_init__(self):
        super().__post_init__()
        modules, layers = self.recompute_modules, self.recompute_layers
        selective, full = self.recompute == "selective", self.recompute == "full"
        require(selective or not modules, "memory.recompute_modules", modules, "needs memory.recompute=selective")
        require(full or layers is None, "memory.recompute_layers", layers, "needs memory.recompute=full")


AUX_LOSSES = ("none", "sequence")
# Names of Megatron-Core's balance losses, and why a loss that depends on the samples alone cannot have them.
REFUSED_AUX_LOSSES = {
    "aux_loss": "is balance within each micro-batch: splitting the step otherwise changes it",
    "seq_aux_loss": "takes a packed row for one sequence: packing the samples otherwise changes it",
    "global_aux_loss": "compares each micro-batch with the counts of those before it: their order changes it",
    "sinkhorn": "iterates over the tokens that a rank happens to hold: every layout chooses other experts",
}


@dataclass(frozen=True)
class MoeConfig(Keys, group="moe"):
    """Balancing the load of experts (docs/moe.md says which methods keep the promise, and why)."""

    aux_loss: str = key(
        "none", "Balance loss: none, or DeepSeek-V3's over each sequence, times aux_loss_coef.", choices=AUX_LOSSES
    )
    aux_loss_coef: float = key(0.0, "Weight of aux_loss (DeepSeek-V3: 1e-4).", at_least=0)
    z_loss_coef: float = key(
        0.0,
        "Weight of the router z-loss, which keeps the router's logits small (ST-MoE: 1e-3); 0: none.",
        at_least=0,
    )
    bias_update_rate: float = key(
        0.0,
        "How far an expert's selection bias moves towards balance in a step (DeepSeek-V3: 1e-3), in models that have "
        "such biases; 0: not at all.",
        at_least=0,
    )
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = key(
        "alltoall",
        "What sends tokens to their experts: alltoall, or the kernels of DeepEP or HybridEP through Megatron-Core's "
        "flex dispatcher. Those need bf16 and the package deep_ep, and were not run.",
    )
    dispatch_bound: float | None = key(
        None,
        "On a GPU every message between ranks of parallel.ep has room for this many times the even share of tokens, so "
        "the host need not wait for sizes. A training step in which a token finds no room is run again with exact "
        "sizes, so this changes no number (docs/moe.md); null: always exact sizes.",
        at_least=1,
    )

    def __post_init__(self):
        why = REFUSED_AUX_LOSSES.get(self.aux_loss, "is unknown")
        hint = f"{why}; use one of {', '.join(AUX_LOSSES)}"
        require(self.aux_loss in AUX_LOSSES, "moe.aux_loss", self.aux_loss, hint)
        super().__post_init__()
        if self.aux_loss == "none":
            hint = "weighs no loss: set moe.aux_loss=sequence, or leave it at 0"
            require(self.aux_loss_coef == 0, "moe.aux_loss_coef", self.aux_loss_coef, hint)
        else:
            hint = f"leaves moe.aux_loss={self.aux_loss} without effect: set it, as to 0.0001, or moe.aux_loss=none"
            require(self.aux_loss_coef > 0, "moe.aux_loss_coef", self.aux_loss_coef, hint)


@dataclass(frozen=True)
class LossConfig(Keys, group="loss"):
    """Aggregation of the losses of tokens to the loss of a step (docs/normalization.md)."""

    aggregation: str = key(
        "token-mean",
        "How the tokens of a step are weighted: their mean; the mean over sequences of the tokens' mean, sum, or "
        "sum / norm_length; the mean over prompts of the tokens' mean; or their sum.",
        choices=MODES,
    )
    norm_length: int | None = key(
        None,
        "The constant, in tokens, that seq-mean-token-sum-norm divides by; null with all others.",
        above=0,
    )
    count_fully_masked: bool = key(False, "Whether means over sequences or prompts also count those without a target.")

    def __post_init__(self):
        super().__post_init__()
        self.weighting()

    def weighting(self) -> Aggregation:
        """Return how tokens are weighted. Raises UserError if the keys contradict each other."""
        return Aggregation(self.aggregation, self.norm_length, self.count_fully_masked)


@dataclass(frozen=True)
class OptimConfig(Keys, group="optim"):
    """AdamW and its learning rate, which rises to lr and then falls to min_lr, just after the last step."""

    lr: float = key(1e-5, "Peak learning rate.", at_least=0)
    min_lr: float = key(0.0, "Learning rate at which linear and cosine end; at most lr.", at_least=0)
    warmup_steps: int = key(0, "Optimizer steps in which the learning rate rises linearly to lr; 0: none.", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = key("cosine", "How the learning rate falls after the warm-up.")
    weight_decay: float = key(
        0.0, "AdamW's: a step shrinks weights by lr x weight_decay, but not biases and norms.", at_least=0
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "AdamW's decay rates of the gradients' mean and mean square.",
        at_least=0,
        below=1,
    )
    eps: float = key(1e-8, "AdamW's epsilon, added to the root of the mean square.", above=0)
    clip: float = key(
        1.0,
        "Largest norm of the whole gradient. A larger gradient is scaled down to it. 0: no clipping.",
        at_least=0,
        refusal="must not be negative (0 switches clipping off)",
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"must be between 0 and optim.lr={self.lr}")


@dataclass(frozen=True)
class TrainConfig(Keys, group="train"):
    """Length, precision and random numbers of a run, and guards around it."""

    steps: int | None = key(
        None,
        "Optimizer steps of the whole run, over the data as often as needed; null: as many as train.epochs make.",
        at_least=1,
    )
    epochs: int = key(
        1,
        "Passes over data.train, each in a new order, if train.steps is null. Files with weights need train.steps.",
        at_least=1,
    )
    seed: int = key(0, "Decides the order of the data, the random weights, and what is sampled.", at_least=0)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        "What to run on. auto: the GPU if torch sees one, else the CPU; an error if nvidia-smi sees a GPU and torch "
        "does not.",
    )
    precision: Literal["fp32", "bf16", "fp64"] = key(
        "fp32",
        "Type of weights and activations. bf16 keeps fp32 weights in the optimizer, and fp32 gradients. fp64 is for "
        "proofs.",
    )
    deterministic: bool = key(
        False, "Repeated runs are bit-equal on a GPU too: an operation without a deterministic kernel is an error."
    )
    eval_every: int = key(
        0,
        "Optimizer steps between evaluations on data.eval. There is always one before the first step and one after the "
        "last; 0: only those.",
        at_least=0,
    )
    gc_every: int = key(
        10,
        "Optimizer steps between collections of Python's garbage, by all ranks at once, so that none keeps the others "
        "waiting at some other time; 0: whenever Python likes.",
        at_least=0,
    )
    timeout: float = key(
        1200.0,
        "Seconds without a micro-batch, a token or a step after which the run ends and reports which rank keeps the "
        "others waiting, and in which line; 0: never. Waiting for servers and rewards has its own limits.",
        at_least=0,
    )
    max_bad_steps: int = key(
        3,
        "The run ends after this many consecutive steps that were not applied because their loss or gradient is not "
        "finite, or for skip_spikes.",
        at_least=1,
    )
    spike_factor: float | None = key(
        10.0,
        "A step whose gradient norm, or in SFT loss, is above this many times the median of the last 64 is reported, "
        "and bad_steps.jsonl names its samples; null: no step is.",
        above=1,
    )
    skip_spikes: bool = key(
        False, "Steps that train.spike_factor reports are not applied, like those that are not finite."
    )
    profile: str | None = key(
        None,
        "STEP:FOLDER writes a torch.profiler trace of that optimizer step and a table of its phases, of each rank, "
        "into the folder (docs/performance.md); null: none.",
    )
    check_replicas_every: int = key(
        100,
        "Optimizer steps between comparisons of the weights that several ranks hold, bit for bit; there is one before "
        "each checkpoint as well. 0: never.",
        at_least=0,
    )

    def __post_init__(self):
        super().__post_init__()
        self.profiled(self.steps)

    def profiled(self, total_steps: int | None) -> tuple[int, Path] | None:
        """Return the step, from 1 on, and the folder of train.profile; None if it is null.

        total_steps: optimizer steps of the run, if known. Raises UserError if the step is not among them.
        """
        if self.profile is None:
            return None
        step, _, folder = self.profile.partition(":")
        named = step.isdecimal() and int(step) > 0 and folder
        require(bool(named), "train.profile", self.profile, "must be STEP:FOLDER, such as 5:profile, with steps from 1")
        within = total_steps is None or int(step) <= total_steps
        require(within, "train.profile", self.profile, f"must name one of the run's {total_steps} optimizer steps")
        return int(step), Path(folder)


@dataclass(frozen=True)
class CheckpointConfig(Keys, group="checkpoint"):
    """Checkpoints and exports in output_dir, and how to continue from them (docs/checkpoints.md)."""

    every: int = key(
        0,
        "Optimizer steps between checkpoints. There is always one after the last step; 0: only that one.",
        at_least=0,
    )
    keep: int = key(2, "How many of the newest checkpoints stay.", at_least=1)
    asynchronous: bool = key(
        True,
        "Training waits for the copy of a checkpoint to host memory only, while the one before is on the disk. On CPUs "
        "that copy takes as much memory as what a rank writes.",
    )
    resume: bool = key(False, "Continue after the newest whole checkpoint of output_dir, on any layout.")
    export_hf: bool = key(True, "Write a Hugging Face folder, hf, into output_dir at the end.")


@dataclass(frozen=True)
class Config:
    """A whole run. `Engine` reads model, batch, parallel, optim and train; the recipes read the rest."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    kernels: Kernels = field(default_factory=Kernels)
    moe: MoeConfig = field(default_factory=MoeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output_dir: str | None = key(None, "Folder of the run; null: runs/RECIPE-PRESET, with a number if that exists.")

    def __post_init__(self):
        for part in fields(self):
            value = getattr(self, part.name)
            if not is_dataclass(part.type):
                object.__setattr__(self, part.name, typed(part.name, part, value))
            elif not isinstance(value, cast(type, part.type)):
                wanted = cast(type, part.type).__name__
                raise UserError(f"{part.name} is of type {type(value).__name__}: give {part.name}={wanted}(...)")
        require(
            not self.data.is_mixture or self.train.steps is not None,
            "train.steps",
            None,
            "must be a number with weights in data.train: the files end at different steps, so train.epochs has no "
            "meaning",
        )

    @classmethod
    def from_file(cls, path: str | PathLike) -> Self:
        """Return the configuration of a YAML file, such as the config.yaml that a run writes; absent keys have their
        defaults. Raises UserError, with file and line, for one that cannot be read, and for a wrong key or value."""
        from omegaconf import OmegaConf  # these take longer than the completion of a word may
        from omegaconf.errors import OmegaConfBaseException

        from isoloss.engine.config import config_file

        file = config_file.read(Path(path), cls, {})
        if file.preset is not None:
            raise UserError(f"{path}: preset={file.preset} is read by the recipes' command line alone: take it out")
        try:
            return build(
                cls, {"model": {}, **cast(dict, OmegaConf.to_container(OmegaConf.create(file.nested()), resolve=True))}
            )
        except (UserError, OmegaConfBaseException) as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from None

    def accumulates_in_products(self, *, on_gpu: bool) -> bool:
        """Return parallel.gradient_accumulation_fusion, or its default."""
        chosen = self.parallel.gradient_accumulation_fusion
        return on_gpu and self.train.precision != "fp64" if chosen is None else chosen

    def overlaps_grad_reduce(self, *, on_gpu: bool) -> bool:
        """Return parallel.overlap_grad_reduce, or its default."""
        chosen = self.parallel.overlap_grad_reduce
        return on_gpu if chosen is None else chosen

    def overlaps_param_gather(self, *, on_gpu: bool) -> bool:
        """Return parallel.overlap_param_gather, or its default."""
        chosen = self.parallel.overlap_param_gather
        legal = self.distributed_optimizer and self.memory.offload_optimizer == 0
        return on_gpu and legal if chosen is None else chosen

    @property
    def distributed_optimizer(self) -> bool:
        """Return parallel.distributed_optimizer, or its default."""
        chosen = self.parallel.distributed_optimizer
        return self.train.precision != "fp64" if chosen is None else chosen

    @property
    def judged_by(self) -> tuple[str, ...]:
        """Return the metrics that train.spike_factor limits."""
        return "loss", "grad_norm"

    @property
    def samples_begin_alike(self) -> bool:
        """Return whether samples of a step have a common prefix."""
        return False

    @property
    def functions(self) -> Mapping[str, str]:
        """Return the values of keys that may name a function of the user's, by key."""
        return {}

    @property
    def trained_models(self) -> int:
        """Return the number of models that are trained: the policy, and in reinforcement learning a critic."""
        return 1

    @property
    def frozen_models(self) -> int:
        """Return the number of models on the device that are not trained, such as a reference."""
        return 0

    @property
    def shares_device(self) -> bool:
        """Return whether a server sleeps on the GPU while the trainer works."""
        return False

    @property
    def lends_device_memory(self) -> bool:
        """Return whether other processes map this process's GPU memory by handles."""
        return False

    def resume_fingerprint(self) -> dict[str, object]:
        """Return the values that a resumed run must not change, by key, as plain values."""
        # They decide what the state in a checkpoint means, and which rows a step takes. The contents of rows are
        # compared as well, by `Data.fingerprints`.
        return {
            "train.precision": self.train.precision,
            "parallel.distributed_optimizer": self.distributed_optimizer,
            "train.seed": self.train.seed,
            "batch.global_size": self.batch.global_size,
        }
