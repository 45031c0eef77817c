"""A rule of the table, and the setup that it is put to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isoloss.engine.config import RECOMPUTE_MODULES, Config, MemoryConfig, ParallelConfig
from isoloss.models.architecture import Architecture, Experts
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout


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
    def uses_transformer_engine(self) -> bool:
        return self.config.model.transformer_engine

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
        return f"{self.key}={shown(setup.value(self.key))} {why}; {valid}"


def shown(value: Any) -> str:
    """As the user writes it on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def divisors(n: int) -> str:
    return f"use one of {[d for d in range(1, n + 1) if n % d == 0]}"
