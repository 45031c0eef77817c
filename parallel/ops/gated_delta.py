"""The gated delta rule (arXiv:2412.06464) over a whole packed row, restarted at every document, or continued from a
given state.

Documents are computed in chunks of tokens, and chunks in blocks, one block after the other. Within a block, all that
needs no state is computed for all chunks at once. Then a scan visits the chunks of each document in order, and all
documents in parallel.

Shape suffixes: T tokens of a row, S documents, N chunks, C tokens of a chunk, H value heads, K key heads (value head h
reads key head h // (H / K)), D width of a key, U width of a value.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoloss.parallel.ops.fused import precise
from isoloss.parallel.ops.gated_delta_chunks import (
    CHUNK,
    Block,
    BlockTerms,
    Chunks,
    DeltaInputs,
    add_product,
    blocks_of,
    chunks_on,
    dot,
    product,
    scaled,
    to_length,
    to_length_backward,
)
from isoloss.parallel.ops.row_blocks import CACHED_ELEMENTS
from isoloss.parallel.ops.varlen import VarlenCache


def delta_rule(
    inputs: DeltaInputs,
    lengths: tuple[int, ...],
    uploads: VarlenCache | None = None,
    initial_SHDU: Tensor | None = None,
) -> Tensor:
    """Compute for each document and head, with q = query / |query| / sqrt(D), k = key / |key|, a = exp(log_decay),

        S_t = a_t S_(t-1) + k_t (rate_t (v_t - k_t^T a_t S_(t-1)))^T,   out_t = q_t^T S_t,   S_0 = initial, or 0,

    in at least fp32, [T, H, U]. Memory for the backward grows linearly with T.

    lengths: tokens of each document; with `initial_SHDU` no document may be empty.
    uploads: tensors on the device that all layers of the row share; None: upload for this call.
    """
    if not inputs.query_TKD.shape[0]:
        return inputs.value_THU
    chunks = chunks_on(lengths, inputs.query_TKD.device, uploads, ordered=initial_SHDU is not None)
    out, _ = _DeltaRule.apply(chunks, False, initial_SHDU, *inputs)
    return out


def delta_rule_and_states(
    inputs: DeltaInputs,
    lengths: tuple[int, ...],
    uploads: VarlenCache | None = None,
    initial_SHDU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule`, and the final state of each document, [S, H, D, U], in at least fp32.

    No document may be empty.
    """
    chunks = chunks_on(lengths, inputs.query_TKD.device, uploads, ordered=True)
    return _DeltaRule.apply(chunks, True, initial_SHDU, *inputs)


@torch.no_grad()
def delta_rule_next(inputs: DeltaInputs, state_BHDU: Tensor) -> Tensor:
    """Compute `delta_rule` for the next token of each of B documents by the recurrence, [B, H, U]. Not differentiable.

    inputs: tensors of B tokens. state_BHDU: states before these tokens, overwritten by the states after them.
    """
    query, key, value, log_decay, rate = inputs
    group, dtype = value.shape[1] // key.shape[1], state_BHDU.dtype
    query, key = (
        to_length(length, x.to(dtype))[0].repeat_interleave(group, 1)[:, :, None]
        for length, x in ((key.shape[2] ** -0.5, query), (1, key))
    )
    state_BHDU *= log_decay.to(dtype).exp()[..., None, None]
    errors = value.to(dtype)[:, :, None] - key @ state_BHDU
    state_BHDU += key.transpose(2, 3) * (rate.to(dtype)[..., None, None] * errors)
    return (query @ state_BHDU).squeeze(2).to(value.dtype)


