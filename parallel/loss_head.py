"""Log-probabilities and entropy over a vocabulary split over TP, in chunks, at labeled positions only.

Logits of a whole micro-batch never exist. The forward visits a chunk of positions at a time and keeps the log-sum-exp
of each position; the backward recomputes the logits of a chunk. Columns beyond the true vocabulary are left out of the
matrix product, so the loss does not depend on padding, and thus not on TP.

Between two matrix products, a GPU passes over a chunk twice in all, by kernels (`fused`,
`isoloss.parallel.ops.loss_head_kernels`). Op by op there are several passes, over blocks that stay in a CPU's cache.

Logits are in at least fp32, also for 16-bit weights, and the temperature divides these: logits of standard deviation 6
that are rounded to bf16 move log p by 0.02 on average.

Shape suffixes: N labeled positions on this rank, K targets of a position, D width of a hidden state, V vocabulary
columns of this TP rank, M positions of a chunk, I positions of a block of a chunk.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.ops import loss_head_kernels as kernels
from isoloss.parallel.ops.matmul import WeightGradient, product
from isoloss.parallel.ops.row_blocks import slabs

# Logits that exist at a time. 64M elements are 256 MiB in fp32: large enough for full-speed matrix products.
CHUNK_ELEMENTS = 1 << 26
# With kernels, a chunk exists once in fp32 and once rounded. Fewer chunks mean fewer passes over the weight gradient.
FUSED_CHUNK_ELEMENTS = 1 << 27
# Elements of a 16-bit output matrix that a CPU converts to fp32 at a time: 16 MiB.
CONVERTED_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class LossHeadOptions:
    """Options of the loss head.

    temperature: divisor of the logits.
    softcap: c, by which logits z become c * tanh(z / c) before the division; None: no softcap.
    with_entropy: True to compute entropies too.
    fused: True to pass over logits on a GPU in one kernel each time. On a CPU the same functions run op by op.
    chunk_elements: logits that exist at a time; None: CHUNK_ELEMENTS, or FUSED_CHUNK_ELEMENTS if fused.
    """

    temperature: float = 1.0
    softcap: float | None = None
    with_entropy: bool = False
    fused: bool = False
    chunk_elements: int | None = None

    def chunk(self, columns: int) -> int:
        """Return the positions of a chunk on a rank with `columns` vocabulary columns."""
        elements = self.chunk_elements or (FUSED_CHUNK_ELEMENTS if self.fused else CHUNK_ELEMENTS)
        return max(1, elements // max(columns, 1))


@dataclass(frozen=True)
class LowRank:
    """Factors of a product that is added to logits: down_Nr, of each position, and up_Vr, this rank's rows."""

    down_Nr: Tensor
    up_Vr: Tensor

    def add_to(self, logits_NV: Tensor) -> Tensor:
        """Add the product in place, in the type of the logits, and return these. Not differentiable."""
        return logits_NV.addmm_(self.down_Nr.to(logits_NV.dtype), self.up_Vr.to(logits_NV.dtype).T)


@dataclass(frozen=True)
class _Shard:
    """The vocabulary of this rank: id of the first column, number of true columns, and the TP group."""

    first: int
    columns: int
    group: dist.ProcessGroup


