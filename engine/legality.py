"""What cannot be run, as one table: loss x layout x model x precision x optimizer x memory.

Rules about the value of a single key stand where the key is defined, and so do those that a `Layout` fulfils whatever
runs on it; here is all that needs two of configuration, model and layout. `check` needs no process group, no GPU and no
weights. A refusal is one line: the key, its value, the reason, and the values that would do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isoloss.engine.config import Config
from isoloss.models.architecture import Architecture, Experts
from isoloss.parallel import Layout, UserError


@dataclass(frozen=True)
class Setup:
    """A run before it exists. layout: with its dp, where the world is known."""

    config: Config
    arch: Architecture
    layout: Layout

    @property
    def experts(self) -> Experts:
        assert self.arch.experts is not None
        return self.arch.experts

    def value(self, key: str) -> Any:
        """What the user set a key to; of a degree, what the layout says."""
        group, name = key.split(".")
        if group == "parallel" and name in ("tp", "pp", "vpp", "ulysses", "ring", "ep", "etp", "sequence_parallel"):
            return getattr(self.layout, name)
        return getattr(getattr(self.config, group), name)


@dataclass(frozen=True)
class Rule:
    """broken: whether a setup breaks it. why: what is wrong with the key's value; valid: what would do instead."""

    key: str
    broken: Callable[[Setup], bool]
    why: Callable[[Setup], str]
    valid: Callable[[Setup], str]

    def refusal(self, setup: Setup) -> str:
        value = setup.value(self.key)
        shown = str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
        return f"{self.key}={shown} {self.why(setup)}; {self.valid(setup)}"


def check(config: Config, arch: Architecture, layout: Layout) -> None:
    """Raises UserError for the first rule of the table that the setup breaks."""
    setup = Setup(config, arch, layout)
    for rule in RULES:
        if rule.broken(setup):
            raise UserError(rule.refusal(setup))


def _rule(key: str, broken: Callable[[Setup], bool], why, valid) -> Rule:
    """why, valid: texts, or functions of the setup."""
    return Rule(key, broken, *(part if callable(part) else lambda _, text=part: text for part in (why, valid)))


def _divisors(n: int) -> str:
    return f"use one of {[d for d in range(1, n + 1) if n % d == 0]}"


def _heads(s: Setup) -> int:
    """Attention heads of a TP rank."""
    return s.arch.num_heads // s.layout.tp


def _stages(s: Setup) -> int:
    return s.layout.pp * s.layout.vpp


LAYOUT_AND_MODEL = (
    _rule(
        "parallel.tp",
        lambda s: s.arch.num_heads % s.layout.tp > 0,
        lambda s: f"does not divide the model's {s.arch.num_heads} attention heads",
        lambda s: _divisors(s.arch.num_heads),
    ),
    _rule(
        "parallel.tp",
        lambda s: s.arch.num_kv_heads % s.layout.tp > 0 and s.layout.tp % s.arch.num_kv_heads > 0,
        lambda s: f"neither divides nor is a multiple of the model's {s.arch.num_kv_heads} key/value heads",
        lambda s: _divisors(s.arch.num_kv_heads),
    ),
    _rule(
        "parallel.tp",
        lambda s: s.arch.intermediate_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's intermediate_size {s.arch.intermediate_size}",
        lambda s: _divisors(s.arch.intermediate_size),
    ),
    _rule(
        "parallel.tp",
        lambda s: s.arch.critic and s.arch.hidden_size % s.layout.tp > 0,
        lambda s: f"does not divide the hidden_size {s.arch.hidden_size} that the critic's value head reads",
        lambda s: _divisors(s.arch.hidden_size),
    ),
    _rule(
        "parallel.ulysses",
        lambda s: _heads(s) % s.layout.ulysses > 0,
        lambda s: (
            f"does not divide the {_heads(s)} attention heads of a TP rank ({s.arch.num_heads} heads / tp "
            f"{s.layout.tp})"
        ),
        lambda s: f"{_divisors(_heads(s))}, and parallel.ring for more context ranks",
    ),
    _rule(
        "parallel.pp",
        lambda s: _stages(s) > s.arch.num_layers,
        lambda s: f"x vpp={s.layout.vpp} makes more stages than the model's {s.arch.num_layers} layers",
        lambda s: f"use at most {s.arch.num_layers} stages",
    ),
    _rule(
        "parallel.stage_layers",
        lambda s: bool(s.config.parallel.stage_layers) and len(s.config.parallel.stage_layers) != _stages(s),
        lambda s: (
            f"names {len(s.config.parallel.stage_layers)} stages, and pp={s.layout.pp} x vpp={s.layout.vpp} "
            f"makes {_stages(s)}"
        ),
        "give one number for each, or leave it at []",
    ),
    _rule(
        "parallel.stage_layers",
        lambda s: bool(s.config.parallel.stage_layers) and sum(s.config.parallel.stage_layers) != s.arch.num_layers,
        lambda s: f"adds up to {sum(s.config.parallel.stage_layers)}, not to the model's {s.arch.num_layers} layers",
        "change a number, or leave it at []",
    ),
)

