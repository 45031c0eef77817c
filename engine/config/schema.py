"""Define every key of a run in frozen dataclasses, which are checked once, before any process group exists.

A preset, files and overrides in Hydra's syntax give values (recipes/launch.py). `parse.build` turns the composed tree
into these classes and refuses unknown keys with the nearest name. A key is defined with its meaning and bounds. Rules
between keys that need no model are in `__post_init__`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, Self, cast

from isoloss.engine.config.data_config import DataConfig
from isoloss.engine.config.parse import build
from isoloss.engine.config.training_config import CheckpointConfig, LossConfig, MoeConfig, OptimConfig, TrainConfig
from isoloss.models.lora.config import LoraConfig
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.kernels import Kernels
from isoloss.parallel import UserError
from isoloss.parallel.layout import MODEL_AXES, Degrees, Layout
from isoloss.parallel.runtime.config_key import Keys, key, require, typed


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
        "Whether tokens with which several samples of a micro-batch begin, such as the prompt of a group, are computed "
        "once for all of them. Only time and memory depend on it. null: true in reinforcement learning, except with "
        "kernels of parallel.cp_kernel that take whole documents.",
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
    lora: LoraConfig = field(default_factory=LoraConfig)
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

    def refuse_adapter(self) -> None:
        """Raise UserError where lora.rank asks for an adapter, of which a command knows nothing."""
        hint = "is for runs: this command knows no adapters (docs/lora.md); leave it at 0"
        require(self.lora.rank == 0, "lora.rank", self.lora.rank, hint)

    def accumulates_in_products(self, *, on_gpu: bool) -> bool:
        """Return parallel.gradient_accumulation_fusion, or its default."""
        chosen = self.parallel.gradient_accumulation_fusion
        # Under an adapter the layers' own weights have no gradient.
        return on_gpu and self.train.precision != "fp64" and self.lora.rank == 0 if chosen is None else chosen

    def overlaps_grad_reduce(self, *, on_gpu: bool) -> bool:
        """Return parallel.overlap_grad_reduce, or its default."""
        chosen = self.parallel.overlap_grad_reduce
        return on_gpu if chosen is None else chosen

    def overlaps_param_gather(self, *, on_gpu: bool) -> bool:
        """Return parallel.overlap_param_gather, or its default."""
        chosen = self.parallel.overlap_param_gather
        # Adapters are gathered at once: no layer's forward waits for them.
        legal = self.distributed_optimizer and self.memory.offload_optimizer == 0 and self.lora.rank == 0
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
            **self.lora.resume_fingerprint(),
        }
