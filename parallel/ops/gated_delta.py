"""The gated delta rule (arXiv:2412.06464) of a whole packed row, which starts anew at every document, or from a state
that is given for each.

It is computed in chunks of tokens, some chunks after the other (`Block`): what needs no state for all chunks of a block
at once, and between them a scan over the chunks of each document, the documents side by side.

Shape suffixes: T tokens of a row, S documents, N chunks, C tokens of a chunk, H value heads, K key heads (value head h
reads key head h // (H / K)), D width of a key, U of a value.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoloss.parallel.ops.fused import precise
from isoloss.parallel.ops.gated_delta_chunks import CHUNK, Block, Chunks, blocks_of, chunks_on
from isoloss.parallel.ops.row_blocks import CACHED_ELEMENTS
from isoloss.parallel.ops.varlen import VarlenCache

NORM_EPS = 1e-6  # of the norm of queries and keys: what every published model has


def delta_rule(
    query_TKD: Tensor,
    key_TKD: Tensor,
    value_THU: Tensor,
    log_decay_TH: Tensor,
    rate_TH: Tensor,
    lengths: tuple[int, ...],
    uploads: VarlenCache | None = None,
    begun_SHDU: Tensor | None = None,
) -> Tensor:
    """[T, H, U]: of each document and head, with q = query / |query| / sqrt(D), k = key / |key|, a = exp(log_decay),

        S_t = a_t S_(t-1) + k_t (rate_t (v_t - k_t^T a_t S_(t-1)))^T,   out_t = q_t^T S_t,   S_0 = begun, or 0.

    log_decay: at most 0. rate: how much of what the key reads is replaced. lengths: of the documents. begun: then none
    is empty. Computes in at least fp32; what the backward needs grows with T.
    """
    if not query_TKD.shape[0]:
        return value_THU
    chunks = chunks_on(lengths, query_TKD.device, uploads, ordered=begun_SHDU is not None)
    out, _ = _DeltaRule.apply(query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH, begun_SHDU, chunks, False)
    return out


def delta_rule_and_states(
    query_TKD: Tensor,
    key_TKD: Tensor,
    value_THU: Tensor,
    log_decay_TH: Tensor,
    rate_TH: Tensor,
    lengths: tuple[int, ...],
    uploads: VarlenCache | None = None,
    begun_SHDU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`delta_rule`, and the state that each document leaves, [S, H, D, U], in at least fp32; no document is empty."""
    chunks = chunks_on(lengths, query_TKD.device, uploads, ordered=True)
    return _DeltaRule.apply(query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH, begun_SHDU, chunks, True)


