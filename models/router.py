"""The router of a mixture of experts, in Megatron's router slot.

Megatron's own casts to fp32 in the middle of an fp64 model and scales auxiliary losses by the tokens of one rank; this
one computes in at least fp32, in the model's precision where that is higher, and is a function of each token alone.

Shape suffixes: T tokens, E experts, K experts chosen.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from isoloss.models.architecture import Experts


class Router(MegatronModule):
    """Chooses top_k experts for each token. Its weights see only this TP rank's tokens under sequence parallelism."""

    bias: nn.Parameter | None
    expert_bias: Tensor | None

    def __init__(self, config: TransformerConfig, pg_collection=None, *, experts: Experts):
        super().__init__(config)
        del pg_collection
        self.experts = experts
        device = torch.cuda.current_device()
        shape = (experts.count, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        bias = torch.empty(experts.count, dtype=config.params_dtype, device=device) if config.add_bias_linear else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        selection_bias = torch.zeros(experts.count, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", selection_bias if experts.selection_bias else None)

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron tells its modules their place; nothing here depends on it."""

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden: [tokens, 1, hidden]. Returns the weight of each expert [T, E], and which are chosen, bool [T, E]."""
        assert padding_mask is None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits_TE = linear(hidden.flatten(0, -2).to(dtype), self.weight.to(dtype), bias)
        chosen_TK, weights_TK = route(logits_TE, self.experts, self.expert_bias)
        weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK)
        return weights_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, True)


def route(logits_TE: Tensor, experts: Experts, selection_bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chosen experts of each token and their weights, [T, K] each.

    Scores, then the best groups by the sum of their two highest, then the best experts in them (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2); with one group and no bias simply the top k.
    """
    scores_TE = logits_TE.softmax(-1) if experts.score == "softmax" else logits_TE.sigmoid()
    ranking_TE = scores_TE.detach() if selection_bias_E is None else scores_TE.detach() + selection_bias_E
    if experts.groups_kept < experts.groups:
        grouped = ranking_TE.unflatten(1, (experts.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.groups_kept, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        ranking_TE = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    chosen_TK = ranking_TE.topk(experts.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if experts.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    return chosen_TK, weights_TK * experts.scaling


TINY = 1e-20  # sigmoid scores may all underflow