class _Saved(NamedTuple):
    """The results of the forward that the backward reads, for each chunk.

    inverse_NHCC: inverse of the chunk's triangular system.
    state_NHDU: state before the chunk; then, if final states are asked for, the final state of each document.
    written_NHCU: values that the chunk writes.
    """

    inverse_NHCC: Tensor
    state_NHDU: Tensor
    written_NHCU: Tensor


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chunks: Chunks, with_states: bool, initial: Tensor | None, *tensors: Tensor):
        inputs = DeltaInputs(*tensors)
        query, value = inputs.query_TKD, inputs.value_THU
        heads, columns = value.shape[1:]
        counts = chunks.count, chunks.count + with_states * len(chunks.order), chunks.count
        shapes, dtype = ((CHUNK, CHUNK), (query.shape[2], columns), (CHUNK, columns)), precise(query).dtype
        saved = _Saved(*(value.new_empty(n, heads, *shape, dtype=dtype) for n, shape in zip(counts, shapes)))
        out = value.new_empty(chunks.count * CHUNK, heads, columns)
        initial_in_order = None if initial is None else initial.index_select(0, chunks.order)
        for block in _blocks(chunks, value):
            _forward(BlockTerms(chunks, block, inputs, with_states), saved, initial_in_order, out)
        ctx.chunks, ctx.with_states, ctx.with_initial = chunks, with_states, initial is not None
        before, final = saved.state_NHDU[: chunks.count], saved.state_NHDU[chunks.count :]
        ctx.save_for_backward(*inputs, saved.inverse_NHCC, before, saved.written_NHCU)
        return out.index_select(0, chunks.slots), final.index_select(0, chunks.ranks) if with_states else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_states):
        chunks, inputs, saved = ctx.chunks, DeltaInputs(*ctx.saved_tensors[:5]), _Saved(*ctx.saved_tensors[5:])
        grads = [t.new_empty(chunks.count * CHUNK, *t.shape[1:]) for t in inputs]
        state = saved.state_NHDU
        grad_after = torch.empty_like(state)
        if ctx.with_states:
            torch.index_select(grad_states, 0, chunks.order, out=grad_after[chunks.with_successor :])
        else:
            grad_after[chunks.with_successor :].zero_()
        grad_initial = state.new_empty(len(chunks.order), *state.shape[1:]) if ctx.with_initial else None
        for block in reversed(_blocks(chunks, inputs.value_THU)):
            terms = BlockTerms(chunks, block, inputs, ctx.with_states)
            _backward(terms, saved, grad, grad_after, grad_initial, grads)
        grad_initial = None if grad_initial is None else grad_initial.index_select(0, chunks.ranks)
        return None, None, grad_initial, *(t.index_select(0, chunks.slots) for t in grads)


def _blocks(chunks: Chunks, value_THU: Tensor) -> tuple[Block, ...]:
    """Return one block on a GPU. On a CPU [N, H, C, C] of a block has CACHED_ELEMENTS at most, or is one chunk: then
    intermediate results stay in the cache and take little memory."""
    size = chunks.count
    if value_THU.device.type == "cpu":
        size = max(1, CACHED_ELEMENTS // (value_THU.shape[1] * CHUNK**2))
    return blocks_of(chunks.turns, size)


def _forward(terms: BlockTerms, saved: _Saved, initial: Tensor | None, out: Tensor) -> None:
    """Compute the chunks of a block: fill `out` and `saved`, of the states those that follow the chunks.

    With the state S before it, a chunk writes V' = rate (v - read S) - rate (similar past, below the diagonal) V'. The
    inverse of this triangular system solves it. The state after it is decay S + write^T V', and
    out = query S + (seen past) V'.

    initial: states before the first chunks of documents, in `Chunks.order`; None: zeros.
    """
    rate, key, block = terms.rate, terms.key, terms.block
    state = saved.state_NHDU
    inverse, before, written = (t[block] for t in saved)
    system = terms.by_head(terms.similar, terms.past).mul_(rate)
    eye = torch.eye(CHUNK, dtype=rate.dtype, device=rate.device).expand_as(system)
    torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True, out=inverse)

    errors = scaled(terms.cut(terms.inputs.value_THU), rate)
    read, write = terms.by_head(key, terms.since * rate), terms.by_head(key, terms.until)
    for turn in terms.turns:
        own, reading = turn.chunks, turn.later
        if initial is None:
            before[turn.first].zero_()  # these chunks read zeros, so no product is needed
        else:
            before[turn.first], reading = initial[turn.begun], own
        add_product(errors[reading], read[reading], before[reading], -1)
        product(written[own], inverse[own], errors[own])
        if terms.with_states or turn.followers.stop <= terms.chunks.count:
            torch.mul(before[own], terms.decay[own], out=state[turn.followers])
            add_product(state[turn.followers], write[own].transpose(2, 3), written[own])

    result = terms.by_head(terms.seen, terms.past) @ written
    add_product(result, terms.by_head(terms.query, terms.since), before)
    terms.put(result, out)


