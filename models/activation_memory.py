"""Which activations the backward does not find in the memory of the device: Megatron-Core's recomputation and
offloading, switched on (docs/memory.md)."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ActivationMemory:
    """recompute: nothing; selective: the insides of `recompute_modules` (none named: core_attn); full: whole layers, or
    only the first `recompute_layers` of each stage. offload_layers: so many layers' activations wait in host memory."""

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_layers: int | None = None
    offload_layers: int = 0

    def settings(self) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig that say so. Saved activations stay whole on every TP rank
        (`distribute_saved_activations` is off: it needs TP without sequence parallelism)."""
        settings: dict[str, Any] = {}
        if self.offload_layers:
            settings = {"cpu_offloading": True, "cpu_offloading_num_layers": self.offload_layers}
        if self.recompute == "selective":
            settings |= {
                "recompute_granularity": "selective",
                "recompute_modules": list(self.recompute_modules) or None,
            }
        if self.recompute == "full":
            method, layers = ("block", self.recompute_layers) if self.recompute_layers else ("uniform", 1)
            settings |= {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
        return settings


KEEP_ALL = ActivationMemory()
