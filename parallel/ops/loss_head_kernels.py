"""Functions of the loss head on a chunk of logits, between its matrix products, each one kernel on a GPU.

Shape suffixes: M positions of the chunk, V vocabulary columns of this TP rank, K targets of a position. A kernel's
target is a column, or -1 for none: another rank is its owner, or a position has several. A softcap c turns logits z
into c tanh(z / c); then the temperature divides them.
"""

import torch
from torch import Tensor

from isoloss.parallel.ops.fused import Fused


def _is_target(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    return torch.arange(logits_MV.shape[1], device=logits_MV.device) == target_M[:, None]


def _capped(logits_MV: Tensor, softcap: float | None) -> Tensor:
    return logits_MV if softcap is None else softcap * (logits_MV / softcap).tanh()


def cap_slope(capped: Tensor, softcap: float) -> Tensor:
    """Return d/dz of softcap * tanh(z / softcap), from the capped logits."""
    return 1 - (capped / softcap).square()


def _through_cap(grad_MV: Tensor, capped_MV: Tensor, softcap: float | None) -> Tensor:
    return grad_MV if softcap is None else grad_MV * cap_slope(capped_MV, softcap)


def target_logits(
    logits_MV: Tensor, column_MK: Tensor, own_MK: Tensor, temperature: float, softcap: float | None = None
) -> Tensor:
    """Return the divided logits of the targets that this rank owns, 0 for the others, [K, M]."""
    return (_capped(logits_MV.gather(1, column_MK), softcap) / temperature).where(own_MK, 0.0).T


def of_targets(logits_MK: Tensor, column_MK: Tensor, grad_own_MK: Tensor, softcap: float | None) -> Tensor:
    """Return what the targets add to the gradient of each target's column, [M, K]: the sum over all that share it.

    logits_MK: logits of the columns. grad_own_MK: gradient of each target by the divided logits, 0 of another rank's.
    """
    same_MKK = column_MK[:, :, None] == column_MK[:, None, :]
    return _through_cap((grad_own_MK[:, None, :] * same_MKK).sum(2), _capped(logits_MK, softcap), softcap)


@Fused
def statistics(
    logits_MV: Tensor, target_M: Tensor, temperature: float, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp of these columns, the target's logit or 0, and minus the entropy or 0, [M] each."""
    divided_MV = _capped(logits_MV, softcap) / temperature
    top_M = divided_MV.amax(1)
    shifted_MV = divided_MV - top_M[:, None]
    exp_MV = shifted_MV.exp()
    sum_M = exp_MV.sum(1)
    target_logit_M = divided_MV.where(_is_target(logits_MV, target_M), 0.0).sum(1)
    minus_entropy_M = torch.zeros_like(sum_M)
    if with_entropy:  # two terms of one sign: a sum of softmax * logit would cancel
        minus_entropy_M = (exp_MV * shifted_MV).sum(1) / sum_M - sum_M.log()
    return top_M + sum_M.log(), target_logit_M, minus_entropy_M


@Fused
def gradient(
    logits_MV: Tensor,
    target_M: Tensor,
    lse_M: Tensor,
    grad_M: Tensor,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of sum(grad * log p(target)) by the divided logits, times the slope of the softcap.

    lse_M: log-sum-exp over the columns of all ranks. dtype: type to which the result is rounded.
    """
    capped_MV = _capped(logits_MV, softcap)
    p_MV = (capped_MV / temperature - lse_M[:, None]).exp()
    own_MV = grad_M[:, None].where(_is_target(logits_MV, target_M), 0.0)
    return _through_cap(own_MV - p_MV * grad_M[:, None], capped_MV, softcap).to(dtype)


@Fused
def gradient_with_entropy(
    logits_MV: Tensor,
    target_M: Tensor,
    lse_M: Tensor,
    grad_M: Tensor,
    entropy_M: Tensor,
    grad_entropy_M: Tensor,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `gradient`, plus that of sum(grad_entropy * entropy): dH/dz_j = -p_j (log p_j + H)."""
    capped_MV = _capped(logits_MV, softcap)
    logp_MV = capped_MV / temperature - lse_M[:, None]
    factor_MV = (logp_MV + entropy_M[:, None]) * grad_entropy_M[:, None] + grad_M[:, None]
    own_MV = grad_M[:, None].where(_is_target(logits_MV, target_M), 0.0)
    return _through_cap(own_MV - logp_MV.exp() * factor_MV, capped_MV, softcap).to(dtype)
