"""Transformer Engine: what its layers and its attention take (docs/transformer_engine.md names the sources)."""

from packaging.version import Version

from isoloss.engine.compatibility.rule import Rule, Setup, divisors
from isoloss.models.mcore import transformer_engine


def _kernel(s: Setup) -> str:
    return s.config.parallel.cp_kernel


def _fused_attention(s: Setup) -> bool:
    """Whether Transformer Engine's attention runs: with one context rank, its kernels for several do nothing more."""
    return _kernel(s) != "isoloss"


def _split(s: Setup, *kernels: str) -> bool:
    """Whether one of these kernels of Transformer Engine exchanges tokens between context ranks."""
    return _kernel(s) in kernels and s.layout.context > 1


def _version() -> Version:
    """Of Transformer Engine, past the rule that asks for one."""
    version = transformer_engine.installed()
    assert version is not None
    return version


def _kv_heads(s: Setup) -> int:
    """Key/value heads of a TP rank: tp ranks beyond their number share one."""
    return max(s.arch.num_kv_heads // s.layout.tp, 1)


_LOCAL, _OWN_KERNEL = "use model.transformer_engine=false", "use parallel.cp_kernel=isoloss"

TRANSFORMER_ENGINE = (
    Rule(
        "model.transformer_engine",
        lambda s: s.uses_transformer_engine and transformer_engine.installed() is None,
        "needs the package transformer_engine, which does not import here",
        f"install it, or {_LOCAL}",
    ),
    Rule(
        "model.transformer_engine",
        lambda s: s.uses_transformer_engine and _version() < transformer_engine.OLDEST,
        lambda s: f"needs Transformer Engine {transformer_engine.OLDEST}, and here is {_version()}",
        f"install a newer one, or {_LOCAL}",
    ),
    Rule(
        "model.transformer_engine",
        lambda s: s.uses_transformer_engine and s.config.train.precision == "fp64",
        "does not work with train.precision=fp64, which its kernels do not have",
        f"{_LOCAL}, or train.precision=fp32 or bf16",
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and not s.uses_transformer_engine,
        "is a kernel of Transformer Engine, which this run does not use",
        f"{_OWN_KERNEL}, or model.transformer_engine=true",
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and s.config.train.precision != "bf16",
        lambda s: f"does not work with train.precision={s.config.train.precision}, which no fused attention has",
        f"{_OWN_KERNEL}, or train.precision=bf16",
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: (
            _split(s, *transformer_engine.SPLITS_PACKED_ROWS_SINCE)
            and _version() < transformer_engine.SPLITS_PACKED_ROWS_SINCE[_kernel(s)]
        ),
        lambda s: (
            f"splits packed rows from Transformer Engine {transformer_engine.SPLITS_PACKED_ROWS_SINCE[_kernel(s)]} on, "
            f"and here is {_version()}"
        ),
        lambda s: (
            "use "
            + ", ".join(
                name for name, since in transformer_engine.SPLITS_PACKED_ROWS_SINCE.items() if _version() >= since
            )
            + " or isoloss"
        ),
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and s.arch.latent is not None,
        "does not attend for latent attention here",
        _OWN_KERNEL,
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and s.arch.sinks,
        "has no attention sinks in packed rows",
        _OWN_KERNEL,
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and s.arch.head_dim % 8 > 0,
        lambda s: f"needs heads of a multiple of 8 channels, and the model's have {s.arch.head_dim}",
        _OWN_KERNEL,
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _split(s, "p2p", "a2a+p2p") and any(s.arch.windows),
        "has no attention windows",
        "use parallel.cp_kernel=a2a, all_gather or isoloss",
    ),
    Rule(
        "parallel.ulysses",
        lambda s: _kernel(s) in ("p2p", "all_gather") and s.layout.ulysses > 1,
        lambda s: f"divides heads, and parallel.cp_kernel={_kernel(s)} exchanges keys and values only",
        lambda s: f"set it to 1, and parallel.ring to {s.layout.context}",
    ),
    Rule(
        "parallel.ring",
        lambda s: _kernel(s) == "a2a" and s.layout.ring > 1,
        "passes keys and values round, and parallel.cp_kernel=a2a exchanges heads only",
        lambda s: f"set it to 1, and parallel.ulysses to {s.layout.context}",
    ),
    Rule(
        "parallel.ulysses",
        lambda s: _split(s, "a2a", "a2a+p2p") and _kv_heads(s) % s.layout.ulysses > 0,
        lambda s: (
            f"does not divide the {_kv_heads(s)} key/value heads of a TP rank, which parallel.cp_kernel={_kernel(s)} "
            "does not repeat"
        ),
        lambda s: f"{divisors(_kv_heads(s))}, or parallel.cp_kernel=isoloss",
    ),
)
