"""An embedding whose backward adds to rows of a buffer. Autograd would allocate a gradient of the whole matrix, fill it
with zeros and add it to the buffer.

Shape suffixes: R tokens, D width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from isoloss.parallel.ops.matmul import added_to_main_grad


def embed(tokens_R: Tensor, weight_VD: Tensor, main_grad_VD: Tensor, *, shared: bool) -> Tensor:
    """Return weight[tokens], [..., D]. The backward adds the gradient of the weight to main_grad_VD.

    The weight is marked, so that Megatron's hook does not add the gradient again.

    shared: True if the weight is also the output matrix, whose backward then wakes the hook.
    """
    return _Embedding.apply(tokens_R, weight_VD, main_grad_VD, shared)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_R, weight_VD, main_grad_VD, shared):
        ctx.save_for_backward(tokens_R)
        ctx.weight_VD, ctx.main_grad_VD, ctx.shared = weight_VD, main_grad_VD, shared
        return embedding(tokens_R, weight_VD)

    @staticmethod
    def backward(ctx, grad_RD):
        (tokens_R,) = ctx.saved_tensors
        ctx.main_grad_VD.index_add_(0, tokens_R.flatten(), grad_RD.flatten(0, -2).to(ctx.main_grad_VD.dtype))
        placeholder = added_to_main_grad(ctx.weight_VD)
        return None, None if ctx.shared else placeholder, None, None
