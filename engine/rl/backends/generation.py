"""Completions from a transformers model: as many rows as allowed decode together, and a free place is filled at once.

Rows of one batch differ in length, so they are padded on the left: the newest token is in the last column of every row.
The padding is masked out and positions are counted without it, so what a row computes does not depend on its
neighbours, beyond rounding. What it draws does not at all: its random numbers are a function of (seed, request id,
position, token).

Shape suffixes: B rows of the batch, T its columns (tokens of the longest row), V the vocabulary.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from isoloss.engine import watchdog
from isoloss.engine.rl.trajectory import Completion, Finish, Request, Sampling
from isoloss.parallel import UserError
from isoloss.parallel.vocab import unrounded_logits

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


@dataclass
class Batch:
    """Rows that decode together, and their keys and values: the last row.length - 1 columns of a row of the cache are
    its own (all but those of its newest token, which no forward has read), the columns before them padding. A layer of
    linear attention has a state of each row in their place, which padding leaves as it is."""

    rows: list[ActiveSequence]
    cache: DynamicCache

    def select(self, keep: Sequence[int]) -> "Batch":
        """These rows, without columns that none of them needs."""
        if len(keep) == len(self.rows):
            return self
        rows = [self.rows[k] for k in keep]
        if rows:
            _take_rows(self.cache, keep)
            columns = max(row.length for row in rows) - 1
            for layer in _attention(self.cache):
                layer.keys, layer.values = (x[:, :, x.shape[2] - columns :] for x in (layer.keys, layer.values))
        return Batch(rows, self.cache)

    def join(self, other: "Batch") -> "Batch":
        """The rows of both."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        columns = max(_columns(self.cache), _columns(other.cache))
        for mine, theirs in zip(_attention(self.cache), _attention(other.cache), strict=True):
            mine.keys = torch.cat([_widened(mine.keys, columns), _widened(theirs.keys, columns)])
            mine.values = torch.cat([_widened(mine.values, columns), _widened(theirs.values, columns)])
        for mine, theirs in zip(_states(self.cache), _states(other.cache), strict=True):
            mine[0] = torch.cat([mine[0], theirs[0]])
        return Batch(self.rows + other.rows, self.cache)


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    concurrency: int,
    version: int,
    proceed: Callable[[], bool] = lambda: True,
) -> list[Completion]:
    """One completion a request, in the order of the requests. At most `concurrency` of them decode together.

    version: of the weights, noted with every new token.
    proceed: asked before every forward; False ends all requests with what they have (finish="abort").
    """
    rows = [ActiveSequence.start(index, request) for index, request in enumerate(requests)]
    waiting = deque(row for row in rows if row.finish(sampling) is None)
    running = Batch([], DynamicCache())
    with torch.inference_mode():
        while (waiting or running.rows) and proceed():
            watchdog.beat()
            free = concurrency - len(running.rows)
            # Reading prompts stops the others, so several are let in at a time.
            if waiting and (4 * free >= concurrency or not running.rows):
                new, logits_BV = prefill(model, admit(waiting, free))
                running = running.join(advance(new, logits_BV, sampling, version))
            else:
                running = advance(running, decode(model, running), sampling, version)
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


def prefill(model: PreTrainedModel, rows: Sequence[ActiveSequence]) -> tuple[Batch, Tensor]:
    """Read prompts (and what partial completions have); the logits of each row's next token, [B, V].

    Rows with the same tokens, such as the completions of one prompt, are read once.
    """
    place: dict[tuple[int, ...], int] = {}
    source = [place.setdefault(row.context, len(place)) for row in rows]
    columns = max(map(len, place))
    tokens_BT = torch.tensor([[0] * (columns - len(context)) + list(context) for context in place])
    lengths_B = torch.tensor([len(context) for context in place])
    cache = _empty_cache(model)
    logits_BV = _forward(model, tokens_BT, lengths_B, cache)
    if len(place) < len(rows):
        _take_rows(cache, source)
        logits_BV = logits_BV[source]
    return Batch(list(rows), cache), logits_BV