EXPERTS = (
    *(
        _rule(
            f"parallel.{key}",
            lambda s, key=key: s.arch.experts is None and getattr(s.layout, key) > 1,
            "is for mixture-of-experts models and this one is dense",
            "set it to 1",
        )
        for key in ("ep", "etp")
    ),
    _rule(
        "parallel.sequence_parallel",
        lambda s: s.arch.experts is not None and s.layout.tp > 1 and not s.layout.sequence_parallel,
        "does not work with experts and parallel.tp > 1: every TP rank would send the same tokens to the experts",
        "leave it at null",
    ),
    _rule(
        "parallel.ep",
        lambda s: s.arch.experts is not None and s.experts.count % s.layout.ep > 0,
        lambda s: f"does not divide the model's {s.experts.count} experts",
        lambda s: _divisors(s.experts.count),
    ),
    _rule(
        "parallel.etp",
        lambda s: s.arch.experts is not None and s.experts.intermediate_size % s.layout.etp > 0,
        lambda s: f"does not divide the model's expert width {s.experts.intermediate_size}",
        lambda s: _divisors(s.experts.intermediate_size),
    ),
    _rule(
        "parallel.tp",
        lambda s: s.arch.experts is not None and s.experts.shared_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's shared expert's width {s.experts.shared_size}",
        lambda s: _divisors(s.experts.shared_size),
    ),
    _rule(
        "parallel.etp",
        lambda s: s.arch.experts is not None and s.layout.etp > 1 and s.arch.linear_bias,
        "does not work with biases in the experts",
        "set it to 1",
    ),
)

MOE = (
    *(
        _rule(
            f"moe.{key}",
            lambda s, key=key, off=off: s.arch.experts is None and getattr(s.config.moe, key) != off,
            "is for mixture-of-experts models and this one is dense",
            f"leave it at {off}",
        )
        for key, off in (("aux_loss", "none"), ("z_loss_coef", 0), ("bias_update_rate", 0))
    ),
    _rule(
        "moe.bias_update_rate",
        lambda s: s.arch.experts is not None and not s.experts.selection_bias and s.config.moe.bias_update_rate > 0,
        lambda s: f"moves selection biases, and models of the family {s.arch.family} have none",
        "leave it at 0 and balance with moe.aux_loss=sequence",
    ),
)

PRECISION_AND_OPTIMIZER = (
    _rule(
        "parallel.distributed_optimizer",
        lambda s: s.config.train.precision == "fp64" and bool(s.config.parallel.distributed_optimizer),
        "does not work with train.precision=fp64 (Megatron's distributed optimizer holds fp32 state)",
        "leave it at null",
    ),
)

RULES = (*LAYOUT_AND_MODEL, *EXPERTS, *MOE, *PRECISION_AND_OPTIMIZER)
