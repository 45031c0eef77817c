"""Forward FLOPs of a model, layer by layer: what micro-batches (engine/batching/balance.py) and pipeline stages
(stages.py) are split by.

A matrix costs 2 FLOPs (multiply, add) per token and parameter that the token meets. Source: Chowdhery et al. 2022
(PaLM), appendix B, and Narayanan et al. 2021 (arXiv:2104.04473); both count the whole attention square, here it is the
causal half.
"""

import math
from collections.abc import Iterator
from functools import cache

from isoloss.models.architecture import Architecture
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.ops.gated_delta import CHUNK


def met_parameters(arch: Architecture) -> Iterator[tuple[int, float]]:
    """(layer, parameters that a token meets) of every matrix in the layers: of the experts the share that is chosen."""
    chosen = arch.experts.top_k / arch.experts.count if arch.experts else 1.0
    for weight in weight_map(arch):
        if len(weight.shape) == 2 and weight.layer is not None:
            yield weight.layer, math.prod(weight.shape) * (1.0 if weight.expert is None else chosen)


def output_parameters(arch: Architecture) -> int:
    """Parameters of the output projection, tied or not. Looking up an embedding costs nothing."""
    return (1 if arch.critic else arch.vocab_size) * arch.hidden_size


def pair_flops(arch: Architecture, layer: int) -> float:
    """FLOPs of a layer's attention per n^2 of a sequence of n tokens: q k^T and probabilities x v take
    2 * heads * width * n^2 each, of which causality leaves half."""
    return 2 * arch.num_heads * (arch.key_dim(layer) + arch.value_dim(layer)) / 2


def delta_flops(arch: Architecture) -> float:
    """FLOPs of Gated DeltaNet's convolution and rule in one layer, a token: in a chunk of C tokens its products of
    queries and keys, the system that it solves and what it gives, 2 * C * (D + U) each half of a square, and three
    products with a state of D x U (arXiv:2412.06464, section 3.3)."""
    delta = arch.delta
    assert delta is not None
    in_chunk = 2 * CHUNK * (delta.key_dim + delta.value_dim)
    rule = delta.value_heads * (in_chunk + 6 * delta.key_dim * delta.value_dim)
    return rule + 2 * delta.conv_width * delta.channels


@cache
def _met_by_layer(arch: Architecture) -> tuple[float, ...]:
    met = [0.0] * arch.num_layers
    for layer, parameters in met_parameters(arch):
        met[layer] += parameters
    return tuple(met)


def layer_flops(arch: Architecture, tokens: int) -> list[int]:
    """Of each layer over a sequence of so many tokens; a window leaves the square up to it and a strip beyond, and of
    linear attention nothing grows with the square."""
    flops = [2.0 * parameters * tokens for parameters in _met_by_layer(arch)]
    for layer in range(arch.num_layers):
        if arch.is_linear(layer):
            flops[layer] += delta_flops(arch) * tokens
            continue
        seen = min(tokens, arch.window(layer) or tokens)
        flops[layer] += pair_flops(arch, layer) * seen * (2 * tokens - seen)
    return [round(cost) for cost in flops]


def output_flops(arch: Architecture, tokens: int) -> int:
    """Of the output projection over so many tokens."""
    return 2 * output_parameters(arch) * tokens
