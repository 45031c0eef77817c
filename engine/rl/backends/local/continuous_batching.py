"""Completions of a model in this process: as many rows as allowed decode together, and a free place is filled at once.

Shape suffixes: B rows of the batch, V the vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from isoloss.engine.instruments import watchdog
from isoloss.engine.rl.backends.local.sampling import choose, noise_key
from isoloss.engine.rl.backends.protocol import Arrived, ignore
from isoloss.engine.rl.trajectory import Completion, Finish, Request, Sampling
from isoloss.parallel import UserError

MAX_PREFILL = 16384  # tokens that are read in one forward, padding included; a longer row is read alone


@dataclass
class ActiveSequence:
    """A request under way: its place among the requests, and what it has so far."""

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, index: int, request: Request) -> "ActiveSequence":
        row = cls(index, request)
        if request.partial:
            row.tokens += request.partial.tokens
            row.logprobs += request.partial.logprobs
            row.versions += request.partial.versions
        return row

    @property
    def length(self) -> int:
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_tokens, *self.tokens)

    def finish(self, sampling: Sampling) -> Finish | None:
        """How the completion ended; None while it goes on."""
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= sampling.max_new_tokens else None

    def completion(self, sampling: Sampling) -> Completion:
        finish = self.finish(sampling) or "abort"
        return Completion(self.request.id, tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), finish)


class Batch(Protocol):
    """Rows that decode together, with what the model keeps of them: of all tokens but the newest of each."""

    rows: list[ActiveSequence]

    def select(self, keep: Sequence[int]) -> "Batch":
        """These rows alone. Uses this one up."""
        ...

    def join(self, other: Any) -> "Batch":
        """The rows of both, which are used up."""
        ...


class Decoder(Protocol):
    """A model that reads tokens and gives the logits of the next ones.

    Logits may be None on a rank that has them not; it then has its own `choose`.
    """

    def prefill(self, rows: Sequence[ActiveSequence]) -> tuple[Batch, Tensor | None]:
        """Read prompts (and what partial completions have); the logits of each row's next token, [B, V].

        Rows with the same tokens, such as the completions of one prompt, are read once.
        """
        ...

    def decode(self, batch: Any) -> Tensor | None:
        """Read the newest token of every row; the logits of the next one, [B, V]."""
        ...

    def idle(self) -> None:
        """A forward for the sake of other ranks, which have rows left: where their experts are on this one too."""

    def choose(self, logits_BV: Any, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
        """See `sampling.choose`."""
        return choose(logits_BV, keys_B, sampling)


def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    sampling: Sampling,
    concurrency: int,
    version: int,
    proceed: Callable[[bool], bool] = lambda working: working,
    arrived: Arrived = ignore,
) -> list[Completion]:
    """One completion a request, in the order of the requests. At most `concurrency` of them decode together.

    version: of the weights, noted with every new token.
    proceed: asked before every forward, and told whether rows are left; False ends all requests with what they have
        (finish="abort").
    arrived: told of each completion when it ends by itself.
    """
    rows = [ActiveSequence.start(index, request) for index, request in enumerate(requests)]
    waiting = deque(row for row in rows if row.finish(sampling) is None)
    running: Batch | None = None
    with torch.inference_mode():
        while proceed(bool(waiting or running)):
            watchdog.beat()
            if not waiting and running is None:
                decoder.idle()
                continue
            free = concurrency - (len(running.rows) if running else 0)
            # Reading prompts stops the others, so several are let in at a time.
            if running is None or (waiting and 4 * free >= concurrency):
                batch, logits_BV = decoder.prefill(admit(waiting, free))
                new = advance(decoder, batch, logits_BV, sampling, version, arrived)
                running = running.join(new) if running and new else running or new
            else:
                running = advance(decoder, running, decoder.decode(running), sampling, version, arrived)
    return [row.completion(sampling) for row in rows]


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


def advance(
    decoder: Decoder,
    batch: Batch,
    logits_BV: Tensor | None,
    sampling: Sampling,
    version: int,
    arrived: Arrived = ignore,
) -> Batch | None:
    """Give every row its next token; the rows that go on, None where there are none."""
    keys_B = [noise_key(sampling.seed, row.request.id, len(row.tokens)) for row in batch.rows]
    tokens_B, logprobs_B = decoder.choose(logits_BV, keys_B, sampling)
    for row, token, logprob in zip(batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
    for row in batch.rows:
        if row.finish(sampling) is not None:
            arrived(row.completion(sampling))
    keep = [k for k, row in enumerate(batch.rows) if row.finish(sampling) is None]
    if len(keep) == len(batch.rows):
        return batch
    return batch.select(keep) if keep else None


def check_requests(requests: Sequence[Request], sampling: Sampling, max_positions: int) -> None:
    """Raises UserError for a prompt that is empty or too long, ValueError where two requests have one id."""
    for request in requests:
        length = len(request.prompt_tokens)
        if length == 0:
            raise UserError(f"{request.id}: the prompt has no tokens; delete the row or give it a prompt")
        if length + sampling.max_new_tokens > max_positions:
            raise UserError(
                f"{request.id}: a prompt of {length} tokens and rollout.max_new_tokens={sampling.max_new_tokens} are "
                f"more than the model's max_position_embeddings={max_positions}; shorten the prompt or lower the key"
            )
    ids = {request.id for request in requests}
    if len(ids) < len(requests):
        seen: set[str] = set()
        twice = next(r.id for r in requests if r.id in seen or seen.add(r.id))
        raise ValueError(f"two requests are called {twice}; they would draw the same random numbers")
