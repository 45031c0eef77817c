"""What transformers computes in fp32 whatever the model's type is, in fp64: to be put in its place. Rotary angles stay
fp32, as they do in the engine."""

import torch
from torch import Tensor, nn


def rms_norm(self: nn.Module, x: Tensor) -> Tensor:
    assert x.dtype == torch.float64
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    assert query.dtype == torch.float64 and dropout == 0.0
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
