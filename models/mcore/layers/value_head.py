"""The output of a critic: one number for a position, where a language model has logits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.models.weights.weight_map import VALUE_HEAD
from isoloss.parallel.collectives import sum_parts


class ValueHead(nn.Module):
    """hidden @ weight.T with a weight [1, hidden / tp]: each TP rank takes its columns of the hidden states.

    So every rank of `tp_group` gives a part of the gradient of the hidden states, as the vocabulary matrix does.
    """

    def __init__(self, hidden_size: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        width = hidden_size // tp_group.size()
        self.weight = nn.Parameter(torch.empty((1, width), device=torch.cuda.current_device()))
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """[N], in fp32 for inputs of at most 32 bits. Collectives: one all-reduce over TP in the forward."""
        width, rank = self.weight.shape[1], self.tp_group.rank()
        dtype = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        mine = hidden_ND[:, rank * width : (rank + 1) * width].to(dtype)
        return sum_parts(mine @ self.weight[0].to(dtype), self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Mapping | None = None):
        """Return the sharded weights in the form of Megatron's checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 1}, sharded_offsets)


@dataclass(frozen=True)
class CriticWeights:
    """The weights of a policy with a value head of zeros: before its first step a critic expects nothing."""

    policy: WeightSource

    def whole(self, weight: Weight) -> Tensor:
        if weight.parts[0].tensor == VALUE_HEAD:
            return torch.zeros(weight.shape)
        return self.policy.whole(weight)