@torch.no_grad()
def delta_rule_next(
    query_BKD: Tensor,
    key_BKD: Tensor,
    value_BHU: Tensor,
    log_decay_BH: Tensor,
    rate_BH: Tensor,
    state_BHDU: Tensor,
) -> Tensor:
    """What `delta_rule` gives for the next token of each of B documents, [B, H, U], by the recurrence. state: what the
    documents have left, which becomes what they leave. Not differentiable."""
    group, dtype = value_BHU.shape[1] // key_BKD.shape[1], state_BHDU.dtype
    query, key = (
        _of_length(length, x.to(dtype))[0].repeat_interleave(group, 1)[:, :, None]
        for length, x in ((key_BKD.shape[2] ** -0.5, query_BKD), (1, key_BKD))
    )
    state_BHDU *= log_decay_BH.to(dtype).exp()[..., None, None]
    errors = value_BHU.to(dtype)[:, :, None] - key @ state_BHDU
    state_BHDU += key.transpose(2, 3) * (rate_BH.to(dtype)[..., None, None] * errors)
    return (query @ state_BHDU).squeeze(2).to(value_BHU.dtype)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, log_decay, rate, begun, chunks: Chunks, leaves: bool):
        """Keeps of each chunk the inverse of its system, the state that it finds, and what it writes."""
        heads, columns = value.shape[1:]
        counts = chunks.count, chunks.count + leaves * len(chunks.order), chunks.count
        shapes, dtype = ((CHUNK, CHUNK), (query.shape[2], columns), (CHUNK, columns)), precise(query).dtype
        inverse, state, written = (value.new_empty(n, heads, *shape, dtype=dtype) for n, shape in zip(counts, shapes))
        out = value.new_empty(chunks.count * CHUNK, heads, columns)
        in_order = None if begun is None else begun.index_select(0, chunks.order)
        for block in _blocks(chunks, value):
            within = _Within(chunks, block, query, key, log_decay, rate, leaves)
            _forward(within, value, in_order, inverse, state, written, out)
        ctx.chunks, ctx.leaves, ctx.begun = chunks, leaves, begun is not None
        found, left = state[: chunks.count], state[chunks.count :]
        ctx.save_for_backward(query, key, value, log_decay, rate, inverse, found, written)
        return out.index_select(0, chunks.slots), left.index_select(0, chunks.ranks) if leaves else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, of_states):
        chunks, (query, key, value, log_decay, rate, inverse, state, written) = ctx.chunks, ctx.saved_tensors
        grads = [t.new_empty(chunks.count * CHUNK, *t.shape[1:]) for t in (query, key, value, log_decay, rate)]
        left = torch.empty_like(state)
        if ctx.leaves:
            torch.index_select(of_states, 0, chunks.order, out=left[chunks.with_successor :])
        else:
            left[chunks.with_successor :].zero_()
        of_begun = state.new_empty(len(chunks.order), *state.shape[1:]) if ctx.begun else None
        for block in reversed(_blocks(chunks, value)):
            within = _Within(chunks, block, query, key, log_decay, rate, ctx.leaves)
            _backward(within, grad, value, inverse, state, written, left, of_begun, grads)
        of_begun = None if of_begun is None else of_begun.index_select(0, chunks.ranks)
        return *(t.index_select(0, chunks.slots) for t in grads), of_begun, None, None


