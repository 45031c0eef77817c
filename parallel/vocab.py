"""Log-probabilities and entropy over a vocabulary split over TP, in chunks, at labelled positions only.

Logits of a whole micro-batch never exist: the forward visits `chunk` positions at a time and keeps one log-sum-exp
each; the backward recomputes the logits of a chunk. Columns beyond the true vocabulary are left out of the matrix
product, so padding, hence TP, cannot reach the loss.

Shape suffixes: N labelled positions, D hidden size, V vocabulary columns of this TP rank, C positions of a chunk.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Logits alive at a time. 64M elements are 256 MiB in fp32: large enough for full-speed matrix products.
CHUNK_ELEMENTS = 1 << 26


def vocab_parallel_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    *,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if asked, the entropy of p, where p = softmax(hidden @ weight.T) over the whole vocabulary.

    hidden_ND: last hidden states at the labelled positions, the same on every TP rank. N may be 0 (the result is then
        empty but still connected to both inputs). Its gradient is this rank's *part*: the caller's region entry
        (`sum_gradient` or `gather_rows`) sums it over TP.
    weight_VD: this rank's rows of the output matrix, padded so that every rank has the same number.
    targets_N: int64 ids in the whole vocabulary.
    vocab_size: true size; columns beyond it have probability 0.
    Returns [N] tensors, in fp32 for inputs of at most 32 bits and in fp64 for fp64.
    Collectives: one all-gather of [3, N] over tp_group in the forward, none in the backward.
    """
    first = tp_group.rank() * weight_VD.shape[0]
    columns = min(max(vocab_size - first, 0), weight_VD.shape[0])
    chunk = max(1, chunk_elements // max(columns, 1))
    logprobs_N, entropy_N = _VocabParallelLogprobs.apply(
        hidden_ND, weight_VD, targets_N, first, columns, tp_group, with_entropy, chunk
    )
    return logprobs_N, entropy_N if with_entropy else None


def _logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    return logits_CV if logits_CV.dtype in (torch.float32, torch.float64) else logits_CV.float()


def _own_targets(targets_C: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Positions whose target this rank holds, and the target's column here."""
    own = ((targets_C >= first) & (targets_C < first + columns)).nonzero().squeeze(1)
    return own, targets_C[own] - first


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, first, columns, group, with_entropy, chunk):
        dtype = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        n = hidden_ND.shape[0]
        weight = weight_VD[:columns]
        # Rows of `part`: log-sum-exp of this rank's columns, the target's logit, minus the entropy of softmax_here.
        # (A sum of softmax * logit would cancel in the end: an error of rounding * logit^2, here rounding * logit. The
        # softmax is divided by its sum, because a rounded log-sum-exp leaves it off 1 by rounding * logit.)
        part = hidden_ND.new_zeros((3, n), dtype=dtype)
        part[0] = -torch.inf
        kept = None
        for start in range(0, n if columns else 0, chunk):
            rows = slice(start, start + chunk)
            logits_CV = _logits(hidden_ND[rows], weight)
            part[0, rows] = torch.logsumexp(logits_CV, dim=1)
            own, column = _own_targets(targets_N[rows], first, columns)
            part[1, start + own] = logits_CV[own, column]
            if with_entropy:
                logp_CV = logits_CV - part[0, rows, None]
                p_CV = torch.exp(logp_CV)
                # `sum` adds pairwise; a dot product (einsum) of V equal terms in fp32 loses 5e-5 of it.
                total_C = p_CV.sum(1)
                part[2, rows] = p_CV.mul_(logp_CV).sum(1) / total_C
            kept = logits_CV if n <= chunk else None  # a single chunk is within budget: no need to compute it twice
        parts = part.new_empty((group.size() * 3, n))
        dist.all_gather_into_tensor(parts, part, group=group)
        parts = parts.unflatten(0, (-1, 3))
        lse_N = torch.logsumexp(parts[:, 0], dim=0)
        # log of each rank's share of the probability; finite, since 0 * inf of a rank with padding only would be NaN.
        share = (parts[:, 0] - lse_N).clamp(min=torch.finfo(dtype).min)
        entropy_N = -(torch.softmax(parts[:, 0], 0) * (parts[:, 2] + share)).sum(0)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, lse_N, entropy_N, kept)
        ctx.first, ctx.columns, ctx.chunk, ctx.with_entropy = first, columns, chunk, with_entropy
        return parts[:, 1].sum(0) - lse_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprob_N, grad_entropy_N):
        hidden_ND, weight_VD, targets_N, lse_N, entropy_N, kept = ctx.saved_tensors
        n, weight = hidden_ND.shape[0], weight_VD[: ctx.columns]
        grad_hidden = torch.zeros_like(hidden_ND)
        grad_weight = torch.zeros_like(weight_VD, dtype=lse_N.dtype)
        for start in range(0, n if ctx.columns else 0, ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits_CV = kept if kept is not None else _logits(hidden_ND[rows], weight)
            logp_CV = logits_CV.sub_(lse_N[rows, None]) if kept is None else logits_CV - lse_N[rows, None]
            if ctx.with_entropy:  # dH/dz_j = -p_j (log p_j + H)
                factor_CV = (logp_CV + entropy_N[rows, None]).mul_(grad_entropy_N[rows, None])
                factor_CV.add_(grad_logprob_N[rows, None]).neg_()
                grad_CV = logp_CV.exp_().mul_(factor_CV)
            else:
                grad_CV = logp_CV.exp_().mul_(-grad_logprob_N[rows, None])
            own, column = _own_targets(targets_N[rows], ctx.first, ctx.columns)
            grad_CV[own, column] += grad_logprob_N[rows][own]
            grad_CV = grad_CV.to(hidden_ND.dtype)
            torch.mm(grad_CV, weight, out=grad_hidden[rows])
            if grad_weight.dtype == grad_CV.dtype:
                grad_weight[: ctx.columns].addmm_(grad_CV.T, hidden_ND[rows])
            else:
                grad_weight[: ctx.columns] += grad_CV.T @ hidden_ND[rows]
        return grad_hidden, grad_weight.to(weight_VD.dtype), None, None, None, None, None, None