def vocab_parallel_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    options: LossHeadOptions = LossHeadOptions(),
    main_grad_VD: Tensor | None = None,
    low_rank: "LowRank | None" = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) and the entropy of p = softmax(hidden @ weight.T / temperature) over the whole vocabulary.

    The first has the shape of the targets, the second [N], or is None if not asked for; both in fp32 for inputs of at
    most 32 bits and in fp64 for fp64.

    hidden_ND: last hidden states at the labeled positions, the same on every TP rank. N may be 0: the result is then
        empty but still connected to both inputs. The gradient is this rank's part; the entry of the caller's region
        (`sum_gradient` or `gather_rows`) sums it over TP.
    weight_VD: this rank's rows of the output matrix, padded to the same number on every rank.
    targets_N: int64 ids in the whole vocabulary, [N] or [N, K]; some of the K may be the same.
    vocab_size: true size; columns beyond it have probability 0.
    main_grad_VD: buffer in fp32 or fp64 to which the backward adds the gradient of the weight. Autograd then gets
        uninitialized memory as the gradient, and the weight is marked for Megatron's hook; None: autograd gets it.
    low_rank: factors of what is added to the logits, before softcap and temperature; None: nothing. The gradient of
        `down_Nr` is this rank's part, as that of the hidden states.
    Collectives: one all-gather of [2 + K, N] over tp_group in the forward, none in the backward.
    """
    first = tp_group.rank() * weight_VD.shape[0]
    columns = min(max(vocab_size - first, 0), weight_VD.shape[0])
    logprobs_N, entropy_N = _VocabParallelLogprobs.apply(
        hidden_ND,
        weight_VD,
        targets_N,
        _Shard(first, columns, tp_group),
        options,
        main_grad_VD,
        low_rank and low_rank.down_Nr,
        low_rank and low_rank.up_Vr,
    )
    return logprobs_N, entropy_N if options.with_entropy else None


def unrounded_logits(hidden_ND: Tensor, weight_VD: Tensor, out_NV: Tensor | None = None) -> Tensor:
    """Compute hidden @ weight.T, [N, V], in fp32 for inputs of at most 32 bits and in fp64 for fp64.

    Not differentiable. out_NV: memory for the result, of its type; not used for 16-bit inputs on a GPU.
    """
    if hidden_ND.dtype in (torch.float32, torch.float64):
        return product(hidden_ND, weight_VD.T, out_NV)
    if hidden_ND.is_cuda:
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    # A CPU has no such product. Products of two 16-bit numbers are exact in fp32, so fp32 operands give the same.
    if out_NV is None:
        out_NV = hidden_ND.new_empty((hidden_ND.shape[0], weight_VD.shape[0]), dtype=torch.float32)
    rows, hidden_ND = max(1, CONVERTED_ELEMENTS // weight_VD.shape[1]), hidden_ND.float()
    for part_vD, out_Nv in zip(weight_VD.split(rows), out_NV.split(rows, dim=1)):
        product(hidden_ND, part_vD.float().T, out_Nv)
    return out_NV


def softcapped(logits_NV: Tensor, softcap: float | None) -> Tensor:
    """Compute softcap * tanh(logits / softcap) in place and return the logits. Not differentiable."""
    if softcap is not None:
        rows = logits_NV.flatten(0, -2)
        for block in slabs(rows):
            rows[block].div_(softcap).tanh_().mul_(softcap)
    return logits_NV


def _logits_buffer(hidden_ND: Tensor, rows: int, columns: int) -> Tensor | None:
    """Allocate memory for the logits of a chunk, which all chunks reuse; None if the product allocates its result.

    Fresh pages cost a CPU as much as a pass over them.
    """
    if hidden_ND.is_cuda and hidden_ND.dtype not in (torch.float32, torch.float64):
        return None
    return hidden_ND.new_empty((rows, columns), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))


def _logits(hidden_MD: Tensor, weight_VD: Tensor, buffer_MV: Tensor | None, low_rank: LowRank | None) -> Tensor:
    logits_MV = unrounded_logits(hidden_MD, weight_VD, None if buffer_MV is None else buffer_MV[: hidden_MD.shape[0]])
    return logits_MV if low_rank is None else low_rank.add_to(logits_MV)


def _of_rows(down_Nr: Tensor | None, up_Vr: Tensor | None, rows: slice, columns: int) -> LowRank | None:
    return None if down_Nr is None or up_Vr is None else LowRank(down_Nr[rows], up_Vr[:columns])


def _own_targets(targets_NK: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Return the column of every target on this rank, and True where this rank is the owner of the target.

    For a target of another rank the column is arbitrary but valid. A list of only the own targets would make the host
    wait for its length.
    """
    column_NK = targets_NK - shard.first
    valid_NK = column_NK.clamp(0, shard.columns - 1)
    return valid_NK, valid_NK == column_NK


def _kernel_target(column_MK: Tensor, own_MK: Tensor) -> Tensor:
    """Return the target that a kernel sees, [M]: -1 where this rank has none, or a position has several."""
    if column_MK.shape[1] > 1:
        return column_MK.new_full((len(column_MK),), -1)
    return column_MK.where(own_MK, -1).squeeze(1)


def _statistics(
    logits_MV: Tensor,
    column_MK: Tensor,
    own_MK: Tensor,
    options: LossHeadOptions,
    part_PM: Tensor,
    top_M: Tensor,
) -> None:
    """Write log-sum-exp, minus the entropy and target logits into part_PM, the largest logit of a position into top_M.

    Without entropy, exp(logit - top) overwrites the logits, for the backward.
    """
    temperature, with_entropy = options.temperature, options.with_entropy
    part_PM[2:] = kernels.target_logits(logits_MV, column_MK, own_MK, temperature)
    for block in slabs(logits_MV):
        logits_IV = logits_MV[block]
        if temperature != 1.0:
            logits_IV.div_(temperature)
        top_I = top_M[block] = logits_IV.amax(1)
        shifted_IV = logits_IV - top_I[:, None] if with_entropy else logits_IV.sub_(top_I[:, None])
        exp_IV = shifted_IV.exp() if with_entropy else shifted_IV.exp_()
        sum_I = exp_IV.sum(1)
        part_PM[0, block] = top_I + sum_I.log()
        if with_entropy:  # two terms of one sign; `sum` adds pairwise, a dot product loses 5e-5 of V equal terms
            part_PM[1, block] = exp_IV.mul_(shifted_IV).sum(1) / sum_I - sum_I.log()