def _blocks(chunks: Chunks, value_THU: Tensor) -> tuple[Block, ...]:
    """On a GPU all chunks, on a CPU so many that [N, H, C, C] has CACHED_ELEMENTS: what is computed on the way stays in
    its cache and takes little memory."""
    size = chunks.count
    if value_THU.device.type == "cpu":
        size = max(1, CACHED_ELEMENTS // (value_THU.shape[1] * CHUNK**2))
    return blocks_of(chunks.turns, size)


class _Within:
    """What the chunks of a block compute without a state, and how they are cut from a row.

    query, key: of length D**-0.5 and 1.
    past: of tokens i >= j, what is left at i of what j wrote, exp(G_i - G_j), G the sums of log decays.
    similar, seen: key_i . key_j and query_i . key_j, of each key head.
    since, until: what is left at i of what the chunk finds, and at its end of what i wrote. decay: of the whole chunk.
    leaves: what documents leave is asked for, so that places without a token must write and forget nothing.
    """

    def __init__(self, chunks: Chunks, block: Block, query_TKD, key_TKD, log_decay_TH, rate_TH, leaves: bool):
        self.leaves, self.chunks, self.turns = leaves, chunks, block.turns
        self.block = slice(block.start, block.stop)
        self.places = slice(block.start * CHUNK, block.stop * CHUNK)
        self.dtype, self.keys, self.length = precise(query_TKD).dtype, key_TKD.shape[1], key_TKD.shape[2] ** -0.5
        self.query, self.query_factor = _of_length(self.length, self.cut(query_TKD))
        self.key, self.key_factor = _of_length(1, self.cut(key_TKD))
        self.empty = chunks.empty[self.places].view(-1, 1, CHUNK, 1)
        self.rate, log_decay = (self.cut(x[..., None]).contiguous() for x in (rate_TH, log_decay_TH))
        if leaves:
            self.rate.masked_fill_(self.empty, 0)
            log_decay.masked_fill_(self.empty, 0)

        total = log_decay.cumsum(2)
        self.past = _left(total - total.transpose(2, 3)).tril_()  # what is positive is of the future
        self.since, self.until = _left(total.clone()), _left(total[:, :, -1:] - total)
        self.decay = self.since[:, :, -1:]
        over = self.key.transpose(2, 3)
        self.similar, self.seen = self.key @ over, self.query @ over

    def cut(self, x: Tensor) -> Tensor:
        """[T, heads, width] -> [N, heads, C, width]; where a document has no token, its last one once more."""
        places = x.index_select(0, self.chunks.tokens[self.places]).to(self.dtype)
        return places.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def put(self, x: Tensor, into: Tensor) -> None:
        """[N, heads, C, width] -> the places of these chunks among [places, heads, width]."""
        into[self.places].unflatten(0, (-1, CHUNK)).transpose(1, 2).copy_(x)

    def by_head(self, x_NK: Tensor, factor_NH: Tensor) -> Tensor:
        return (x_NK[:, :, None] * factor_NH.unflatten(1, (self.keys, -1))).flatten(1, 2)

    def of_keys(self, x_NH: Tensor) -> Tensor:
        return x_NH if x_NH.shape[1] == self.keys else x_NH.unflatten(1, (self.keys, -1)).sum(2)


def _left(log_decay: Tensor) -> Tensor:
    """exp, in the same memory; 0 where it is far below the rounding of what is added to it: a CPU is several times
    slower on the numbers near underflow that products with it would be."""
    least = torch.finfo(log_decay.dtype).eps ** 3
    return torch.threshold_(log_decay.clamp_(math.log(least) - 1, 0).exp_(), least, 0)


def _of_length(length: float, x: Tensor) -> tuple[Tensor, Tensor]:
    factor = length * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return _scaled(x, factor), factor


def _of_length_backward(length: float, grad: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    along = _dot(grad, x) / length**2
    return grad.addcmul_(x, along, value=-1).mul_(factor)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x factor, without gaps."""
    return torch.mul(x, factor, out=x.new_empty(x.shape))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into = a b, for all chunks and heads."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=into.flatten(0, 1))


def _add_product(into: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> None:
    """into += factor a b, for all chunks and heads."""
    if into.shape[0]:
        flat = into.flatten(0, 1)
        torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), alpha=factor, out=flat)


def _forward(within: _Within, value_THU, begun, inverse, state, written, out) -> None:
    """A chunk finds the state S, of a document's first what is `begun`, or 0. It writes V' = rate (v - read S) - rate
    (similar past, below the diagonal) V', solved by the inverse of that matrix, and leaves decay S + write^T V'; out =
    query S + (seen past) V'. Fills inverse, V' and out of a block, and the states that follow its chunks."""
    rate, key = within.rate, within.key
    inverse, found, written = inverse[within.block], state[within.block], written[within.block]
    system = within.by_head(within.similar, within.past).mul_(rate)
    eye = torch.eye(CHUNK, dtype=rate.dtype, device=rate.device).expand_as(system)
    torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True, out=inverse)

    errors = _scaled(within.cut(value_THU), rate)
    read, write = within.by_head(key, within.since * rate), within.by_head(key, within.until)
    for turn in within.turns:
        mine, later = turn.chunks, turn.later
        if begun is None:
            found[turn.first].zero_()
        else:
            found[turn.first], later = begun[turn.begun], mine
        _add_product(errors[later], read[later], found[later], -1)
        _product(written[mine], inverse[mine], errors[mine])
        if within.leaves or turn.followers.stop <= within.chunks.count:
            torch.mul(found[mine], within.decay[mine], out=state[turn.followers])
            _add_product(state[turn.followers], write[mine].transpose(2, 3), written[mine])

    result = within.by_head(within.seen, within.past) @ written
    _add_product(result, within.by_head(within.query, within.since), found)
    within.put(result, out)


def _backward(within: _Within, grad_THU, value_THU, inverse, state, written, left, of_begun, grads) -> None:
    """left: [N, H, D, U], the gradient of what each chunk leaves; zero where none follows. Fills the gradients of a
    block, of what the chunks leave that its chunks follow, and of what its documents begin with where that is given."""
    query, key, rate, past, since, until = (
        within.query, within.key, within.rate, within.past, within.since, within.until
    )  # fmt: skip
    inverse, state, written, of_left = (t[within.block] for t in (inverse, state, written, left))
    grad = within.cut(grad_THU).masked_fill(within.empty, 0).contiguous()
    read, write = within.by_head(key, since * rate), within.by_head(key, until)
    of_written = within.by_head(within.seen, past).transpose(2, 3) @ grad
    of_state = within.by_head(query, since).transpose(2, 3) @ grad
    of_errors = torch.empty_like(of_written)  # of rate (v - read S)
    for turn in reversed(within.turns):
        mine, later = turn.chunks, turn.later
        if within.leaves or turn.followers.stop <= within.chunks.count:
            _add_product(of_written[mine], write[mine], of_left[mine])
        _product(of_errors[mine], inverse[mine].transpose(2, 3), of_written[mine])
        if turn.before:
            torch.addcmul(of_state[later], of_left[later], within.decay[later], out=left[turn.before])
            _add_product(left[turn.before], read[later].transpose(2, 3), of_errors[later], -1)
        if of_begun is not None:
            first = turn.first
            torch.addcmul(of_state[first], of_left[first], within.decay[first], out=of_begun[turn.begun])
            _add_product(of_begun[turn.begun], read[first].transpose(2, 3), of_errors[first], -1)

    of_similar = (of_errors @ written.transpose(2, 3)).mul_(past)
    of_similar.diagonal(dim1=2, dim2=3).zero_()
    of_seen = (grad @ written.transpose(2, 3)).mul_(past)
    through = within.by_head(within.similar, of_similar)
    lost = through.sum(-1, keepdim=True)
    through.mul_(-rate).add_(within.by_head(within.seen, of_seen))
    of_total = through.sum(-1, keepdim=True) - through.sum(-2)[..., None]
    of_similar.mul_(-rate)

    of_query, of_read, of_write = (
        a @ b.transpose(2, 3) for a, b in ((grad, state), (of_errors, state), (written, of_left))
    )
    lost_read = since * within.by_head(key, of_read).sum(-1, keepdim=True)
    of_until = until * within.by_head(key, of_write).sum(-1, keepdim=True)
    of_total += since * within.by_head(query, of_query).sum(-1, keepdim=True) - rate * lost_read - of_until
    of_decay = (of_left * state).sum((-1, -2), keepdim=True)
    of_total[:, :, -1:] += of_until.sum(2, keepdim=True) + of_decay * within.decay

    of_similar, of_seen = within.of_keys(of_similar), within.of_keys(of_seen)
    of_query = within.of_keys(of_query.mul_(since))
    of_key = within.of_keys(of_write.mul_(until).sub_(of_read.mul_(since * rate)))
    _add_product(of_query, of_seen, key)
    _add_product(of_key, of_seen.transpose(2, 3), query)
    _add_product(of_key, of_similar + of_similar.transpose(2, 3), key)
    found = (
        _of_length_backward(within.length, of_query, query, within.query_factor),
        _of_length_backward(1, of_key, key, within.key_factor),
        of_errors * rate,
        of_total.flip(2).cumsum(2).flip(2),
        _dot(within.cut(value_THU), of_errors) - lost - lost_read,
    )
    for mine, into in zip(found, grads, strict=True):
        within.put(mine, into.view(*into.shape[:2], -1))
