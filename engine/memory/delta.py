"""Device memory of a layer of Gated DeltaNet by arithmetic: of its mixer, with the operations of
`isoloss.parallel.ops.gated_delta`. A dry run counts the same; the kernels of flash-linear-attention, where they are
installed, take less."""

from dataclasses import dataclass

from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.parallel import Layout
from isoloss.parallel.attention import kv_repeats
from isoloss.parallel.ops.gated_delta_chunks import CHUNK


@dataclass(frozen=True)
class DeltaMemory:
    """Bytes of a micro-batch on a rank.

    kept: until the backward. kept_without_core: the same where convolution and rule are computed again.
    backward: peak in the backward of the rule, with all that was kept for it.
    """

    kept: float
    kept_without_core: float
    backward: float


def delta_memory(delta: GatedDelta, layout: Layout, tokens: int, width: int) -> DeltaMemory:
    """Return the bytes of a micro-batch. The rule computes in at least fp32.

    tokens: tokens of a rank, between its matrices.
    width: bytes of a number.
    """
    key_heads, heads, ranks = delta.key_heads // layout.tp, delta.value_heads // layout.tp, layout.context
    repeats = kv_repeats(heads, key_heads, ranks) if ranks > 1 else 1
    exact = max(4, width)
    # Numbers of a token. A context rank has all tokens of a share of the heads: as many numbers as without.
    value, of_keys = heads * delta.value_dim, key_heads * delta.key_dim
    key, key_by_value_head = repeats * of_keys, heads * delta.key_dim
    state, matrix = key_by_value_head * delta.value_dim / CHUNK, heads * CHUNK

    projected = width * (2 * of_keys + 2 * value + 2 * heads)
    exchanged = width * (2 * key + value + 2 * heads)
    inputs = exchanged if ranks > 1 else projected
    # The convolution's output; states, inverses and V'; decays and rates.
    core = width * (2 * key + value) + exact * (state + matrix + value + 4 * heads)
    # The rule's output, and that normed and gated.
    gated_norm = width * 2 * value

    # Of a chunk: the rule's tensors once more, their gradients, and what is on its way back to the order of tokens.
    gradients = exact * (4 * matrix + 6 * key_by_value_head + 6 * value + 2 * state + 4 * key)
    gradients += exact * 2 * key_heads * repeats * CHUNK
    gradients += width * (4 * key + 3 * value)  # of the rule's arguments, of its output and of the gate
    return DeltaMemory(
        tokens * (inputs + core + gated_norm), tokens * (projected + gated_norm), tokens * (inputs + core + gradients)
    )