def _gradient(
    x_MV: Tensor,
    lse_M: Tensor,
    grad_M: Tensor,
    options: LossHeadOptions,
    top_M: Tensor | None,
    entropies_M: tuple[Tensor, Tensor] | None,
) -> None:
    """Overwrite logits with their gradient; the caller adds the part of the targets.

    x_MV: with top_M the logits as `_statistics` left them, else new logits after the softcap.
    entropies_M: entropies over the whole vocabulary and their gradient; None: only log-probabilities have a gradient.
    """
    temperature, softcap = options.temperature, options.softcap
    for block in slabs(x_MV):
        x_IV, grad_I = x_MV[block], grad_M[block, None]
        slope_IV = None if softcap is None else kernels.cap_slope(x_IV, softcap)
        if top_M is None and temperature != 1.0:
            x_IV.div_(temperature)
        if entropies_M is not None:  # dH/dz_j = -p_j (log p_j + H)
            entropy_M, grad_entropy_M = entropies_M
            logp_IV = x_IV.sub_(lse_M[block, None])
            factor_IV = (logp_IV + entropy_M[block, None]).mul_(grad_entropy_M[block, None]).add_(grad_I)
            logp_IV.exp_().mul_(factor_IV.neg_())
        elif top_M is not None:  # exp(logit - top) already
            x_IV.mul_(torch.exp(top_M[block] - lse_M[block])[:, None] * -grad_I)
        else:
            x_IV.sub_(lse_M[block, None]).exp_().mul_(-grad_I)
        if slope_IV is not None:
            x_IV.mul_(slope_IV)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_ND,
        weight_VD,
        targets_N,
        shard: _Shard,
        options: LossHeadOptions,
        main_grad: Tensor | None,
        down_Nr: Tensor | None,
        up_Vr: Tensor | None,
    ):
        dtype = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        n, columns, chunk = hidden_ND.shape[0], shard.columns, options.chunk(shard.columns)
        fused, softcap, with_entropy = options.fused, options.softcap, options.with_entropy
        weight = weight_VD[:columns]
        # Rows of `part`: log-sum-exp of this rank's columns, minus the entropy of the softmax over this rank's columns,
        # logits of the targets. (A sum of softmax * logit would cancel in the end: its error is rounding * logit^2, and
        # the error of this entropy is rounding * logit.)
        column_NK, own_NK = _own_targets(targets_N.flatten(1) if targets_N.ndim > 1 else targets_N[:, None], shard)
        part = hidden_ND.new_zeros((2 + column_NK.shape[1], n), dtype=dtype)
        part[0] = -torch.inf
        top_N = hidden_ND.new_zeros(n, dtype=dtype)  # largest logit of this rank's columns
        kept, buffer_MV = None, _logits_buffer(hidden_ND, min(chunk, n), columns)
        for start in range(0, n if columns else 0, chunk):
            rows = slice(start, start + chunk)
            logits_MV = _logits(hidden_ND[rows], weight, buffer_MV, _of_rows(down_Nr, up_Vr, rows, columns))
            column_MK, own_MK = column_NK[rows], own_NK[rows]
            if fused:
                target_M = _kernel_target(column_MK, own_MK)
                statistics = kernels.statistics(logits_MV, target_M, options.temperature, softcap, with_entropy)
                part[0, rows], part[2:, rows], part[1, rows] = statistics
                if column_MK.shape[1] > 1:
                    part[2:, rows] = kernels.target_logits(logits_MV, column_MK, own_MK, options.temperature, softcap)
            else:
                softcapped(logits_MV, softcap)
                _statistics(logits_MV, column_MK, own_MK, options, part[:, rows], top_N[rows])
            # A single chunk is within budget, so it is kept and not computed twice. With a softcap, the backward reads
            # capped logits, which `_statistics` has overwritten.
            kept = logits_MV if n <= chunk and (fused or softcap is None) else None
            del logits_MV  # before those of the next chunk are made
        parts = part.new_empty((shard.group.size() * len(part), n))
        dist.all_gather_into_tensor(parts, part, group=shard.group)
        parts = parts.unflatten(0, (-1, len(part)))
        lse_N = torch.logsumexp(parts[:, 0], dim=0)
        # Log of each rank's share of the probability, made finite: 0 * inf of a rank with padding only would be NaN.
        share = (parts[:, 0] - lse_N).clamp(min=torch.finfo(dtype).min)
        entropy_N = -(torch.softmax(parts[:, 0], 0) * (parts[:, 1] + share)).sum(0)
        ctx.save_for_backward(hidden_ND, weight_VD, column_NK, own_NK, lse_N, entropy_N, top_N, kept, down_Nr, up_Vr)
        ctx.columns, ctx.chunk, ctx.options, ctx.main_grad = columns, chunk, options, main_grad
        return (parts[:, 2:].sum(0) - lse_N).T.reshape(targets_N.shape), entropy_N

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy_N):
        """Apply d log p(t) / d z_j = [j = t] - p_j to the incoming gradient, with logits recomputed by chunks."""
        # `kept` may be overwritten: autograd's version counter refuses a second backward through the same graph.
        hidden_ND, weight_VD, column_NK, own_NK, lse_N, entropy_N, top_N, kept, down_Nr, up_Vr = ctx.saved_tensors
        n, weight = hidden_ND.shape[0], weight_VD[: ctx.columns]
        options: LossHeadOptions = ctx.options
        temperature, softcap = options.temperature, options.softcap
        # The formulas below are gradients by the divided logits; this division makes them gradients by the logits.
        grad_NK, grad_entropy_N = grad_logprob.reshape(column_NK.shape) / temperature, grad_entropy_N / temperature
        grad_N, grad_own_NK = grad_NK.sum(1), grad_NK.where(own_NK, 0.0)
        grad_hidden = torch.zeros_like(hidden_ND)
        trained = ctx.needs_input_grad[1]
        grad_down = None if down_Nr is None else torch.zeros_like(down_Nr)
        grad_up = None if up_Vr is None else torch.zeros_like(up_Vr, dtype=lse_N.dtype)
        grad_weight = WeightGradient(weight_VD, ctx.columns, ctx.main_grad, lse_N.dtype) if trained else None
        buffer_MV = None if kept is not None else _logits_buffer(hidden_ND, min(ctx.chunk, n), ctx.columns)
        for start in range(0, n if ctx.columns else 0, ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            low_rank = _of_rows(down_Nr, up_Vr, rows, ctx.columns)
            grad_MV = kept if kept is not None else _logits(hidden_ND[rows], weight, buffer_MV, low_rank)
            lse_M, grad_M, column_MK, grad_own_MK = lse_N[rows], grad_N[rows], column_NK[rows], grad_own_NK[rows]
            entropies_M = (entropy_N[rows], grad_entropy_N[rows])
            if options.fused:
                kernel = kernels.gradient_with_entropy if options.with_entropy else kernels.gradient
                of_positions = (lse_M, grad_M, *entropies_M) if options.with_entropy else (lse_M, grad_M)
                target_M, end = _kernel_target(column_MK, own_NK[rows]), (temperature, softcap)
                low_MV = kernel(grad_MV, target_M, *of_positions, *end, hidden_ND.dtype)
                if column_MK.shape[1] > 1:
                    # The columns of targets anew: a sum with what is rounded already would be rounded twice.
                    logits_MK = grad_MV.gather(1, column_MK)
                    at_MK = kernel.op_by_op(logits_MK, target_M, *of_positions, *end, lse_M.dtype)
                    at_MK += kernels.of_targets(logits_MK, column_MK, grad_own_MK, softcap)
                    low_MV.scatter_(1, column_MK, at_MK.to(low_MV.dtype))
            else:
                top_M = None if kept is None else top_N[rows]
                entropies_M = entropies_M if options.with_entropy else None
                if softcap is not None:
                    softcapped(grad_MV, softcap)
                    grad_own_MK = grad_own_MK * kernels.cap_slope(grad_MV.gather(1, column_MK), softcap)
                _gradient(grad_MV, lse_M, grad_M, options, top_M, entropies_M)
                grad_MV.scatter_add_(1, column_MK, grad_own_MK)
                low_MV = grad_MV.to(hidden_ND.dtype)
            product(low_MV, weight, grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(low_MV, hidden_ND[rows])
            if low_rank is not None and grad_down is not None and grad_up is not None:
                grad_down[rows] = low_MV @ low_rank.up_Vr
                grad_up[: ctx.columns] += low_MV.T @ low_rank.down_Nr
            del grad_MV, low_MV  # before those of the next chunk are made
        grad_up = None if up_Vr is None or grad_up is None else grad_up.to(up_Vr.dtype)
        of_weight = None if grad_weight is None else grad_weight.of_autograd()
        return grad_hidden, of_weight, *(None,) * 4, grad_down, grad_up
