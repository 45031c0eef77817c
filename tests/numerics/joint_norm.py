"""The norm over all heads together, on TP ranks."""

from types import SimpleNamespace

from torch import Tensor

from isoloss.models.mcore.layers.norm import JointHeadNorm
from isoloss.parallel import Layout, Mesh

EPS = 0.3  # of the size of the squares, so that it counts


def sharded(x_RHD: Tensor, weight_HD: Tensor, grad_RHD: Tensor, tp: int) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank makes of its heads: the output, and the gradients of input and weight."""
    group = Mesh.create(Layout(tp=tp).with_world(tp)).tp
    (own, weight, grad) = (t.chunk(tp, t.dim() - 2)[group.rank()].clone() for t in (x_RHD, weight_HD, grad_RHD))
    config = SimpleNamespace(params_dtype=x_RHD.dtype)
    norm = JointHeadNorm(config, x_RHD.shape[2], EPS, heads=x_RHD.shape[1], tp_group=group)  # type: ignore
    norm.weight.data.copy_(weight.flatten())
    own = own[:, None].requires_grad_()
    out = norm(own)
    out.backward(grad[:, None])
    assert own.grad is not None and norm.weight.grad is not None
    return out.detach()[:, 0], own.grad[:, 0], norm.weight.grad.view_as(weight)
