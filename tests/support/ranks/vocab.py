"""Vocabulary-parallel log-probabilities on several ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_gradient
from isoloss.parallel.loss_head import LossHeadOptions, vocab_parallel_logprobs


def dense_reference(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    grads: tuple[Tensor, Tensor],
    temperature: float = 1.0,
    softcap: float | None = None,
):
    """log p(target) of targets [N] or [N, K], entropy, and the gradients of the sum of grads[0] * log p and grads[1] *
    entropy, all in fp64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden_ND, weight_VD))
    logits_NV = hidden @ weight.T
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    logp_NV = torch.log_softmax(logits_NV / temperature, -1)
    target = targets_N.reshape(len(targets_N), -1 if len(targets_N) else 1)
    logprobs, entropy = logp_NV.gather(1, target).reshape(targets_N.shape), -(logp_NV.exp() * logp_NV).sum(-1)
    ((grads[0].double() * logprobs).sum() + (grads[1].double() * entropy).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def tensor_parallel(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    rows_per_rank: int,
    targets_N: Tensor,
    grads: tuple[Tensor, Tensor],
    chunk_elements: int,
    fused: bool = False,
    softcap: float | None = None,
):
    """The same four on this rank: its gradient of the output matrix is that of its rows, padding included.

    weight_VD: the true rows. The padding of this rank's shard is filled with large numbers that must not matter.
    """
    group = dist.group.WORLD
    first, true = dist.get_rank() * rows_per_rank, weight_VD.shape[0]
    weight = torch.full((rows_per_rank, weight_VD.shape[1]), 1e3, dtype=weight_VD.dtype)
    own = weight_VD[first : first + rows_per_rank]
    weight[: own.shape[0]] = own
    hidden, weight = hidden_ND.clone().requires_grad_(), weight.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        sum_gradient(hidden, group),
        weight,
        targets_N,
        true,
        group,
        LossHeadOptions(softcap=softcap, with_entropy=True, fused=fused, chunk_elements=chunk_elements),
    )
    ((grads[0] * logprobs).sum() + (grads[1] * entropy).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad
