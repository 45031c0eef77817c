"""A dense MLP with a gate: down(activation(gate(x)) * up(x))."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.models.kinds.kind import MLP, RECORDED_ACTIVATION, Activation, Place, Recorded, Refusal, divisors
from isoloss.models.kinds.mappings import GatedMLP, RowParallel
from isoloss.models.kinds.weight import Weight
from isoloss.parallel import Layout

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Dense(MLP):
    """width: rows of gate and of up."""

    width: int
    activation: Activation = "swiglu"

    recomputes = ("mlp", "mlp_act")

    def weights(self, place: Place) -> Iterator[Weight]:
        yield from gated_mlp(place, "mlp.", "mlp.", self.width)

    def linears(self) -> Sequence[str]:
        return "mlp.linear_fc1", "mlp.linear_fc2"

    def fused_norms(self) -> Mapping[str, str]:
        return {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        if self.width % layout.tp:
            yield "parallel.tp", f"does not divide the model's intermediate_size {self.width}", divisors(self.width)

    def recorded(self) -> Iterator[Recorded]:
        yield "activation_func", "hidden_act", RECORDED_ACTIVATION[self.activation]
        yield "ffn_hidden_size", "intermediate_size", self.width

    def settings(self) -> dict[str, Any]:
        return {"ffn_hidden_size": self.width}


def gated_mlp(
    place: Place,
    mcore: str,
    hf: str,
    width: int,
    names: Sequence[str] = PROJECTIONS,
    expert: int | None = None,
) -> Iterator[Weight]:
    """Weights of one MLP. mcore, hf: what its names begin with, within the layer."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    rows, columns = (width, place.hidden), (place.hidden, width)
    parts = {gate: rows, up: rows}
    yield place.joined(f"{mcore}linear_fc1.weight", (2 * width, place.hidden), parts, GatedMLP(), expert)
    yield place.weight(f"{mcore}linear_fc2.weight", down, columns, RowParallel(), expert)
