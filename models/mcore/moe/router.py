"""The router of a mixture of experts, in Megatron's router slot.

Megatron's own casts to fp32 in the middle of an fp64 model and scales auxiliary losses by the tokens of one rank; this
one computes in at least fp32, in the model's precision where that is higher, and is a function of each token alone.

Shape suffixes: Z tokens that a router sees, E experts, X experts chosen for a token.
"""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from isoloss.models.kinds.experts import Experts
from isoloss.models.mcore.moe.router_losses import TINY, RoutedTokens, Routing


class Router(MegatronModule):
    """Chooses top_k experts for each token. Its weights see only this TP rank's tokens under sequence parallelism.

    layer: counted from 1 over the whole model.
    expert_bias: the selection bias, in fp32.
    load_E: how many tokens each expert got since it was last set to 0, int64; counted only where there is a selection
        bias to be updated.
    """

    bias: nn.Parameter | None
    expert_bias: Tensor | None
    load_E: Tensor

    def __init__(self, config: TransformerConfig, *, experts: Experts, **unused):
        super().__init__(config)
        del unused
        self.experts = experts
        self.layer = 0
        device = torch.cuda.current_device()
        shape = (experts.count, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        bias = torch.empty(experts.count, dtype=config.params_dtype, device=device) if config.add_bias_linear else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        selection_bias = torch.zeros(experts.count, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", selection_bias if experts.selection_bias else None)
        load_E = torch.zeros(experts.count, dtype=torch.int64, device=device)
        self.register_buffer("load_E", load_E, persistent=False)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the place of the layer: Megatron calls this."""
        self.layer = layer_number

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, 1, hidden]. Returns [Z, E]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(hidden.flatten(0, -2).to(dtype), self.weight.to(dtype), bias)

    def forward(self, hidden: Tensor, tokens: RoutedTokens | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: [tokens, 1, hidden]. Returns the weight of each expert [Z, E], and which are chosen, as bool [Z, E]
        and by number [Z, X].

        tokens: whose hidden states these are, in Megatron's slot for a padding mask.
        """
        routes_ZX = None if tokens is None else tokens.routes.get(self.layer)
        routing = route(self.logits(hidden), self.experts, self.expert_bias, routes_ZX)
        if tokens is not None:
            tokens.count(self.layer, routing)
        weights_ZE = torch.zeros_like(routing.logits_ZE).scatter(1, routing.chosen_ZX, routing.weights_ZX)
        chosen_ZE = routing.chosen_ZE
        # Where activations are computed again, the first pass is without gradients: only the second one counts.
        if tokens is not None and tokens.router_losses is not None and torch.is_grad_enabled():
            weights_ZE = tokens.router_losses.add(weights_ZE, routing, tokens, self.layer)
            if self.expert_bias is not None:
                self.load_E += (chosen_ZE * tokens.documents_Z[:, None]).sum(0)
        elif tokens is not None and tokens.choice_counts is not None:
            tokens.choice_counts.add(self.layer, routing, tokens)
        return weights_ZE, chosen_ZE, routing.chosen_ZX


def routers(chunks: Sequence[nn.Module]) -> Iterator[Router]:
    """Return the routers of this rank's model chunks, in model order."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router))


def route(
    logits_ZE: Tensor, experts: Experts, selection_bias_E: Tensor | None, routes_ZX: Tensor | None = None
) -> Routing:
    """Scores, then the best groups by the sum of their two highest, then the best experts in them (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2); with one group and no bias simply the top k.

    routes_ZX: choices that a sampler made, which replace these (rollout routing replay, arXiv:2510.11370). The weights
        are of the scores of these logits all the same, and so are their gradients. A row with an unknown expert, or
        with one expert twice, such as the zeros of padding, is not one: its token is routed as without.
    """
    scores_ZE = _scores(logits_ZE, experts)
    ranking_ZE = scores_ZE.detach() if selection_bias_E is None else scores_ZE.detach() + selection_bias_E
    chosen_ZX, given_Z = _in_best_groups(ranking_ZE, experts).topk(experts.top_k, dim=1).indices, None
    if routes_ZX is not None:
        given_Z = _are_choices(routes_ZX)
        chosen_ZX = torch.where(given_Z[:, None], routes_ZX.to(torch.int64), chosen_ZX)
    weights_ZX = scores_ZE.gather(1, chosen_ZX)
    if experts.normalize:
        weights_ZX = weights_ZX / (weights_ZX.sum(-1, keepdim=True) + TINY)
    return Routing(logits_ZE, scores_ZE, chosen_ZX, weights_ZX * experts.scaling, given_Z)


def selection_margin(logits_ZE: Tensor, experts: Experts, selection_bias_E: Tensor | None) -> Tensor:
    """Return the margin by which each token chose its experts, [Z]: the difference in ranking between the last expert
    chosen and the first one that is not, or the same difference of groups, where that is smaller."""
    scores_ZE = _scores(logits_ZE, experts)
    ranking_ZE = scores_ZE if selection_bias_E is None else scores_ZE + selection_bias_E
    margin_Z = _gap(_in_best_groups(ranking_ZE, experts), experts.top_k)
    return torch.minimum(margin_Z, _gap(_group_scores(ranking_ZE, experts), experts.groups_kept))


def _are_choices(routes_ZX: Tensor) -> Tensor:
    """[Z]: whether each row names different experts."""
    sorted_ZX = routes_ZX.sort(1).values
    return (sorted_ZX[:, 0] >= 0) & (sorted_ZX[:, 1:] != sorted_ZX[:, :-1]).all(1)


def _scores(logits_ZE: Tensor, experts: Experts) -> Tensor:
    return logits_ZE.softmax(-1) if experts.score == "softmax" else logits_ZE.sigmoid()


def _group_scores(ranking_ZE: Tensor, experts: Experts) -> Tensor:
    """[Z, groups]; of one group it does not matter."""
    grouped = ranking_ZE.unflatten(1, (experts.groups, -1))
    return grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)


def _in_best_groups(ranking_ZE: Tensor, experts: Experts) -> Tensor:
    """The ranking with minus infinity for experts of groups that are not kept."""
    if experts.groups_kept == experts.groups:
        return ranking_ZE
    group_scores = _group_scores(ranking_ZE, experts)
    best = group_scores.topk(experts.groups_kept, dim=1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    return ranking_ZE.unflatten(1, (experts.groups, -1)).masked_fill(outside[..., None], -torch.inf).flatten(1)


def _gap(values: Tensor, kept: int) -> Tensor:
    """Between the last of the `kept` largest values and the next one, along dim 1; infinite where there is none."""
    if kept == values.shape[1]:
        return values.new_full(values.shape[:1], torch.inf)
    largest = values.topk(kept + 1, dim=1).values
    return largest[:, kept - 1] - largest[:, kept]
