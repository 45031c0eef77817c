"""What cannot be run, as one table: loss x layout x model x precision x optimizer x memory.

Rules about the value of a single key stand where the key is defined (engine/config.py), and so do those that a `Layout`
fulfils whatever runs on it (parallel/mesh.py). Here is all that needs two of configuration, model and layout, and every
assertion of Megatron-Core that a user could reach. `check` needs no process group, no GPU and no weights.

A refusal is one line: the key, its value, why it cannot be, and what would do. Where several rules are broken the first
in the table speaks, so causes stand before their consequences. To add a rule, write it down in the tuple of its
subject, and a run that breaks it into tests/worlds/impossible.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from isoloss.engine.config import RECOMPUTE_MODULES, Config, MemoryConfig, ParallelConfig
from isoloss.models import transformer_engine
from isoloss.models.architecture import Architecture, Experts
from isoloss.models.stages import stage_layers
from isoloss.parallel import Layout, UserError


@dataclass(frozen=True)
class Setup:
    """A run before it exists. layout: with its dp, where the world is known."""

    config: Config
    arch: Architecture
    layout: Layout

    def value(self, key: str) -> Any:
        """What the user set a key to; of a degree, what the layout says."""
        group, name = key.split(".")
        if group == "parallel" and hasattr(self.layout, name):
            return getattr(self.layout, name)
        return getattr(getattr(self.config, group), name)

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def memory(self) -> MemoryConfig:
        return self.config.memory

    @property
    def experts(self) -> Experts:
        """Of a model that has them; rules ask `sparse` before."""
        assert self.arch.experts is not None
        return self.arch.experts

    @property
    def sparse(self) -> bool:
        """Whether any layer has experts."""
        return self.arch.experts is not None

    @property
    def dense(self) -> bool:
        """Whether any layer has none."""
        return not all(map(self.arch.has_experts, range(self.arch.num_layers)))

    @property
    def heads(self) -> int:
        """Attention heads of a TP rank."""
        return self.arch.num_heads // self.layout.tp

    @property
    def stages(self) -> int:
        return self.layout.pp * self.layout.vpp

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, in the order of the model."""
        return stage_layers(self.arch, self.layout, self.config.parallel.stage_layers)

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Those that the model has."""
        admitted = {
            "mlp": self.dense,
            "moe": self.sparse,
            "shared_experts": self.sparse and self.experts.shared_size > 0,
            "mla_up_proj": self.arch.latent is not None,
        }
        return tuple(name for name in RECOMPUTE_MODULES if admitted.get(name, True))


Text = str | Callable[[Setup], str]


@dataclass(frozen=True)
class Rule:
    """broken: whether a setup breaks it. why: what is wrong with the key's value; valid: what would do instead."""

    key: str
    broken: Callable[[Setup], bool]
    why: Text
    valid: Text

    def refusal(self, setup: Setup) -> str:
        why, valid = (text if isinstance(text, str) else text(setup) for text in (self.why, self.valid))
        return f"{self.key}={_shown(setup.value(self.key))} {why}; {valid}"


def check(config: Config, arch: Architecture, layout: Layout) -> None:
    """Raises UserError for the first rule of the table that the setup breaks."""
    setup = Setup(config, arch, layout)
    for rule in RULES:
        if rule.broken(setup):
            raise UserError(rule.refusal(setup))


def _shown(value: Any) -> str:
    """As the user writes it on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kernel(s: Setup) -> str:
    return s.config.parallel.cp_kernel


def _fused_attention(s: Setup) -> bool:
    """Whether Transformer Engine's attention runs: with one context rank, its kernels for several do nothing more."""
    return _kernel(s) != "isoloss"


def _split(s: Setup, *kernels: str) -> bool:
    """Whether one of these kernels of Transformer Engine exchanges tokens between context ranks."""
    return _kernel(s) in kernels and s.layout.context > 1


def _uses_transformer_engine(s: Setup) -> bool:
    return transformer_engine.is_used(s.config.model.transformer_engine, s.config.train.precision)


