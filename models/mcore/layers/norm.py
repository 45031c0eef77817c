"""The norm of every layer."""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.parallel.ops.fused import Function, Fused, precise
from isoloss.parallel.ops.row_blocks import by_slabs


def norm_class(options: BuildOptions) -> type:
    """Return the norm for a slot whose norm no projection owns."""
    return TENorm if options.te else RMSNorm


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) in Megatron's norm slots.

    Zero-centered, it multiplies by 1 + weight, in at least fp32: in bf16 the sum would lose most of a small weight.

    The weight of a norm inside a sequence-parallel region sees only this TP rank's tokens; the attribute asks
    Megatron's finalize step to sum its gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        del unused
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:
            return _OffsetNorm.apply(x, self.weight, self.eps, self.offset)
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class JointHeadNorm(nn.Module):
    """Root-mean-square norm over the channels of all heads together, of which each TP rank has its own.

    Behind a column-parallel projection a rank sees every token, so the gradient of its weights is whole. heads: of the
    whole model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        heads: int,
        tp_group: dist.ProcessGroup,
    ):
        super().__init__()
        self.eps, self.tp_group, self.channels = eps, tp_group, heads * hidden_size
        size, device = self.channels // tp_group.size(), torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, 1, heads of this rank, width of a head]. One all-reduce over TP of a number a token, each way."""
        joint = x.flatten(-2)
        if self.tp_group.size() == 1:
            return rms_norm(joint, self.weight.shape, self.weight, self.eps).view_as(x)
        return _JointNorm.apply(joint, self.weight, self.eps, self.channels, self.tp_group).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class _JointNorm(torch.autograd.Function):
    """Keeps its input and one number a row, as torch's norm does."""

    @staticmethod
    def forward(ctx, x, weight, eps, channels, group):
        squares = sum_of_squares(x)
        dist.all_reduce(squares, group=group)
        scale = torch.rsqrt(squares / channels + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.channels, ctx.group = channels, group
        return scaled(x, weight, scale)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        shared = sum_along_the_norm(grad, x, weight, scale)
        dist.all_reduce(shared, group=ctx.group)
        own = joint_norm_backward(grad, x, weight, scale, shared / ctx.channels)
        return own, weight_gradient(grad, x, weight, scale), None, None, None


@Fused
def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row, [..., 1], in at least fp32."""
    return precise(x).square().sum(-1, keepdim=True)


@Fused
def scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (precise(x) * scale * weight).to(x.dtype)


@Fused
def sum_along_the_norm(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return this rank's part of the sum that a row's scale receives, [..., 1]."""
    return (precise(grad) * weight * (precise(x) * scale)).sum(-1, keepdim=True)


@Fused
def joint_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    """Return the gradient of `x`. mean: `sum_along_the_norm` summed over ranks, divided by the number of channels."""
    return (scale * (precise(grad) * weight - precise(x) * scale * mean)).to(x.dtype)


def scale_of(x: Tensor, eps: float) -> Tensor:
    """Return the norm's factor of each row, [..., 1], in at least fp32; a part of a kernel."""
    return torch.rsqrt(precise(x).square().mean(-1, keepdim=True) + eps)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, without a weight."""
    return _UnitNorm.apply(x, eps)


class _UnitNorm(torch.autograd.Function):
    """Keeps its result, which attention keeps as well, and one number a row."""

    @staticmethod
    def forward(ctx, x, eps):
        normed, scale = unit_norm_forward(x, eps)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx, grad):
        return unit_norm_backward(grad, *ctx.saved_tensors), None


@Fused
def unit_norm_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and what each row was multiplied by."""
    scale = scale_of(x, eps)
    return (precise(x) * scale).to(x.dtype), scale


@Fused
def unit_norm_backward(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    along = (precise(grad) * precise(normed)).mean(-1, keepdim=True)
    return (scale * (precise(grad) - precise(normed) * along)).to(grad.dtype)


class _OffsetNorm(torch.autograd.Function):
    """Keeps its input and one number a row, as torch's norm does."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        normed, scale = offset_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return normed

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return norm_backward(grad, x, weight, scale, ctx.offset), weight_gradient(grad, x, weight, scale), None, None


@Fused
def offset_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The norm, and what each row was multiplied by."""
    scale = scale_of(x, eps)
    return (precise(x) * scale * (precise(weight) + offset)).to(x.dtype), scale


@Fused
def norm_backward(grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float) -> Tensor:
    return through_norm(grad_normed, x, weight, scale, offset).to(x.dtype)


def through_norm(grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float) -> Tensor:
    """The gradient of what was normed, in at least fp32; a part of a kernel."""
    normed, grad = precise(x) * scale, precise(grad_normed) * (precise(weight) + offset)
    return scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))


def weight_gradient(grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A sum over rows, of which a compiler makes two kernels where there are many. Torch's norm has one for a GPU."""
    if grad_normed.is_cuda:
        return of_torch(grad_normed, x, weight, scale)
    return (precise(grad_normed) * x * scale).flatten(0, -2).sum(0).to(weight.dtype)


def of_torch(grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    backward = torch.ops.aten._fused_rms_norm_backward
    return backward(grad_normed, x, weight.shape, scale, weight, [False, True])[1]


# ---- A norm with a gate, in the output of Gated DeltaNet (arXiv:2412.06464). On a GPU one kernel forth and one back;
# on a CPU op by op, over a few rows at a time. Both keep their inputs alone.


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, one_kernel: bool = True) -> Tensor:
    """norm(x) * weight * silu(gate), of the type of x. x, gate: [rows, heads, width]; each head is normed by itself."""
    return _GatedNorm.apply(x, gate, weight, eps, one_kernel)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, one_kernel):
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.one_kernel = eps, one_kernel
        forth = gated_norm_forward if one_kernel else gated_norm_forward.op_by_op
        return by_slabs(lambda x, gate: (forth(x, gate, weight, eps),), x, gate)[0]

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight = ctx.saved_tensors
        back = gated_norm_backward if ctx.one_kernel else gated_norm_backward.op_by_op
        back = partial(_with_gradient_of_weight, back, weight, ctx.eps)
        grad_x, grad_gate, grad_weight = by_slabs(back, grad, x, gate)
        grad_weight = grad_weight[0] if len(grad_weight) == 1 else grad_weight.sum(0)
        return grad_x, grad_gate, grad_weight, None, None


def _with_gradient_of_weight(
    back: Function, weight: Tensor, eps: float, grad: Tensor, x: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, of the gate and of the weight, the last as one row, as each slab has its own."""
    grad_x, grad_gate, grad_normed, scale = back(grad, x, gate, weight, eps)
    return grad_x, grad_gate, weight_gradient(grad_normed, x, weight, scale)[None]


@Fused
def gated_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (precise(x) * scale_of(x, eps) * precise(weight) * silu(precise(gate))).to(x.dtype)


@Fused
def gated_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the gate and of the norm, and the norm's factor of each head."""
    scale, open_, grad_precise = scale_of(x, eps), precise(gate), precise(grad)
    grad_normed = grad_precise * silu(open_)
    grad_opened = grad_precise * (precise(x) * scale * precise(weight))
    grad_gate = torch.ops.aten.silu_backward(grad_opened, open_)
    grad_x = through_norm(grad_normed, x, weight, scale, 0.0)
    return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_normed.to(x.dtype), scale
