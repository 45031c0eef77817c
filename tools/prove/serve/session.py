"""The recorded session: what training clients ask for, a function of a seed and of the model's vocabulary alone.

Each client makes an adapter, takes two calls a step with every loss, changes AdamW's numbers from step to step, takes a
snapshot and samples from it, saves its state and goes on from it with and without the optimizer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Options of a loss where they are not its defaults.
LOSSES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("dro", {"beta": 0.3}),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1}),
)
# An eps far below the gradients would divide those near 0 by themselves, and magnify their rounding a millionfold.
PLAIN = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-2}
# Of each step; a number that a step does not name has its default again.
ADAM: tuple[Mapping[str, float], ...] = (
    {**PLAIN, "beta1": 0.8, "beta2": 0.98},
    {**PLAIN, "grad_clip_norm": 0.5},
    {**PLAIN, "weight_decay": 0.1},
    PLAIN,
    {**PLAIN, "eps": 1e-1},
    {**PLAIN, "learning_rate": 3e-4, "weight_decay": 0.01, "grad_clip_norm": 2.0},
)
# Rank and flags of the adapters, which clients have in turn.
SHAPES: tuple[Mapping[str, int | bool], ...] = (
    {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False},
    {"rank": 8, "seed": 2, "train_attn": False, "train_mlp": True, "train_unembed": True},
)
DATUMS = (8, 5)  # of the calls of a step
LONGEST = 40


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence. tokens: integers. inputs: an array of the length of tokens by name, int64 or float32."""

    tokens: Sequence[int]
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Call:
    """forward_backward, or forward."""

    data: Sequence[Datum]
    loss_fn: str
    options: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class Step:
    """optim_step."""

    adam: Mapping[str, float]


@dataclass(frozen=True)
class Snapshot:
    """save_weights_for_sampler. saved: whether it has a path, from which a sampling session is made."""

    name: str
    saved: bool = False


@dataclass(frozen=True)
class Completions:
    """asample, from a snapshot."""

    snapshot: str
    prompt: Sequence[int]
    samples: int
    tokens: int
    seed: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Save:
    """save_weights."""

    name: str


@dataclass(frozen=True)
class Load:
    """load_weights into the client itself."""

    name: str
    optimizer: bool


@dataclass(frozen=True)
class Continue:
    """load_weights into a new training client, and what that one asks for."""

    name: str
    optimizer: bool
    requests: "Sequence[Request]"


Request = Call | Step | Snapshot | Completions | Save | Load | Continue


@dataclass(frozen=True)
class Client:
    """A training client. shape: rank, seed and flags of its adapter. requests: each with a label of its own."""

    shape: Mapping[str, int | bool]
    requests: Sequence[tuple[str, Request]]


def clients(count: int, vocab_size: int, max_positions: int, seed: int = 0, steps: int = len(LOSSES)) -> list[Client]:
    """Return the first training clients of the session; each is the same, however many there are.

    steps: number of steps before the snapshot.
    """
    longest = min(LONGEST, max_positions)
    return [_client(k, Draw(vocab_size, longest, np.random.default_rng((seed, k))), steps) for k in range(count)]


@dataclass(frozen=True)
class Draw:
    """A source of data of a client."""

    vocab_size: int
    longest: int
    random: np.random.Generator

    def tokens(self, length: int) -> list[int]:
        return self.random.integers(3, self.vocab_size, length).tolist()

    def datum(self, loss_fn: str) -> Datum:
        length = int(self.random.integers(5, self.longest))
        tokens = self.tokens(length + 1)
        inputs: dict[str, np.ndarray] = {"target_tokens": np.array(tokens[1:], np.int64)}
        if loss_fn == "cross_entropy":
            # Any size and sign, as forward_backward_custom sends them, and zeros.
            weights = self.random.normal(0.5, 1.0, length) * (self.random.random(length) < 0.8)
            inputs["weights"] = weights.astype(np.float32)
        else:
            near = -np.log(self.vocab_size) + 0.2 * self.random.standard_normal(length)
            advantages, prompt = self.random.standard_normal(length), length // 3
            inputs["target_tokens"][:prompt], advantages[:prompt] = 0, 0.0  # as recipes do on the prompt
            inputs["logprobs"] = near.astype(np.float32)
            inputs["advantages"] = advantages.astype(np.float32)
        return Datum(tokens[:-1], inputs)

    def call(self, loss_fn: str, options: Mapping[str, float], count: int, *, forward_only: bool = False) -> Call:
        return Call([self.datum(loss_fn) for _ in range(count)], loss_fn, options, forward_only)

    def step(self, name: str, number: int) -> list[tuple[str, Request]]:
        """Return two calls, between them one that must leave no gradient, and a step."""
        loss_fn, options = LOSSES[number % len(LOSSES)]
        first, second = (self.call(loss_fn, options, count) for count in DATUMS)
        between = self.call("cross_entropy", {}, 2, forward_only=True)
        return [
            (f"{name} first call", first),
            (f"{name} forward", between),
            (f"{name} second call", second),
            (f"{name} step", Step(ADAM[number % len(ADAM)])),
        ]


def _client(number: int, draw: Draw, steps: int) -> Client:
    prompts = [draw.tokens(6), draw.tokens(9)]
    again = draw.step("again", 1)

    def asks(of: str, when: str) -> list[tuple[str, Request]]:
        return [
            (f"{when} completions", Completions(of, prompts[0], 2, 6, seed=3)),
            (f"{when} cool completions", Completions(of, prompts[1], 1, 5, seed=4, temperature=0.7)),
        ]

    requests = [each for k in range(steps) for each in draw.step(f"{k}:", k)]
    requests += [("snapshot", Snapshot("snapshot")), *asks("snapshot", "first")]
    requests += [("save", Save("one")), *again]
    requests += asks("snapshot", "later")
    requests += [("snapshot with a path", Snapshot("path", saved=True)), *asks("path", "path")]
    requests += [("continue", Continue("one", True, [request for _, request in again]))]
    requests += [("load", Load("one", False)), *draw.step("loaded", 2)]
    requests.append(("last forward", draw.call("cross_entropy", {}, 2, forward_only=True)))
    return Client(SHAPES[number % len(SHAPES)], [(f"client {number} {label}", each) for label, each in requests])
