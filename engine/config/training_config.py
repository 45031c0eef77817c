"""Define the keys of training: mixtures of experts, the loss, the optimizer, steps and checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isoloss.parallel.aggregation import MODES, Aggregation
from isoloss.parallel.runtime.config_key import Keys, key, require

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
    export_hf: bool = key(
        True,
        "Write a Hugging Face folder, hf, into output_dir at the end; with lora.rank PEFT's folder of the adapter, "
        "adapter.",
    )
