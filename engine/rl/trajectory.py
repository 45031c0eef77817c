"""Define the data of a rollout. Tokens are those that the backend read and produced: text is never tokenized again.

Rank 0 has the numbers of completions; the other ranks have outlines, without these numbers.

An id leads from a prompt's row to everything made from it: "train.jsonl:17" is the prompt of that line, and
"train.jsonl:17/42/3" completion 3 of the prompt that the run drew after 42 others.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np

from isoloss.engine.rl.routes import RoutesForm, continued

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """A row of data.train or data.eval, as the policy reads it and as reward functions see it.

    id: "file:line" of the row.
    tokens: token ids, with the generation prompt of the chat template.
    prompt: the row's `prompt` as it stands there, text or messages.
    answer: the row's `answer`; None if the row has none.
    source: group in the metrics: the row's `data_source`, else the name of its file without ending.
    extra: further columns.
    """

    id: str
    tokens: tuple[int, ...]
    prompt: str | tuple[Mapping[str, Any], ...]
    answer: Any = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Rules to sample tokens. A completion ends with (and contains) the first of stop_token_ids, with the first token
    after which its text contains one of `stop`, or at max_new_tokens.

    temperature: 0 is greedy.
    top_p: nucleus; 1 switches it off.
    top_k: number of the most probable tokens to choose among; -1 switches it off. With top_p only those of the nucleus:
        its probabilities are those of the whole vocabulary, as SGLang counts them.
    seed: seed of the run; a request adds its own id.
    stop: texts; models in the training processes know them, servers refuse them.
    routes: form of the routes that completions have; None: they have none.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    routes: RoutesForm | None = None

    def __post_init__(self):
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or -1 for the whole vocabulary")
        for stop in self.stop:
            if not stop or "\ufffd" in stop:
                raise ValueError(f"stop={stop!r} must be a text, without U+FFFD, which stands for bytes that are none")


class Numbers(Sequence):
    """Numbers of one kind, 4 or 8 bytes each in memory and on the way to other ranks; Python objects in tuples take 80
    for a token, its log-probability and its version. Equal to a tuple of the same numbers.

    kind: type code of `array.array`.
    """

    __slots__ = ("_numbers",)

    def __init__(self, kind: str, numbers: Sequence):
        self._numbers = array(kind, numbers._numbers if isinstance(numbers, Numbers) else numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple: ...
    def __getitem__(self, index):
        found = self._numbers[index]
        return tuple(found) if isinstance(index, slice) else found

    def __iter__(self):
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return self._numbers == other._numbers
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self):
        return Numbers, (self._numbers.typecode, self._numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._numbers, dtype=dtype)


class Absent(Sequence):
    """A stand-in for numbers on rank 0, of the same length. Raises RuntimeError where a number is read."""

    __slots__ = ("_length",)

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        raise RuntimeError("the numbers of completions are on rank 0; this rank has an outline")

    def __repr__(self) -> str:
        return f"<{self._length} on rank 0>"


@dataclass(frozen=True)
class Completion:
    """The tokens generated for a request.

    tokens, logprobs, versions: any sequences, kept as `Numbers`; `Absent` in an outline.
    logprobs: log-probability of each token under softmax(logits / temperature) of the whole vocabulary (top_p and
        top_k do not renormalize; with temperature 0, under softmax(logits)).
    versions: the weight version that produced each token.
    finish: "stop" with a stop token or a stop string at the end, "length" at max_new_tokens, "abort" where the
        backend was stopped.
    routes: for each token of prompt and completion the experts that the backend chose (`engine/rl/routes.py`); None
        where it was not asked, or did not say, and in an outline.
    """

    id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: Finish
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        for name, kind in (("tokens", "i"), ("logprobs", "d"), ("versions", "i")):
            if not isinstance(getattr(self, name), Absent):
                object.__setattr__(self, name, Numbers(kind, getattr(self, name)))
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion {self.id}: {len(self.tokens)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.versions)} versions must be as many"
            )

    def outline(self) -> "Completion":
        """Return the completion without its numbers, for ranks other than 0."""
        absent = Absent(len(self.tokens))
        return Completion(self.id, absent, absent, absent, self.finish)

    def followed_by(self, more: "Completion") -> "Completion":
        """Return this completion with the tokens of `more`, which continue it, and the finish of `more`."""
        tokens, logprobs = [*self.tokens, *more.tokens], [*self.logprobs, *more.logprobs]
        total = len(more.tokens) + (0 if self.routes is None else len(self.routes))
        routes = continued(self.routes, more.routes, total)
        return Completion(self.id, tokens, logprobs, [*self.versions, *more.versions], more.finish, routes)


@dataclass(frozen=True)
class Request:
    """A completion to generate, after prompt_tokens. partial: result of an earlier, aborted attempt, to be continued:
    the completion then begins with its tokens, and max_new_tokens counts them."""

    id: str
    prompt_tokens: tuple[int, ...]
    partial: Completion | None = None


@dataclass(frozen=True)
class Turn:
    """A call of the model.

    prompt_tokens: token ids that the model read; `Absent` in an outline.
    completion: completion of these tokens.
    reward: the part of the trajectory's reward that belongs to this turn; the rest belongs to the last one.
    excluded: reason why the completion is no target, such as "unread"; None: it is one.
    """

    prompt_tokens: Sequence[int]
    completion: Completion
    reward: float = 0.0
    excluded: str | None = None

    def outline(self) -> "Turn":
        """Return the turn without its numbers, for ranks other than 0."""
        return replace(self, prompt_tokens=Absent(len(self.prompt_tokens)), completion=self.completion.outline())


@dataclass(frozen=True)
class Trajectory:
    """All calls of the model on one run on a prompt, and their reward.

    turns: in the order in which they were made; one where a prompt is simply completed.
    text: text of the completion, or of the last one; "" in an outline.
    reward: reward of the whole trajectory; math.nan where a reward function or the environment failed or none applies,
        as `error` says: it is then masked.
    parts: results of the reward functions, unweighted, by label of the function.
    timed_out: whether the verification ran out of time, which gives 0.
    events: further entries of rollouts.jsonl, such as messages; an outline has the counts alone.
    """

    id: str
    prompt: Prompt
    turns: tuple[Turn, ...]
    text: str
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False
    events: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_one_turn(cls, prompt: Prompt, completion: Completion, text: str, reward: float, *more: Any) -> "Trajectory":
        """Return a completion of the prompt as a trajectory. more: `parts` and the fields after it."""
        return cls(completion.id, prompt, (Turn(prompt.tokens, completion),), text, reward, *more)

    @property
    def completion(self) -> Completion:
        """Return the completion of the only turn."""
        (turn,) = self.turns
        return turn.completion

    @property
    def completions(self) -> list[Completion]:
        """Return the completions of its turns but those that are excluded."""
        return [turn.completion for turn in self.turns if turn.excluded is None]

    @property
    def length(self) -> int:
        """Return the number of tokens that the model made, those of excluded turns left out."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def truncated(self) -> bool:
        """Return whether a completion was cut for its length."""
        return any(completion.finish == "length" for completion in self.completions)

    @property
    def valid(self) -> bool:
        return math.isfinite(self.reward) and self.length > 0

    def outline(self) -> "Trajectory":
        """Return the trajectory without text and numbers, for ranks other than 0."""
        counts = {name: count for name, count in self.events.items() if isinstance(count, int)}
        return replace(self, turns=tuple(turn.outline() for turn in self.turns), text="", events=counts)


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt. draw: number of the prompt among all that the run has drawn."""

    draw: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewarded(self) -> bool:
        """Return whether a trajectory has a reward."""
        return any(trajectory.error is None for trajectory in self.trajectories)

    @property
    def faulted(self) -> bool:
        """Return whether faults of an environment have left fewer rewards than a comparison takes."""
        return sum(trajectory.error is None for trajectory in self.trajectories) < min(2, len(self.trajectories))

    @property
    def varied(self) -> bool:
        """Return whether the valid rewards differ: equal ones give a group baseline nothing to learn from."""
        rewards = [trajectory.reward for trajectory in self.trajectories if trajectory.valid]
        return bool(rewards) and min(rewards) < max(rewards)
