"""Device memory of attention, by arithmetic: a part of `isoloss.engine.memory.estimate`."""

from collections.abc import Sequence

from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout
from isoloss.parallel.attention import kv_repeats
from isoloss.parallel.ops.block_attention import QUERY_BLOCK
from isoloss.parallel.ops.flash_attention import WIDEST_HEAD


def kept_by_attention(
    arch: Architecture, layout: Layout, layer: int, modules: Sequence[str], tokens: int, width: int
) -> float:
    """Bytes that attention of this layer keeps of a micro-batch until its backward.

    modules: what is recomputed.
    tokens: of a rank.
    width: bytes of a number.
    """
    heads = arch.num_heads // layout.tp
    q, k = heads * arch.key_dim(layer), max(1, arch.kv_heads(layer) // layout.tp) * arch.key_dim(layer)
    exchanged = layout.ulysses > 1
    if arch.differing_attention:
        channels, core = _differing(arch, layer, heads, q, k, exchanged)
    else:
        channels, core = _alike(arch, q, k, exchanged)
        channels += _gathered(arch, layout, q, k)
    kept = width * tokens * channels
    return kept if "core_attn" in modules else kept + width * tokens * core + 4 * tokens * heads


def _alike(arch: Architecture, q: int, k: int, exchanged: bool) -> tuple[int, int]:
    """Channels, without those of the core and of it. The projections; queries before their norm, where heads of several
    groups make it copy them; queries and keys rotated; the output and its log-sum-exp; with Ulysses also what was
    exchanged of them. With an output gate, the gates beside the queries, and the product."""
    gates = q if arch.output_gate else 0
    copied = q + gates if arch.qk_norm and k > arch.head_dim else 0
    return (q + 2 * k) + copied + (q + k) + q + 2 * gates, q + k if exchanged else 0


def _gathered(arch: Architecture, layout: Layout, q: int, k: int) -> int:
    """Channels that are kept besides this rank's where TP ranks are more than key/value heads: Megatron gathers the
    projections of all ranks, and what each takes of them is a view."""
    if arch.num_kv_heads >= layout.tp:
        return 0
    queries = 2 if arch.output_gate else 1
    return (queries * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim - (queries * q + 2 * k)


def _differing(arch: Architecture, layer: int, heads: int, q: int, k: int, exchanged: bool) -> tuple[int, int]:
    """Queries and keys rotated, values scaled or normed; the output. The kernel pads it to the width of queries where
    values are narrower, and it is copied without; sinks, or the exchange of Ulysses, make a copy of their own. With
    norms of queries and keys, as in `_alike`, the projections as well, and queries before theirs."""
    kv_heads = k // arch.key_dim(layer)
    values, out = kv_heads * arch.value_dim(layer), heads * arch.value_dim(layer)
    sinks = arch.has_sinks(layer)
    kept = q + k + values + out
    if arch.qk_norm:
        kept += q + k + values * arch.projects_values(layer) + (q if kv_heads > 1 else 0)
    padded = out < q and not sinks
    core = (out if sinks else q) if exchanged or padded else 0
    return kept, core


def is_by_blocks(arch: Architecture, layer: int) -> bool:
    """Whether a GPU has no kernel in bf16 for this layer."""
    return not arch.is_linear(layer) and arch.key_dim(layer) > WIDEST_HEAD


def backward_by_blocks(arch: Architecture, layout: Layout, layer: int, tokens: int) -> float:
    """Bytes that the backward of such a layer adds, for a row of one document, in fp32: queries, output, the gradients
    of both, and that of queries once more; keys and values, and twice their gradients; scores of a block of queries and
    what is made of them."""
    heads, kv_heads = arch.num_heads // layout.tp, max(1, arch.kv_heads(layer) // layout.tp)
    queries = heads * arch.key_dim(layer)
    pairs = kv_heads * kv_repeats(heads, kv_heads, layout.ulysses) * arch.key_dim(layer)
    return 4 * tokens * (5.5 * queries + 6 * pairs + 5 * heads * QUERY_BLOCK)
