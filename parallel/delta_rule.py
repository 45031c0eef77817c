"""The gated delta rule (arXiv:2412.06464) of a whole packed row, which starts anew at every document.

It is computed in chunks of tokens: what needs no state for all chunks at once, and between them a scan over the chunks
of each document, the documents side by side.

Shape suffixes: T tokens of a row, N chunks, C tokens of a chunk, H value heads, K key heads (value head h reads key
head h // (H / K)), D width of a key, U of a value.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoloss.parallel.chunks import CHUNK, Chunks, chunks_on
from isoloss.parallel.one_kernel import precise
from isoloss.parallel.ragged import Uploads

SLAB = 2**19
NORM_EPS = 1e-6  # of the norm of queries and keys: what every published model has


# ---- the scan --------------------------------------------------------------------------------------------------------


def scan(decay, read, write, value, turns: Sequence[int]) -> tuple[Tensor, Tensor]:
    """From chunk to chunk of every document. A chunk finds the state S (a document's first: zero), writes
    V' = value - read S, and leaves decay S + write^T V'.

    decay: [N, H, 1 or D, 1]; read, write: [N, H, C, D]; value: [N, H, C, U]. Returns S [N, H, D, U] and V', which takes
    the memory of `value`.
    """
    state = value.new_empty(*read.shape[:2], read.shape[3], value.shape[3])
    for mine, left, found in _turns(turns):
        state[found.stop : mine.stop].zero_()
        if left.stop > left.start:
            torch.mul(state[left], decay[left], out=state[found])
            _add_product(state[found], write[left].transpose(2, 3), value[left])
            _add_product(value[found], read[found], state[found], -1)
    return state, value


def scan_backward(decay, read, write, grad_value, grad_state, turns: Sequence[int]) -> tuple[Tensor, Tensor]:
    """grad_value, grad_state: gradients of V' and S as what is outside of the scan makes them. Returns that of `value`,
    in the memory of the former, and that of what each chunk leaves, [N, H, D, U]: zero where none follows."""
    grad_left = torch.empty_like(grad_state)
    grad_left[grad_left.shape[0] - turns[-1] :].zero_()
    for number, (mine, left, found) in reversed(list(enumerate(_turns(turns)))):
        if number + 1 < len(turns):
            _add_product(grad_value[mine], write[mine], grad_left[mine])
        torch.addcmul(grad_state[found], grad_left[found], decay[found], out=grad_left[left])
        _add_product(grad_left[left], read[found].transpose(2, 3), grad_value[found], -1)
    return grad_value, grad_left


def _turns(turns: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """The chunks of each turn, those that leave a state to it, all of the turn before, and those that find one."""
    start = before = 0
    for count in turns:
        yield slice(start, start + count), slice(start - before, start), slice(start, start + before)
        start, before = start + count, count


def _add_product(into: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> None:
    """into += factor a b, for all chunks and heads."""
    if into.shape[0]:
        flat = into.flatten(0, 1)
        torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), alpha=factor, out=flat)


# ---- the rule --------------------------------------------------------------------------------------------------------


def delta_rule(
    query_TKD: Tensor,
    key_TKD: Tensor,
    value_THU: Tensor,
    log_decay_TH: Tensor,
    rate_TH: Tensor,
    lengths: tuple[int, ...],
    uploads: Uploads | None = None,
) -> Tensor:
    """[T, H, U]: of each document and head, with q = query / |query| / sqrt(D), k = key / |key|, a = exp(log_decay),

        S_t = a_t S_(t-1) + k_t (rate_t (v_t - k_t^T a_t S_(t-1)))^T,   out_t = q_t^T S_t,   S_0 = 0.

    log_decay: at most 0. rate: how much of what the key reads is replaced. lengths: of the documents. Computes in at
    least fp32; what the backward needs grows with T.
    """
    if not query_TKD.shape[0]:
        return value_THU
    chunks = chunks_on(lengths, query_TKD.device, uploads)
    return _DeltaRule.apply(query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH, chunks)


class _Cut:
    """Tokens into chunks, and back."""

    def __init__(self, chunks: Chunks, dtype: torch.dtype):
        self.chunks, self.dtype = chunks, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, width] -> [N, heads, C, width]; 0 where there is no token."""
        count = self.chunks.count
        places = x.new_zeros(count * CHUNK, *x.shape[1:]).index_copy_(0, self.chunks.slots, x)
        out = x.new_empty(count, x.shape[1], CHUNK, x.shape[2], dtype=self.dtype)
        return out.copy_(places.unflatten(0, (count, CHUNK)).transpose(1, 2))

    def back(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)[self.chunks.slots].to(dtype)


class _Within:
    """What a chunk computes without a state.

    past: of tokens i >= j, what is left at i of what j wrote, exp(G_i - G_j), G the sums of log decays.
    similar: key_i . key_j, of each value head.
    seen: of query_i . key_j, what is left at i.
    """

    def __init__(self, query_NKCD: Tensor, key_NKCD: Tensor, log_decay_NHC: Tensor):
        self.keys = key_NKCD.shape[1]
        total = log_decay_NHC.cumsum(-1)
        self.past = (total[..., :, None] - total[..., None, :]).exp_().tril_()
        over = key_NKCD.transpose(2, 3)
        self.similar = self.by_head(key_NKCD @ over, self.past)
        self.seen = self.by_head(query_NKCD @ over, self.past)
        self.since = total.exp()[..., None]
        self.until = (total[..., -1:] - total).exp()[..., None]
        self.decay = total[..., -1].exp()[..., None, None]
        self.query = self.by_head(query_NKCD, self.since)
        self.read = self.by_head(key_NKCD, self.since)
        self.write = self.by_head(key_NKCD, self.until)

    def by_head(self, x_NK: Tensor, factor_NH: Tensor) -> Tensor:
        return (x_NK[:, :, None] * self.grouped(factor_NH)).flatten(1, 2)

    def grouped(self, x_NH: Tensor) -> Tensor:
        return x_NH.unflatten(1, (self.keys, -1))

    def of_keys(self, x_NH: Tensor) -> Tensor:
        return x_NH if x_NH.shape[1] == self.keys else self.grouped(x_NH).sum(2)


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x * factor, factor


def _normed_backward(grad: Tensor, normed: Tensor, factor: Tensor) -> Tensor:
    return factor * (grad - normed * (grad * normed).sum(-1, keepdim=True))


class _DeltaRule(torch.autograd.Function):
    """Some heads after the other: see `_slabs_of_heads`."""

    @staticmethod
    def forward(ctx, query, key, value, log_decay, rate, chunks: Chunks):
        given, kept = (query, key, value, log_decay, rate), []
        out = torch.empty_like(value)
        ctx.chunks, ctx.slabs = chunks, _slabs_of_heads(value, key.shape[1], chunks)
        for slab in ctx.slabs:
            mine = (t[:, heads] for t, heads in zip(given, slab))
            out[:, slab[2]], *more = _forward(chunks, *mine)
            kept += more
        ctx.save_for_backward(*given, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        given, kept = ctx.saved_tensors[:5], iter(ctx.saved_tensors[5:])
        grads = [torch.empty_like(t) for t in given]
        for slab in ctx.slabs:
            mine = (t[:, heads] for t, heads in zip(given, slab))
            found = _backward(ctx.chunks, grad[:, slab[2]], *mine, *islice(kept, 3))
            for whole, heads, part in zip(grads, slab, found, strict=True):
                whole[:, heads] = part
        return (*grads, None)


def _slabs_of_heads(value_THU: Tensor, key_heads: int, chunks: Chunks) -> list[tuple[slice, ...]]:
    """Heads of queries, keys, values, decays and rates that are computed at a time: on a GPU all, on a CPU so many that
    [N, H, C, C] has SLAB elements, which stay in its cache, and what is computed on the way takes little memory."""
    group = value_THU.shape[1] // key_heads
    each = key_heads
    if value_THU.device.type == "cpu":
        each = max(1, SLAB // (chunks.count * CHUNK**2 * group))
    slabs = []
    for first in range(0, key_heads, each):
        keys = slice(first, min(first + each, key_heads))
        values = slice(keys.start * group, keys.stop * group)
        slabs.append((keys, keys, values, values, values))
    return slabs


def _forward(chunks: Chunks, query, key, value, log_decay, rate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V' = rate (v - read S) - rate (similar past, below the diagonal) V', solved by the inverse of that matrix; out =
    (query S) + seen V'. Returns out, the inverse, S and V'.

    Products with `within.past` are zero above the diagonal."""
    dtype = precise(query).dtype
    cut = _Cut(chunks, dtype)
    within = _Within(
        _normed(cut(query))[0].mul_(query.shape[-1] ** -0.5),
        _normed(cut(key))[0],
        cut(log_decay[..., None])[..., 0],
    )
    rates = cut(rate[..., None])
    eye = torch.eye(CHUNK, dtype=dtype, device=query.device).expand_as(within.past)
    inverse = torch.linalg.solve_triangular(within.similar * rates, eye, upper=False, unitriangular=True)
    read, values = inverse @ (within.read * rates), inverse @ (cut(value) * rates)
    state, values = scan(within.decay, read, within.write, values, chunks.turns)
    out = within.seen @ values
    later = slice(chunks.turns[0], None)
    _add_product(out[later], within.query[later], state[later])
    return cut.back(out, value.dtype), inverse, state, values


def _backward(
    chunks: Chunks, grad, query_T, key_T, value_T, log_decay, rate, inverse, state, values
) -> tuple[Tensor, ...]:
    cut, turns = _Cut(chunks, state.dtype), chunks.turns
    (query, query_factor), (key, key_factor) = _normed(cut(query_T)), _normed(cut(key_T))
    scale = query_T.shape[-1] ** -0.5
    query, query_factor = query * scale, query_factor * scale
    within = _Within(query, key, cut(log_decay[..., None])[..., 0])
    rates, grad = cut(rate[..., None]), cut(grad)

    read = inverse @ (within.read * rates)
    grad_values = within.seen.transpose(2, 3) @ grad
    grad_state = within.query.transpose(2, 3) @ grad
    grad_values, grad_left = scan_backward(within.decay, read, within.write, grad_values, grad_state, turns)

    grad_errors = inverse.transpose(2, 3) @ grad_values  # of rate (v - read S)
    errors = cut(value_T) - within.read @ state
    grad_similar = (grad_errors @ values.transpose(2, 3)).tril_(-1)
    grad_rate = (grad_errors * errors).sum(-1) - (grad_similar * within.similar).sum(-1)
    grad_value = grad_errors.mul_(rates)
    grad_similar *= -rates
    grad_seen = grad @ values.transpose(2, 3)
    through = (grad_similar * within.similar).addcmul_(grad_seen, within.seen)
    grad_total = through.sum(-1) - through.sum(-2)
    grad_similar, grad_seen = (within.of_keys(x.mul_(within.past)) for x in (grad_similar, grad_seen))

    grad_query, lost_read = grad @ state.transpose(2, 3), grad_value @ state.transpose(2, 3)
    grad_write = values @ grad_left.transpose(2, 3)
    grad_total += within.query.mul_(grad_query).addcmul_(lost_read, within.read, value=-1).sum(-1)
    of_until = within.write.mul_(grad_write).sum(-1)
    grad_total -= of_until
    grad_total[..., -1] += of_until.sum(-1) + (grad_left * state).sum((-1, -2)) * within.decay[..., 0, 0]
    grad_log_decay = grad_total.flip(-1).cumsum(-1).flip(-1)

    grad_query = within.of_keys(grad_query.mul_(within.since))
    grad_key = within.of_keys((grad_write.mul_(within.until)).addcmul_(lost_read, within.since, value=-1))
    _add_product(grad_query, grad_seen, key)
    _add_product(grad_key, grad_seen.transpose(2, 3), query)
    _add_product(grad_key, grad_similar + grad_similar.transpose(2, 3), key)
    grad_query = _normed_backward(grad_query, query / scale, query_factor)
    grad_key = _normed_backward(grad_key, key, key_factor)
    return (
        cut.back(grad_query, query_T.dtype),
        cut.back(grad_key, key_T.dtype),
        cut.back(grad_value, value_T.dtype),
        cut.back(grad_log_decay[..., None], log_decay.dtype)[..., 0],
        cut.back(grad_rate[..., None], rate.dtype)[..., 0],
    )
