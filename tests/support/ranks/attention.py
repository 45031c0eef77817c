"""Attention over a grid of ranks, and dense masked attention over the whole row as its reference."""

from dataclasses import dataclass
from unittest import mock

import torch
from doubles import flash_attention
from torch import Tensor

from isoloss.parallel import Layout, Mesh, attention
from isoloss.parallel.attention import PackedRow, grid_attention
from isoloss.parallel.ops.block_attention import Heads, attend, attend_backward
from isoloss.parallel.ops.flash_attention import Attended
from isoloss.parallel.ops.mask_blocks import blocks_of
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.row_order import tokens_of
from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.sequence import own_tokens


@dataclass(frozen=True)
class Case:
    """A row of documents, or of pieces of them. sinks_H: None, or a logit for each query head."""

    query_WHD: Tensor
    key_WKD: Tensor
    value_WKU: Tensor
    grad_WHU: Tensor
    lengths: tuple[int, ...]
    window: int | None = None
    sinks_H: Tensor | None = None
    parents: tuple[int, ...] = ()

    @property
    def forest(self) -> PrefixTree:
        return PrefixTree(self.lengths, self.parents)


SCALE = 0.7


def dense_reference(case: Case) -> list[Tensor]:
    """Output and gradients of (grad * output).sum(): one softmax over the whole row under an explicit mask."""
    q, k, v = (t.clone().requires_grad_() for t in (case.query_WHD, case.key_WKD, case.value_WKU))
    repeats = q.shape[1] // k.shape[1]
    piece = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    seen, place = [], []
    for index, length in enumerate(case.lengths):
        parent = case.parents[index] if case.parents else -1
        first = sum(case.lengths[p] for p in seen[parent]) if parent >= 0 else 0
        seen.append([*(seen[parent] if parent >= 0 else []), index])
        place += range(first, first + length)
    order = torch.tensor(place)
    ancestors = torch.tensor([[other in seen[index] for other in range(len(seen))] for index in range(len(seen))])
    visible = ancestors[piece][:, piece] & (order[:, None] >= order[None])
    if case.window is not None:
        visible &= order[:, None] - order[None] < case.window
    scores = torch.einsum("ghd,jhd->hgj", q, k.repeat_interleave(repeats, 1)) * SCALE
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = None if case.sinks_H is None else case.sinks_H.clone().requires_grad_()
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(order), 1)], -1)
    weights = scores.softmax(-1)[..., : len(order)]
    out = torch.einsum("hgj,jhd->ghd", weights, v.repeat_interleave(repeats, 1))
    (case.grad_WHU * out).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad] + ([] if sinks is None else [sinks.grad])


def on_slices_by_flash(case: Case, ulysses: int, ring: int) -> tuple[Tensor, list[Tensor]]:
    """`on_slices` as a GPU computes it, the kernels played by plain products."""
    with flash_attention.installed() as forward, mock.patch.object(attention, "_by_document", lambda *_: False):
        found = on_slices(case, ulysses, ring)
    assert forward.called
    return found


def on_slices(case: Case, ulysses: int, ring: int) -> tuple[Tensor, list[Tensor]]:
    """The same of this rank's tokens, and which they are; of the sinks, which every rank holds, this rank's part."""
    mesh = Mesh.create(Layout(ulysses=ulysses, ring=ring))
    tokens_R = own_tokens(case.lengths, mesh)
    whole = (case.query_WHD, case.key_WKD, case.value_WKU, case.grad_WHU)
    q, k, v, grad = (t[tokens_R].clone().requires_grad_() for t in whole)
    sinks = None if case.sinks_H is None else case.sinks_H.clone().requires_grad_()
    out = grid_attention(
        q,
        k,
        v,
        PackedRow(lengths=case.lengths, parents=case.parents),
        mesh.ulysses,
        mesh.ring,
        Heads(SCALE, case.window, sinks),
    )
    (grad.detach() * out).sum().backward()
    return tokens_R, [out.detach(), q.grad, k.grad, v.grad] + ([] if sinks is None else [sinks.grad])


def round_the_ring(case: Case, ring: int, *, flash: bool = True) -> list[Tensor]:
    """Output and gradients as all ranks of a ring make them, in this process: rank by rank, each with its own keys
    first."""
    tokens, uploads = [tokens_of(case.lengths, ring, rank) for rank in range(ring)], VarlenCache()
    whole = (case.query_WHD, case.key_WKD, case.value_WKU)
    dtype, heads = torch.promote_types(case.grad_WHU.dtype, torch.float32), Heads(SCALE, flash=flash)
    results = [torch.zeros_like(t, dtype=dtype) for t in (case.grad_WHU, *whole)]
    for rank, mine in enumerate(tokens):
        query, grad, seen = case.query_WHD[mine], case.grad_WHU[mine], None
        owners = [(rank - step) % ring for step in range(ring)]
        given = [
            (case.key_WKD[tokens[owner]], case.value_WKU[tokens[owner]],
             blocks_of(case.forest, ring, rank, owner, case.window), heads, uploads)
            for owner in owners
        ]  # fmt: skip
        for of_owner in given:
            seen = attend(query, *of_owner, seen)
        assert seen is not None
        out, lse = seen
        results[0][mine] = out.to(dtype)
        for owner, (key, value, *more) in zip(owners, given):
            parts = attend_backward(grad, Attended(query, key, value, out.to(query.dtype), lse), *more)
            for result, where, part in zip(results[1:], (mine, tokens[owner], tokens[owner]), parts):
                result[where] += part
    return results
