"""The layer of experts: Megatron's, with our router, and the packed row on its way to it.

Megatron knows of a token's identity no more than a padding mask, an argument of the model. It does not reach the layers
behind those that `recompute_method="block"` computes again, and the MoE layer makes booleans of it. The packed row does
reach every layer, in every forward and in every repetition of it in the backward, so it brings the tokens along.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from isoloss.models.kinds.experts import Experts
from isoloss.models.mcore.compat import AnyLayer, of_class, submodules_of
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.activations import ACTIVATIONS
from isoloss.models.mcore.moe import grouped_experts
from isoloss.models.mcore.moe.dispatch import (
    Bound,
    Groups,
    Sizes,
    Slots,
    from_experts,
    rows_by_expert,
    sizes_of,
    slots_of,
    to_experts,
)
from isoloss.models.mcore.moe.grouped_experts import WEIGHTED, LocalExperts
from isoloss.models.mcore.moe.router import Router
from isoloss.models.mcore.moe.router_losses import RoutedTokens
from isoloss.parallel import Mesh
from isoloss.parallel.attention import PackedRow


@dataclass
class RoutedRow(PackedRow):
    """A packed row whose tokens the routers know.

    tokens: routing data of the tokens; None where only experts are chosen.
    bound: limit of the messages between experts; None: messages of exact size.
    sizes: sizes of these messages by layer; a repeated forward reuses the first one's.
    chosen: where each layer, counted from 1 over the whole model, notes the experts chosen for each token, [Z, X];
        None: nowhere.
    """

    tokens: RoutedTokens | None = None
    bound: Bound | None = None
    sizes: dict[int, Sizes | Slots] = field(default_factory=dict)
    chosen: dict[int, Tensor] | None = None


def _gate_on_the_device(shared: Any) -> None:
    """Megatron makes the gate of its shared experts on the host, and relies on the whole model being moved."""
    if shared is not None and shared.gate_weight is not None:
        host, device = shared.gate_weight, torch.cuda.current_device()
        shared.gate_weight = nn.Parameter(torch.empty_like(host, device=device))
        shared.gate_weight.sequence_parallel = host.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class ExpertLayer(MoELayer):
    """Megatron's MoE layer, whose router gets the tokens as they are.

    Where a GPU runs all experts of a rank at once (`Experts.grouped`), tokens go there and back without Megatron's
    dispatcher.

    recompute_experts: in the backward, from the tokens that were sent to them.
    """

    router: Any
    experts: Any
    token_dispatcher: Any
    layer_number: int

    def __init__(self, *args: Any, recompute_experts: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _gate_on_the_device(self.shared_experts)
        self._recompute_experts = recompute_experts
        dispatcher = self.token_dispatcher
        self._groups = Groups(dispatcher.ep_group, dispatcher.tp_group, dispatcher.tp_ep_group)
        self._dispatches = type(dispatcher) is MoEAlltoAllTokenDispatcher

    @classmethod
    def fill(cls, layer: Any, kind: Experts, mesh: Mesh, options: BuildOptions) -> None:
        mlp = submodules_of(layer.mlp)
        mlp.router = partial(Router, experts=kind)
        experts = submodules_of(mlp.experts)
        experts.activation_func = submodules_of(mlp.shared_experts).activation_func = ACTIVATIONS[kind.activation]
        if not options.te:
            if kind.bias:
                experts.linear_fc2 = _BiasedExpertOutput
            weighted = WEIGHTED.get(kind.activation) if options.kernels.grouped_experts else None
            mlp.experts = of_class(mlp.experts, LocalExperts, weighted=weighted)
        # Not a ModuleSpec: Megatron gives the groups of one to its own MoE layer only, and warns of any other.
        params = {"pg_collection": mesh.megatron, "recompute_experts": options.memory.recomputes_experts}
        layer.mlp = AnyLayer(module=cls, submodules=mlp, params=params)

    def forward(self, hidden_states: Tensor, intermediate_tensors=None, padding_mask: RoutedRow | None = None):
        assert intermediate_tensors is None and padding_mask is not None  # the first is of CUDA graphs
        compute = partial(self._compute, row=padding_mask)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states)
        return compute(hidden_states)

    def _compute(self, hidden_states: Tensor, row: RoutedRow) -> tuple[Tensor, None]:
        shared = self.shared_experts_compute(hidden_states)
        output = self._routed(hidden_states, self.router(hidden_states, row.tokens), row)
        return output if shared is None else output + shared, None

    def _routed(self, hidden_states: Tensor, routed: tuple[Tensor, Tensor, Tensor], row: RoutedRow) -> Tensor:
        """For each token the weighted sum over its experts. routed: what the router returns."""
        weights_ZE, chosen_ZE, chosen_ZX = routed
        if row.chosen is not None:
            row.chosen[self.layer_number] = chosen_ZX
        if self._dispatches and getattr(self.experts, "grouped", False) and grouped_experts.on_gpu(hidden_states):
            return self._by_rows(hidden_states, weights_ZE.gather(1, chosen_ZX), chosen_ZX, row)
        dispatcher = self.token_dispatcher
        dispatched = self.dispatch(*self.preprocess(hidden_states, weights_ZE, chosen_ZE))
        received, counts, weights = dispatcher.dispatch_postprocess(*dispatched)
        output = dispatcher.combine_preprocess(self._run_experts(received, counts, weights))
        output = self.postprocess(self.combine(output), None)
        self._forget()
        return output

    def _run_experts(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        def run(rows: Tensor, weights: Tensor) -> Tensor:
            output, bias = self.experts(rows, counts, weights)
            assert bias is None  # an expert adds its own
            return output

        return tensor_parallel.checkpoint(run, False, rows, weights) if self._recompute_experts else run(rows, weights)

    def _by_rows(self, hidden_states: Tensor, weights_ZX: Tensor, chosen_ZX: Tensor, row: RoutedRow) -> Tensor:
        rows, groups = rows_by_expert(chosen_ZX, self.router.experts.count), self._groups
        if not groups.alone and self.layer_number not in row.sizes:
            bound = row.bound if groups.ep.size() > 1 else None
            sizes = sizes_of(rows, groups) if bound is None else slots_of(rows, bound, groups)
            row.sizes[self.layer_number] = sizes
        sizes = row.sizes.get(self.layer_number)
        received = to_experts(hidden_states.flatten(0, -2), weights_ZX, rows, sizes, groups)
        empty = sizes.empty if isinstance(sizes, Sizes) else None
        output_RD = self.experts.at_once(*received, again=self._recompute_experts, empty=empty)
        return from_experts(output_RD, rows, sizes, groups).view_as(hidden_states)

    def _forget(self) -> None:
        """Drop the dispatcher's tensors of the tokens sent, and with them the graph of their weights: the backward
        needs none of them, and they would stay until the layer's next forward."""
        dispatcher = self.token_dispatcher
        for name in ("probs", "routing_map", "reversed_local_input_permutation_mapping", "tokens_per_expert"):
            if hasattr(dispatcher, name):
                setattr(dispatcher, name, None)


class _BiasedExpertOutput(RowParallelLinear):
    """Megatron's MLP adds an expert's bias in place to what this returns, which autograd forbids on its own output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias
