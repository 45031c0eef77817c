"""Completions of a model in this process: up to a limit rows decode together, and a free place is filled at once.

Shape suffixes: B rows of the batch, V the vocabulary.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from isoloss.engine.rl.backends.local.sampling import choose, noise_key
from isoloss.engine.rl.backends.local.stop_strings import Decode, ends_in
from isoloss.engine.rl.routes import known_rows, stacked
from isoloss.engine.rl.trajectory import Completion, Finish, Request, Sampling

MAX_PREFILL = 16384  # tokens that are read in one forward, padding included; a longer row is read alone


@dataclass
class ActiveSequence:
    """A request in flight and its tokens so far.

    stopped: whether the text of the tokens holds one of sampling.stop.
    routes: routes of the tokens that the model has read, from the first token of the prompt on, [L, X] each; those of
        a token that it reads again stay. Empty where none are asked for.
    """

    request: Request
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    routes: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def start(cls, request: Request, sampling: Sampling) -> "ActiveSequence":
        row = cls(request, sampling)
        if request.partial:
            row.tokens += request.partial.tokens
            row.logprobs += request.partial.logprobs
            row.versions += request.partial.versions
            if sampling.routes is not None and request.partial.routes is not None:
                row.routes += [*request.partial.routes[: known_rows(request.partial.routes)]]
        return row

    @property
    def length(self) -> int:
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_tokens, *self.tokens)

    @property
    def finish(self) -> Finish | None:
        """Return how the completion ended; None while it goes on."""
        if self.stopped or (self.tokens and self.tokens[-1] in self.sampling.stop_token_ids):
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_new_tokens else None

    def completion(self) -> Completion:
        numbers = tuple(self.tokens), tuple(self.logprobs), tuple(self.versions)
        form = self.sampling.routes
        routes = None if form is None else stacked(self.routes, form, self.length)
        return Completion(self.request.id, *numbers, self.finish or "abort", routes)


class Batch(Protocol):
    """Rows that decode together, and what the model keeps of their tokens: all but the newest of each row."""

    rows: list[ActiveSequence]

    def select(self, keep: Sequence[int]) -> "Batch":
        """Return a batch of these rows alone. Uses this one up."""
        ...

    def join(self, other: Any) -> "Batch":
        """Return a batch of the rows of both, which are used up."""
        ...


class Decoder(Protocol):
    """A model that reads tokens and gives the logits of the next ones.

    Logits may be None on a rank that does not hold them; it then overrides `choose`.
    """

    def prefill(self, rows: Sequence[ActiveSequence]) -> tuple[Batch, Tensor | None]:
        """Read prompts and partial completions; the logits of each row's next token, [B, V].

        Rows with the same tokens, such as the completions of one prompt, are read once.
        """
        ...

    def decode(self, batch: Any) -> Tensor | None:
        """Read the newest token of every row; the logits of the next one, [B, V]."""
        ...

    def idle(self) -> None:
        """Run a forward for other ranks that have rows left and experts on this rank."""

    def choose(self, logits_BV: Any, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
        """See `sampling.choose`."""
        return choose(logits_BV, keys_B, sampling)


class RowScheduler:
    """The rows of one model: at most `concurrency` of them decode together, the others wait for a place, in order.

    version: weight version, noted with every new token.
    ended: called with each row when its completion ends, from `add`, `step` or `abort`.
    text: gives the text of tokens; called for rows with stop strings only.
    """

    def __init__(
        self,
        decoder: Decoder,
        concurrency: int,
        version: int,
        ended: Callable[[ActiveSequence], object],
        text: Decode,
    ):
        self.decoder, self._concurrency, self._version, self._ended = decoder, concurrency, version, ended
        self._text = text
        self._waiting: deque[ActiveSequence] = deque()
        self._running: Batch | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._running is not None

    def add(self, rows: Iterable[ActiveSequence]) -> None:
        for row in rows:
            self._waiting.append(row) if row.finish is None else self._ended(row)

    def step(self) -> None:
        """Give a token to every running row, or to rows that are let in: reading their prompts stops the others, so
        several are let in at a time."""
        free = self._concurrency - (len(self._running.rows) if self._running else 0)
        if self._running is None or (self._waiting and 4 * free >= self._concurrency):
            batch, logits_BV = self.decoder.prefill(admit(self._waiting, free))
            new = self._advance(batch, logits_BV)
            self._running = self._running.join(new) if self._running and new else self._running or new
        else:
            self._running = self._advance(self._running, self.decoder.decode(self._running))

    def drop(self, ids: Collection[str]) -> None:
        """Forget the rows of these requests; they do not end."""
        self._waiting = deque(row for row in self._waiting if row.request.id not in ids)
        if self._running is not None:
            keep = [k for k, row in enumerate(self._running.rows) if row.request.id not in ids]
            self._running = _kept(self._running, keep)

    def take_rows(self) -> list[ActiveSequence]:
        """Return all rows, which leave: the oldest first."""
        rows = [*(self._running.rows if self._running else ()), *self._waiting]
        self._running = None
        self._waiting.clear()
        return rows

    def abort(self) -> None:
        for row in self.take_rows():
            self._ended(row)

    def _advance(self, batch: Batch, logits_BV: Tensor | None) -> Batch | None:
        """Give every row its next token; the rows that go on, None where there are none."""
        rows = batch.rows
        for chosen in _by_sampling(rows):
            keys = [noise_key(rows[k].sampling.seed, rows[k].request.id, len(rows[k].tokens)) for k in chosen]
            logits = logits_BV if logits_BV is None or len(chosen) == len(rows) else logits_BV[chosen]
            tokens_B, logprobs_B = self.decoder.choose(logits, keys, rows[chosen[0]].sampling)
            for k, token, logprob in zip(chosen, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                rows[k].tokens.append(token)
                rows[k].logprobs.append(logprob)
                rows[k].versions.append(self._version)
                if stops := rows[k].sampling.stop:
                    rows[k].stopped = ends_in(rows[k].tokens, stops, self._text)
        for row in rows:
            if row.finish is not None:
                self._ended(row)
        return _kept(batch, [k for k, row in enumerate(rows) if row.finish is None])


def _by_sampling(rows: Sequence[ActiveSequence]) -> list[list[int]]:
    """Return the indices of rows whose tokens can be chosen in one call: of one temperature, top_p and top_k."""
    alike: dict[tuple[float, float, int], list[int]] = {}
    for k, row in enumerate(rows):
        alike.setdefault((row.sampling.temperature, row.sampling.top_p, row.sampling.top_k), []).append(k)
    return list(alike.values())


def _kept(batch: Batch, keep: Sequence[int]) -> Batch | None:
    if len(keep) == len(batch.rows):
        return batch
    return batch.select(keep) if keep else None


def admit(waiting: deque[ActiveSequence], free: int) -> list[ActiveSequence]:
    """Take the rows of the next prefill, in order: at most `free`, and within MAX_PREFILL if there is more than one."""
    rows, contexts, longest = [], set(), 0
    while waiting and len(rows) < free:
        contexts.add(waiting[0].context)
        longest = max(longest, waiting[0].length)
        if rows and len(contexts) * longest > MAX_PREFILL:
            break
        rows.append(waiting.popleft())
    return rows
