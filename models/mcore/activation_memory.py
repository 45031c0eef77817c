"""Which activations the backward does not find in the memory of the device: Megatron-Core's recomputation and
offloading, switched on (docs/memory.md)."""

from dataclasses import dataclass
from typing import Any, Literal

from isoloss.parallel.runtime.config_key import Keys, key

OF_MEGATRON = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj")
RECOMPUTE_MODULES = (*OF_MEGATRON, "mlp_act", "experts")


@dataclass(frozen=True)
class ActivationMemory(Keys, group="memory"):
    """The keys of activations; those of the rest are in isoloss.engine.config.schema.MemoryConfig."""

    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "Activations that the backward recomputes instead of keeping them: none, those inside recompute_modules, or "
        "those of whole layers (least memory, a third more work).",
    )
    recompute_modules: tuple[str, ...] = key(
        (),
        "With recompute=selective: the modules to recompute; []: core_attn (the attention product). mlp_act (the "
        "activation of dense MLPs) costs next to nothing.",
        choices=RECOMPUTE_MODULES,
    )
    recompute_layers: int | None = key(
        None,
        "With recompute=full: number of layers of each pipeline stage, from its first, to recompute; null: all.",
        at_least=1,
    )
    offload_layers: int = key(
        0, "Layers whose activations wait in CPU memory until the backward. Needs Transformer Engine.", at_least=0
    )

    @property
    def recomputes_experts(self) -> bool:
        """From the tokens that they received; with `moe`, which sends those again, they are computed again anyway."""
        return "experts" in self._named and "moe" not in self._named

    @property
    def recomputes_mlp_act(self) -> bool:
        """With `mlp`, which computes it again anyway, there is nothing more to do."""
        return "mlp_act" in self._named and "mlp" not in self._named

    @property
    def _named(self) -> tuple[str, ...]:
        return self.recompute_modules if self.recompute == "selective" else ()

    def settings(self) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig that say so. Saved activations stay whole on every TP rank
        (`distribute_saved_activations` is off: it needs TP without sequence parallelism)."""
        settings: dict[str, Any] = {}
        if self.offload_layers:
            settings = {"cpu_offloading": True, "cpu_offloading_num_layers": self.offload_layers}
        if self.recompute == "selective":
            modules = [module for module in self.recompute_modules if module in OF_MEGATRON]
            settings |= {
                "recompute_granularity": "selective",
                "recompute_modules": modules if self.recompute_modules else None,
            }
        if self.recompute == "full":
            method, layers = ("block", self.recompute_layers) if self.recompute_layers else ("uniform", 1)
            settings |= {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
        return settings


KEEP_ALL = ActivationMemory()
