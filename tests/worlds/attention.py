"""Ulysses attention on several ranks, and dense masked attention over the whole row as its reference."""

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.attention import Heads, ulysses_attention


def dense_reference(query_GHD: Tensor, key_GKD: Tensor, value_GKD: Tensor, lengths, scale: float, grad_GHD: Tensor):
    """Output and gradients of (grad * output).sum(): one softmax over the whole row under an explicit mask."""
    q, k, v = (t.clone().requires_grad_() for t in (query_GHD, key_GKD, value_GKD))
    repeats = q.shape[1] // k.shape[1]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(document))
    visible = (document[:, None] == document[None]) & (order[:, None] >= order[None])
    scores = torch.einsum("ghd,jhd->hgj", q, k.repeat_interleave(repeats, 1)) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    out = torch.einsum("hgj,jhd->ghd", weights, v.repeat_interleave(repeats, 1))
    (grad_GHD * out).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def on_slices(query_GHD: Tensor, key_GKD: Tensor, value_GKD: Tensor, lengths, scale: float, grad_GHD: Tensor):
    """The same of this rank's slice of the row."""
    group = dist.group.WORLD
    q, k, v, grad = (
        t.chunk(group.size())[group.rank()].clone().requires_grad_() for t in (query_GHD, key_GKD, value_GKD, grad_GHD)
    )
    out = ulysses_attention(q, k, v, tuple(lengths), group, Heads(scale))
    (grad.detach() * out).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad
