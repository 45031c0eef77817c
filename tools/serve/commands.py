"""The commands that the front sends to the ranks, one at a time; they and their results hold numpy arrays, no tensors.

Shape suffixes: T tokens of one datum, K targets of a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Writes a checkpoint."""

    folder: str


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
class SaveVersion(Command):
    """Writes a version."""

    version: str
    folder: str


@dataclass(frozen=True)
class LoadVersion(Command):
    """Reads a version that `SaveVersion` or `SaveWeights` wrote. rank, targets: those of its adapter."""

    version: str
    folder: str
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class DropVersion(Command):
    """Forgets a version."""

    version: str


@dataclass(frozen=True)
class DropModel(Command):
    """Forgets a training client."""


@dataclass(frozen=True)
class SampleRequest:
    """A prompt and the rules to continue it, as in `engine.rl.trajectory.Sampling`.

    ids: one for each completion; the random numbers are a function of it and the seed.
    """

    ids: tuple[str, ...]
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample(Command):
    """Samples completions of a version. While it runs, commands for the same version join it.

    Result: of each completion the tokens, their log-probabilities, and "stop" or "length".
    """

    version: str
    request: SampleRequest


@dataclass(frozen=True)
class Cancel(Command):
    """Ends the sampling of the command with its own number."""


@dataclass(frozen=True)
class Score(Command):
    """Computes log-probabilities of a prompt. top: number of likeliest tokens at each place. Result: `Scores`."""

    version: str
    prompt: tuple[int, ...]
    top: int


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a prompt.

    logprobs: log-probabilities of its tokens, [T]; NaN for the first.
    top_ids, top_logprobs: likeliest tokens at each place, [T, top], as in `wire.TopK`.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class Failed:
    """The outcome of a command that was refused: one line for the client."""

    message: str
