"""The commands that the front sends to the ranks, one at a time; they and their results hold numpy arrays, no tensors.

Shape suffixes: T tokens of one datum, K targets of a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from isoloss.tools.serve.wire import Datum

BASE = "base"  # the version without an adapter


@dataclass(frozen=True)
class Command:
    """A command. model_id: the training client that it is of."""

    model_id: str


@dataclass(frozen=True)
class CreateModel(Command):
    """Makes an adapter with random factors.

    targets: groups of matrices, as in `lora.targets`.
    """

    rank: int
    seed: int | None
    targets: tuple[str, ...]


@dataclass(frozen=True)
class ForwardBackward(Command):
    """Adds the gradient of a sum of losses, or computes the loss alone. Result: `Losses`."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class Losses:
    """loss: the sum. logprobs: log-probability of each target, by datum."""

    loss: float
    logprobs: Sequence[np.ndarray]
    micro_batches: int


@dataclass(frozen=True)
class OptimStep(Command):
    """Takes a step of AdamW. Result: metrics by name."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class SaveWeights(Command):
    """Writes a checkpoint. versions: versions of this training client to write as well, and their folders."""

    folder: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadWeights(Command):
    """Loads a checkpoint; without `optimizer` the moments begin anew."""

    folder: str
    optimizer: bool


@dataclass(frozen=True)
class Snapshot(Command):
    """Takes a version of the weights, from which completions are sampled; it stays as it is."""

    version: str


@dataclass(frozen=True)
class LoadVersion(Command):
    """Reads a version that `SaveWeights` wrote. rank, targets: those of its adapter."""

    version: str
    folder: str
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class DropModel(Command):
    """Forgets a training client."""


@dataclass(frozen=True)
class SampleRequest:
    """A prompt and the rules to continue it.

    ids: one for each completion; the random numbers are a function of it and the seed.
    top: number of likeliest tokens to return at each position of the prompt.
    """

    ids: tuple[str, ...]
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    seed: int
    prompt_logprobs: bool = False
    top: int = 0


@dataclass(frozen=True)
class Sample(Command):
    """Samples completions of a version; model_id is that of its training client, or "". Result: a list of `Sampled`."""

    version: str
    requests: Sequence[SampleRequest]


@dataclass(frozen=True)
class Sampled:
    """The completions of a request: tokens, log-probabilities and "stop" or "length"; log-probabilities of the prompt,
    [T], NaN for the first token; ids and log-probabilities of the likeliest tokens there, as in `wire.TopK`."""

    completions: Sequence[tuple[np.ndarray, np.ndarray, str]]
    prompt_logprobs: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Failed:
    """The outcome of a command that was refused: one line for the client."""

    message: str
