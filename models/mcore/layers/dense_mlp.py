"""Megatron's MLP with our activation, which the backward may compute again."""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from isoloss.models.kinds.dense import Dense
from isoloss.models.mcore.compat import AnyLayer, submodules_of
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.activations import ACTIVATIONS
from isoloss.parallel import Mesh


class DenseMLP(MLP):
    @classmethod
    def fill(cls, layer: Any, kind: Dense, mesh: Mesh, options: BuildOptions) -> None:
        mlp = submodules_of(layer.mlp)
        mlp.activation_func = ACTIVATIONS[kind.activation]
        if options.memory.recomputes_mlp_act:
            layer.mlp = AnyLayer(module=RecomputingMLP, submodules=mlp, params={"tp_group": mesh.tp})


class RecomputingMLP(MLP):
    """An MLP that keeps gate and up for the backward, and recomputes their product, which the gradient of the second
    matrix needs: pointwise, in a fraction of the time of a product of matrices.

    The memory of the product is given back behind the second matrix, and filled again where its backward begins. (What
    autograd's hooks for saved tensors give back is a copy of the weight, without the buffer of its gradient, and
    Megatron's own way makes the product elsewhere, with a graph of its own.)
    """

    def forward(self, hidden_states: Tensor, per_token_scale=None, **unused) -> tuple[Tensor, Tensor | None]:
        assert per_token_scale is None  # of experts
        wide, bias = self.linear_fc1(hidden_states)
        wide = wide if bias is None else wide + bias
        product = self.activation_func(wide)
        output, bias = self.linear_fc2(product)
        if output.requires_grad:
            memory = product.untyped_storage()
            # Taken out by the hook: that stays with the graph, whose nodes outlive the backward.
            kept = [(product.detach(), wide.detach(), memory.nbytes())]
            memory.resize_(0)

            def make_again(grad: Tensor) -> None:
                product, wide, nbytes = kept.pop()
                product.untyped_storage().resize_(nbytes)
                with torch.no_grad():
                    # Past the count of changes: they are the numbers that were there.
                    product.data.copy_(self.activation_func(wide))

            output.register_hook(make_again)
        return output, bias
