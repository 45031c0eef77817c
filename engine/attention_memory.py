"""Device memory of attention, by arithmetic: a part of `isoloss.engine.memory_formula`."""

from collections.abc import Sequence

from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout


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
    """Queries and keys rotated, values scaled; the output. The kernel pads it to the width of queries, and it is copied
    without; sinks, or the exchange of Ulysses, make a copy of their own."""
    values, out = k // arch.key_dim(layer) * arch.value_dim(layer), heads * arch.value_dim(layer)
    sinks = arch.has_sinks(layer)
    core = (out if sinks else q) if exchanged or not sinks else 0
    return q + k + values + out, core
