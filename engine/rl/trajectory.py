"""The nouns of a rollout. Tokens are those that the backend really read and produced: text is never tokenized again.

Rank 0 has the numbers of completions, and the other ranks outlines: everything else of them.

An id leads from a prompt's row to everything made of it: "train.jsonl:17" is the prompt of that line, and
"train.jsonl:17/42/3" completion 3 of the 42nd prompt drawn in the run.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One row of data.train or data.eval, as the policy reads it and as reward functions see it.

    id: "file:line" of the row.
    tokens: token ids, with the generation prompt of the chat template.
    prompt: the row's `prompt` as it stands there, text or messages.
    answer: the row's `answer`, None if it has none.
    source: what metrics are grouped by: the row's `data_source`, else the name of its file without ending.
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
    """How to choose tokens. A completion ends with (and contains) the first of stop_token_ids, or after max_new_tokens.

    temperature: 0 is greedy.
    top_p: nucleus; 1 switches it off.
    seed: of the run; a request adds its own id.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


class Numbers(Sequence):
    """Numbers of one kind, 4 or 8 bytes each in memory and on the way to other ranks; a tuple of Python's own takes 80
    for a token, its log-probability and its version. Equal to the tuple of them.

    kind: as `array.array` names it.
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
    """As many numbers as are on rank 0. Raises RuntimeError where one is asked for."""

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
    """What came out for a request.

    tokens, logprobs, versions: kept as `Numbers`, whatever they are given as; `Absent` in an outline.
    logprobs: of each token under softmax(logits / temperature) of the whole vocabulary (top_p does not renormalize;
        with temperature 0, of softmax(logits)).
    versions: the weight version that produced each token.
    finish: "stop" with a stop token at the end, "length" at max_new_tokens, "abort" where the backend was told to stop.
    """

    id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: Finish

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
        """What other ranks than 0 have of it."""
        absent = Absent(len(self.tokens))
        return Completion(self.id, absent, absent, absent, self.finish)

    def followed_by(self, more: "Completion") -> "Completion":
        """This one and the tokens that continue it; `more` says how it ended."""
        tokens, logprobs = [*self.tokens, *more.tokens], [*self.logprobs, *more.logprobs]
        return Completion(self.id, tokens, logprobs, [*self.versions, *more.versions], more.finish)


@dataclass(frozen=True)
class Request:
    """One completion to generate, after prompt_tokens; `partial` is what an earlier, aborted attempt gave, to go on
    from: the completion then begins with its tokens, and max_new_tokens counts them."""

    id: str
    prompt_tokens: tuple[int, ...]
    partial: Completion | None = None


@dataclass(frozen=True)
class Trajectory:
    """A completion of a prompt and its reward.

    text: "" in an outline.
    reward: math.nan where the reward function failed, which `error` tells; the completion is then masked.
    parts: of a weighted sum, by the function's name.
    timed_out: whether its verification ran out of time, which gives 0.
    """

    prompt: Prompt
    completion: Completion
    text: str
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False

    @property
    def valid(self) -> bool:
        return math.isfinite(self.reward) and len(self.completion.tokens) > 0

    def outline(self) -> "Trajectory":
        """What other ranks than 0 have of it."""
        return replace(self, completion=self.completion.outline(), text="")


@dataclass(frozen=True)
class Group:
    """The completions of one prompt. draw: number of the prompt among all that the run has drawn."""

    draw: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewarded(self) -> bool:
        """Whether a completion has a reward."""
        return any(trajectory.error is None for trajectory in self.trajectories)

    @property
    def varied(self) -> bool:
        """Whether the valid rewards differ: a group that is all right or all wrong teaches a group baseline nothing."""
        rewards = [trajectory.reward for trajectory in self.trajectories if trajectory.valid]
        return bool(rewards) and min(rewards) < max(rewards)
