"""Device memory of attention, by arithmetic: a part of `isoloss.engine.memory.estimate`."""

from collections.abc import Sequence

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.grouped_query import GatedQuery
from isoloss.models.kinds.kind import SoftmaxAttention
from isoloss.parallel import Layout
from isoloss.parallel.attention import kv_repeats
from isoloss.parallel.ops.block_attention import QUERY_BLOCK
from isoloss.parallel.ops.flash_attention import WIDEST_HEAD


def kept_by_attention(kind: SoftmaxAttention, layout: Layout, modules: Sequence[str], tokens: int, width: int) -> float:
    """Bytes that attention of this kind keeps of a micro-batch until its backward.

    modules: modules that are recomputed.
    tokens: number of tokens of a rank.
    width: bytes of a number.
    """
    heads = kind.heads // layout.tp
    q, k = heads * kind.head_dim, max(1, kind.kv_heads // layout.tp) * kind.head_dim
    exchanged = layout.ulysses > 1
    if isinstance(kind, Asymmetric):
        channels, core = _differing(kind, heads, q, k, exchanged)
    else:
        channels, core = _alike(kind, q, k, exchanged)
        channels += _gathered(kind, layout, q, k)
    kept = width * tokens * channels
    return kept if "core_attn" in modules else kept + width * tokens * core + 4 * tokens * heads


def _alike(kind: SoftmaxAttention, q: int, k: int, exchanged: bool) -> tuple[int, int]:
    """Channels, without those of the core and of it. The projections; queries before their norm, where heads of several
    groups make it copy them; queries and keys rotated; the output and its log-sum-exp; with Ulysses also what was
    exchanged of them. With an output gate, the gates next to the queries, and the product."""
    gates = q if isinstance(kind, GatedQuery) else 0
    copied = q + gates if getattr(kind, "qk_norm", "") and k > kind.head_dim else 0
    return (q + 2 * k) + copied + (q + k) + q + 2 * gates, q + k if exchanged else 0


def _gathered(kind: SoftmaxAttention, layout: Layout, q: int, k: int) -> int:
    """Return the channels that are kept in addition to this rank's, if TP ranks are more than key/value heads:
    Megatron gathers the projections of all ranks, and each rank's part is a view."""
    if kind.kv_heads >= layout.tp:
        return 0
    queries = 2 if isinstance(kind, GatedQuery) else 1
    return (queries * kind.heads + 2 * kind.kv_heads) * kind.head_dim - (queries * q + 2 * k)


def _differing(kind: Asymmetric, heads: int, q: int, k: int, exchanged: bool) -> tuple[int, int]:
    """Queries and keys rotated, values scaled or normed; the output. The kernel pads it to the width of queries where
    values are narrower, and it is copied without; sinks, or the exchange of Ulysses, make a copy of their own. With
    norms of queries and keys, as in `_alike`, the projections as well, and queries before theirs."""
    kv_heads = k // kind.head_dim
    values, out = kv_heads * kind.value_dim, heads * kind.value_dim
    sinks = bool(kind.sinks)
    kept = q + k + values + out
    if kind.qk_norm:
        kept += q + k + kv_heads * kind.projected_dim + (q if kv_heads > 1 else 0)
    padded = out < q and not sinks
    core = (out if sinks else q) if exchanged or padded else 0
    return kept, core


def is_by_blocks(arch: Architecture, layer: int) -> bool:
    """Return whether a GPU has no kernel in bf16 for this layer."""
    kind = arch.layers[layer].attention
    return isinstance(kind, SoftmaxAttention) and kind.head_dim > WIDEST_HEAD


def backward_by_blocks(arch: Architecture, layout: Layout, layer: int, tokens: int) -> float:
    """Bytes that the backward of such a layer adds, for a row of one document, in fp32: queries, output, the gradients
    of both, and that of queries once more; keys and values, and twice their gradients; scores of a block of queries and
    what is made of them."""
    kind = arch.layers[layer].attention
    assert isinstance(kind, SoftmaxAttention)
    heads, kv_heads = kind.heads // layout.tp, max(1, kind.kv_heads // layout.tp)
    queries = heads * kind.head_dim
    pairs = kv_heads * kv_repeats(heads, kv_heads, layout.ulysses) * kind.head_dim
    return 4 * tokens * (5.5 * queries + 6 * pairs + 5 * heads * QUERY_BLOCK)
