"""Forward FLOPs of a model, layer by layer: what micro-batches (engine/batching/balance.py) and pipeline stages
(stages.py) are split by.

A matrix costs 2 FLOPs (multiply, add) per token and parameter that the token meets. Source: Chowdhery et al. 2022
(PaLM), appendix B, and Narayanan et al. 2021 (arXiv:2104.04473); both count the whole attention square, here it is the
causal half.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.weight_map import weight_map


def met_parameters(arch: Architecture, weights: Iterable[Weight] | None = None) -> Iterator[tuple[int, float]]:
    """Yield (layer, parameters that a token meets) of every matrix in the layers: of experts the share that is
    chosen. weights: the model's; or those of something else in its layers, such as the factors of adapters."""
    shares = [mlp.experts.top_k / mlp.experts.count if mlp.experts else 1.0 for mlp in (x.mlp for x in arch.layers)]
    for weight in weight_map(arch) if weights is None else weights:
        if len(weight.shape) == 2 and weight.layer is not None:
            share = 1.0 if weight.expert is None else shares[weight.layer]
            yield weight.layer, math.prod(weight.shape) * share


def output_parameters(arch: Architecture) -> int:
    """Return the parameters of the output projection, tied or not. Looking up an embedding costs nothing."""
    return (1 if arch.critic else arch.vocab_size) * arch.hidden_size


@cache
def _met_by_layer(arch: Architecture) -> tuple[float, ...]:
    met = [0.0] * arch.num_layers
    for layer, parameters in met_parameters(arch):
        met[layer] += parameters
    return tuple(met)


def layer_flops(arch: Architecture, tokens: int) -> list[int]:
    """Return the FLOPs of each layer over a sequence."""
    met = _met_by_layer(arch)
    return [round(2.0 * met[n] * tokens + layer.attention.flops(tokens)) for n, layer in enumerate(arch.layers)]


def output_flops(arch: Architecture, tokens: int) -> int:
    """Return the FLOPs of the output projection over a sequence."""
    return 2 * output_parameters(arch) * tokens