def decode(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Read the newest token of every row; the logits of the next one, [B, V]."""
    tokens_B1 = torch.tensor([row.tokens[-1:] for row in batch.rows])
    return _forward(model, tokens_B1, torch.tensor([row.length for row in batch.rows]), batch.cache)


def _forward(model: PreTrainedModel, tokens_BT: Tensor, lengths_B: Tensor, cache: DynamicCache) -> Tensor:
    """lengths_B: of the rows with these tokens. The head is the trainer's, so that rounding is the same in both."""
    columns = _columns(cache) + tokens_BT.shape[1]
    positions_BT = torch.arange(columns) - (columns - lengths_B)[:, None]
    output: Any = model.base_model(
        input_ids=tokens_BT.to(model.device),
        attention_mask=(positions_BT >= 0).to(model.device),
        position_ids=positions_BT[:, -tokens_BT.shape[1] :].clamp(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
    )
    head: Any = model.get_output_embeddings()
    return unrounded_logits(output.last_hidden_state[:, -1], head.weight)


def advance(batch: Batch, logits_BV: Tensor, sampling: Sampling, version: int) -> Batch:
    """Give every row its next token; the rows that go on."""
    keys_B = [noise_key(sampling.seed, row.request.id, len(row.tokens)) for row in batch.rows]
    tokens_B, logprobs_B = choose(logits_BV, keys_B, sampling)
    for row, token, logprob in zip(batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
    return batch.select([k for k, row in enumerate(batch.rows) if row.finish(sampling) is None])


def noise_key(seed: int, request_id: str, position: int) -> int:
    """Which random numbers one token of a completion is drawn with: 64 bits, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys_B: Sequence[int], num: int, device: torch.device) -> Tensor:
    """Standard exponential random numbers of each key, [B, num] fp64: the same on every device up to rounding.

    Number v is made of output v of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators") that starts from the key: a function of (key, v), so nothing is kept between tokens. int64 arithmetic
    wraps around like that of unsigned integers.
    """
    keys_B1 = torch.tensor(keys_B, dtype=torch.int64, device=device)[:, None]
    bits = keys_B1 + torch.arange(1, num + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    scratch = torch.empty_like(bits)

    def shifted(by: int) -> Tensor:
        """bits to the right as unsigned integers: zeros come in from the left. Valid until the next call."""
        return torch.bitwise_right_shift(bits, by, out=scratch).bitwise_and_((1 << (64 - by)) - 1)

    bits.bitwise_xor_(shifted(30)).mul_(_signed(0xBF58476D1CE4E5B9))
    bits.bitwise_xor_(shifted(27)).mul_(_signed(0x94D049BB133111EB))
    bits.bitwise_xor_(shifted(31))
    # Of 2^52 equal parts of (0, 1) the middle of one: exact in fp64, and neither 0 nor 1.
    return shifted(12).double().add_(0.5).mul_(-(2.0**-52)).log1p_().neg_()


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64)


def choose(logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that the random numbers of the keys (`noise_key`) pick, [B], and their log-probabilities, [B] fp64.

    The largest of probability / exponential, which is the Gumbel-max trick without its logarithms (Maddison et al.
    2014, arXiv 1411.0030), in fp64. Every token has a number of its own, so logits that differ a little pick another
    token about as rarely as their distributions differ; an inverse cumulative distribution would move the borders of
    all tokens behind the one that changed. With top_p over the nucleus (arXiv:1904.09751): the fewest tokens whose
    probabilities reach top_p, of equal ones the earlier in the vocabulary. Temperature 0 picks the largest logit.
    """
    if logits_BV.is_cpu and len(keys_B) > 1:  # a row fits into the cache of a core, a batch does not
        rows = [_choose(row_1V, [key], sampling) for row_1V, key in zip(logits_BV.split(1), keys_B)]
        tokens, logprobs = zip(*rows)
        return torch.cat(tokens), torch.cat(logprobs)
    return _choose(logits_BV, keys_B, sampling)


def _choose(logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    logprobs_BV = torch.log_softmax(logits_BV.double() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        tokens_B1 = logits_BV.argmax(-1, keepdim=True)
    else:
        race_BV = _nucleus(logprobs_BV.exp(), sampling.top_p)
        race_BV /= exponentials(keys_B, race_BV.shape[1], race_BV.device)
        tokens_B1 = race_BV.argmax(-1, keepdim=True)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def _nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The probabilities of the nucleus, 0 elsewhere."""
    if top_p >= 1:
        return probabilities_BV
    descending_BV, order_BV = torch.sort(probabilities_BV, dim=-1, descending=True, stable=True)
    before_BV = descending_BV.cumsum(-1) - descending_BV
    return torch.zeros_like(probabilities_BV).scatter(1, order_BV, descending_BV * (before_BV < top_p))


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


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    """Without the configuration where it can be: sliding layers keep everything too then, and only mask it."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return DynamicCache(config=model.config) if "linear_attention" in kinds else DynamicCache()


def _attention(cache: DynamicCache) -> list[Any]:
    """Layers with keys and values, [B, heads, T, D]."""
    return [layer for layer in cache.layers if not isinstance(layer, LinearAttentionLayer)]


def _states(cache: DynamicCache) -> list[Any]:
    """What layers of linear attention keep, each in a mapping, under 0: the last inputs of the convolution, and the
    state; rows first."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    return [kept for layer in linear for kept in (layer.conv_states, layer.recurrent_states)]


def _columns(cache: DynamicCache) -> int:
    layers = _attention(cache)
    return layers[0].get_seq_length() if layers else 0


def _take_rows(cache: DynamicCache, rows: Sequence[int]) -> None:
    for layer in _attention(cache):
        indices = torch.tensor(rows, device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(0, indices), layer.values.index_select(0, indices)
    for kept in _states(cache):
        kept[0] = kept[0].index_select(0, torch.tensor(rows, device=kept[0].device))


def _widened(x: Tensor, columns: int) -> Tensor:
    """With padding on the left to this many columns."""
    return pad(x, (0, 0, columns - x.shape[2], 0))