def _backward(
    terms: BlockTerms, saved: _Saved, grad_THU: Tensor, grad_after: Tensor, grad_initial: Tensor | None, grads: list
) -> None:
    """Compute the gradients of a block: fill `grads`, and rows of `grad_after` and `grad_initial` for earlier states.

    grad_after: gradient of the state after each chunk, [N, H, D, U]; rows of this block are complete on entry.
    grad_initial: gradient of the initial states, in `Chunks.order`; None: no initial states. grads: by input and place.
    """
    query, key, rate = terms.query, terms.key, terms.rate
    past, since, until = terms.past, terms.since, terms.until
    inverse, state, written, grad_next = (t[terms.block] for t in (*saved, grad_after))
    grad = terms.cut(grad_THU).masked_fill(terms.empty, 0).contiguous()
    read, write = terms.by_head(key, since * rate), terms.by_head(key, until)
    grad_written = terms.by_head(terms.seen, past).transpose(2, 3) @ grad
    grad_state = terms.by_head(query, since).transpose(2, 3) @ grad
    grad_errors = torch.empty_like(grad_written)  # of rate (v - read S)
    for turn in reversed(terms.turns):
        own, later, first = turn.chunks, turn.later, turn.first
        if terms.with_states or turn.followers.stop <= terms.chunks.count:
            add_product(grad_written[own], write[own], grad_next[own])
        product(grad_errors[own], inverse[own].transpose(2, 3), grad_written[own])
        if turn.before:
            torch.addcmul(grad_state[later], grad_next[later], terms.decay[later], out=grad_after[turn.before])
            add_product(grad_after[turn.before], read[later].transpose(2, 3), grad_errors[later], -1)
        if grad_initial is not None:
            torch.addcmul(grad_state[first], grad_next[first], terms.decay[first], out=grad_initial[turn.begun])
            add_product(grad_initial[turn.begun], read[first].transpose(2, 3), grad_errors[first], -1)

    grad_similar = (grad_errors @ written.transpose(2, 3)).mul_(past)
    grad_similar.diagonal(dim1=2, dim2=3).zero_()
    grad_seen = (grad @ written.transpose(2, 3)).mul_(past)
    through = terms.by_head(terms.similar, grad_similar)
    lost = through.sum(-1, keepdim=True)
    through.mul_(-rate).add_(terms.by_head(terms.seen, grad_seen))
    grad_total = through.sum(-1, keepdim=True) - through.sum(-2)[..., None]
    grad_similar.mul_(-rate)
    grad_query, grad_read, grad_write = (
        a @ b.transpose(2, 3) for a, b in ((grad, state), (grad_errors, state), (written, grad_next))
    )
    lost_read = since * terms.by_head(key, grad_read).sum(-1, keepdim=True)
    grad_until = until * terms.by_head(key, grad_write).sum(-1, keepdim=True)
    grad_total += since * terms.by_head(query, grad_query).sum(-1, keepdim=True) - rate * lost_read - grad_until
    grad_decay = (grad_next * state).sum((-1, -2), keepdim=True)
    grad_total[:, :, -1:] += grad_until.sum(2, keepdim=True) + grad_decay * terms.decay

    grad_similar, grad_seen = terms.sum_by_key_head(grad_similar), terms.sum_by_key_head(grad_seen)
    grad_query = terms.sum_by_key_head(grad_query.mul_(since))
    grad_key = terms.sum_by_key_head(grad_write.mul_(until).sub_(grad_read.mul_(since * rate)))
    add_product(grad_query, grad_seen, key)
    add_product(grad_key, grad_seen.transpose(2, 3), query)
    add_product(grad_key, grad_similar + grad_similar.transpose(2, 3), key)
    by_input = (
        to_length_backward(terms.length, grad_query, query, terms.query_factor),
        to_length_backward(1, grad_key, key, terms.key_factor),
        grad_errors * rate,
        grad_total.flip(2).cumsum(2).flip(2),
        dot(terms.cut(terms.inputs.value_THU), grad_errors) - lost - lost_read,
    )
    for gradient, into in zip(by_input, grads, strict=True):
        terms.put(gradient, into.view(*into.shape[:2], -1))