def _version() -> Version:
    """Of Transformer Engine, past the rule that asks for one."""
    version = transformer_engine.installed()
    assert version is not None
    return version


def _forced(s: Setup) -> bool:
    return s.config.model.transformer_engine is True


def _kv_heads(s: Setup) -> int:
    """Key/value heads of a TP rank: tp ranks beyond their number share one."""
    return max(s.arch.num_kv_heads // s.layout.tp, 1)


def _divisors(n: int) -> str:
    return f"use one of {[d for d in range(1, n + 1) if n % d == 0]}"


LAYOUT_AND_MODEL = (
    Rule(
        "parallel.tp",
        lambda s: s.arch.num_heads % s.layout.tp > 0,
        lambda s: f"does not divide the model's {s.arch.num_heads} attention heads",
        lambda s: _divisors(s.arch.num_heads),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.arch.num_kv_heads % s.layout.tp > 0 and s.layout.tp % s.arch.num_kv_heads > 0,
        lambda s: f"neither divides nor is a multiple of the model's {s.arch.num_kv_heads} key/value heads",
        lambda s: _divisors(s.arch.num_kv_heads),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.dense and s.arch.intermediate_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's intermediate_size {s.arch.intermediate_size}",
        lambda s: _divisors(s.arch.intermediate_size),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.arch.critic and s.arch.hidden_size % s.layout.tp > 0,
        lambda s: f"does not divide the hidden_size {s.arch.hidden_size} that the critic's value head reads",
        lambda s: _divisors(s.arch.hidden_size),
    ),
    Rule(
        "parallel.ulysses",
        lambda s: s.heads % s.layout.ulysses > 0,
        lambda s: (
            f"does not divide the {s.heads} attention heads of a TP rank ({s.arch.num_heads} heads / tp {s.layout.tp})"
        ),
        lambda s: f"{_divisors(s.heads)}, and parallel.ring for more context ranks",
    ),
)

STAGES = (
    Rule(
        "parallel.pp",
        lambda s: s.stages > s.arch.num_layers,
        lambda s: f"x vpp={s.layout.vpp} makes more stages than the model's {s.arch.num_layers} layers",
        lambda s: f"use at most {s.arch.num_layers} stages",
    ),
    Rule(
        "parallel.stage_layers",
        lambda s: bool(s.parallel.stage_layers) and len(s.parallel.stage_layers) != s.stages,
        lambda s: (
            f"names {len(s.parallel.stage_layers)} stages, and pp={s.layout.pp} x vpp={s.layout.vpp} makes {s.stages}"
        ),
        "give one number for each, or leave it at []",
    ),
    Rule(
        "parallel.stage_layers",
        lambda s: bool(s.parallel.stage_layers) and sum(s.parallel.stage_layers) != s.arch.num_layers,
        lambda s: f"adds up to {sum(s.parallel.stage_layers)}, not to the model's {s.arch.num_layers} layers",
        "change a number, or leave it at []",
    ),
)

EXPERTS = (
    *(
        Rule(
            f"parallel.{key}",
            lambda s, key=key: not s.sparse and getattr(s.layout, key) > 1,
            "is for mixture-of-experts models and this one is dense",
            "set it to 1",
        )
        for key in ("ep", "etp")
    ),
    Rule(
        "parallel.sequence_parallel",
        lambda s: s.sparse and s.layout.tp > 1 and not s.layout.sequence_parallel,
        "does not work with experts and parallel.tp > 1: every TP rank would send the same tokens to the experts",
        "leave it at null",
    ),
    Rule(
        "parallel.ep",
        lambda s: s.sparse and s.experts.count % s.layout.ep > 0,
        lambda s: f"does not divide the model's {s.experts.count} experts",
        lambda s: _divisors(s.experts.count),
    ),
    Rule(
        "parallel.etp",
        lambda s: s.sparse and s.experts.intermediate_size % s.layout.etp > 0,
        lambda s: f"does not divide the model's expert width {s.experts.intermediate_size}",
        lambda s: _divisors(s.experts.intermediate_size),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.sparse and s.experts.shared_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's shared expert's width {s.experts.shared_size}",
        lambda s: _divisors(s.experts.shared_size),
    ),
    Rule(
        "parallel.etp",
        lambda s: s.sparse and s.layout.etp > 1 and s.arch.linear_bias,
        "does not work with biases in the experts",
        "set it to 1",
    ),
)

PRECISION_AND_OPTIMIZER = (
    Rule(
        "parallel.distributed_optimizer",
        lambda s: s.config.train.precision == "fp64" and bool(s.parallel.distributed_optimizer),
        "does not work with train.precision=fp64 (Megatron's distributed optimizer holds fp32 state)",
        "leave it at null",
    ),
)

MEMORY = (
    *(
        Rule(
            "memory.recompute_modules",
            lambda s, name=name: name in set(s.memory.recompute_modules) - set(s.recompute_modules),
            f"names {name}, and the model has {missing}",
            lambda s: f"use some of {', '.join(s.recompute_modules)}",
        )
        for name, missing in {
            "mlp": "experts in every layer",
            "moe": "no experts",
            "shared_experts": "no shared experts",
            "mla_up_proj": "no latent attention",
        }.items()
    ),
    Rule(
        "memory.recompute_layers",
        lambda s: s.memory.recompute_layers is not None and s.memory.recompute_layers > max(s.stage_layers),
        lambda s: f"is more than the {max(s.stage_layers)} layers of the largest pipeline stage",
        "leave it at null for all of them",
    ),
    Rule(
        "memory.offload_optimizer",
        lambda s: s.memory.offload_optimizer > 0 and s.config.train.precision != "bf16",
        lambda s: f"does not work with train.precision={s.config.train.precision} (it holds fp32 weights of bf16 ones)",
        "use train.precision=bf16, or 0",
    ),
    Rule(
        "memory.offload_optimizer",
        lambda s: s.memory.offload_optimizer > 0 and not s.config.distributed_optimizer,
        "needs the distributed optimizer",
        "leave parallel.distributed_optimizer at null, or use 0",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers >= s.arch.num_layers,
        lambda s: f"is not less than the model's {s.arch.num_layers} layers",
        lambda s: f"use at most {s.arch.num_layers - 1}",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and s.layout.pp > 1,
        lambda s: f"does not work in a pipeline (parallel.pp={s.layout.pp})",
        "use 0, or parallel.pp=1",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and s.memory.recompute != "none",
        lambda s: f"does not work with memory.recompute={s.memory.recompute}",
        "use one of the two: 0 here, or memory.recompute=none",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and not _uses_transformer_engine(s),
        "needs the layers of Transformer Engine, which this run does not use",
        "use 0, or model.transformer_engine=true where it is installed",
    ),
)

_LOCAL, _OWN_KERNEL = "use model.transformer_engine=false", "use parallel.cp_kernel=isoloss"

# What Transformer Engine's attention takes: docs/transformer_engine.md names its sources.
TRANSFORMER_ENGINE = (
    Rule(
        "model.transformer_engine",
        lambda s: _forced(s) and transformer_engine.installed() is None,
        "needs the package transformer_engine, which does not import here",
        f"install it, or {_LOCAL}",
    ),
    Rule(
        "model.transformer_engine",
        lambda s: _forced(s) and _version() < transformer_engine.OLDEST,
        lambda s: f"needs Transformer Engine {transformer_engine.OLDEST}, and here is {_version()}",
        f"install a newer one, or {_LOCAL}",
    ),
    Rule(
        "model.transformer_engine",
        lambda s: _forced(s) and s.config.train.precision == "fp64",
        "does not work with train.precision=fp64, which its kernels do not have",
        f"{_LOCAL}, or train.precision=fp32 or bf16",
    ),
    Rule(
        "parallel.cp_kernel",
        lambda s: _fused_attention(s) and not _uses_transformer_engine(s),
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
        lambda s: f"{_divisors(_kv_heads(s))}, or parallel.cp_kernel=isoloss",
    ),
)

RULES = (*LAYOUT_AND_MODEL, *STAGES, *EXPERTS, *PRECISION_AND_OPTIMIZER, *TRANSFORMER_ENGINE, *MEMORY)
