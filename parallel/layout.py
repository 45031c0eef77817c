"""Layouts, the degrees of the parallel axes. Imports no torch."""

import re
from dataclasses import dataclass, fields, replace

from isoloss.parallel.runtime.config_key import Keys, key
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Degrees(Keys, group="parallel"):
    """The degrees of the parallel axes of a model replica.

    A new axis is a field here; its group is in `parallel/mesh.py`, and layers and kernels use the group.
    """

    tp: int = key(1, "Tensor parallelism: ranks that share the matrices of every layer.", at_least=1)
    pp: int = key(1, "Pipeline parallelism: ranks that share the layers.", at_least=1)
    vpp: int = key(1, "Pipeline stages on each rank, run interleaved. Above 1 it needs pp > 1.", at_least=1)
    ulysses: int = key(
        1,
        "Context parallelism by Ulysses: ranks that share the tokens of a row and, inside attention, the heads.",
        at_least=1,
    )
    ring: int = key(
        1,
        "Context parallelism by ring attention: ranks that share the tokens of a row, whatever the number of heads.",
        at_least=1,
    )
    ep: int = key(1, "Expert parallelism: ranks that share the experts of a layer.", at_least=1)
    etp: int = key(1, "Tensor parallelism inside each expert.", at_least=1)


MODEL_AXES = tuple(field.name for field in fields(Degrees))
# The order of axes in a layout string, e.g. tp2+pp2+vpp2+ulysses2+dp2. dp divides the rest of the world.
AXES = (*MODEL_AXES, "dp")


@dataclass(frozen=True)
class Layout(Degrees):
    """Parallel degrees of a world. Megatron's context-parallel size is ulysses x ring.

    ep, etp: degrees by which the experts of a layer, and the matrices of each expert, are divided over the ranks of a
        pipeline stage (tp x ulysses x ring x dp). Every group of ep x etp ranks holds one copy.
    dp: data-parallel degree.
    sequence_parallel: True for Megatron's TP sequence parallelism, which splits activations between TP regions over TP.
    """

    dp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self):
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or degree < 1:
                raise UserError(f"parallel.{axis}={degree!r} must be an integer of at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise UserError(
                f"parallel.vpp={self.vpp} needs a pipeline: set parallel.pp of at least 2, or parallel.vpp=1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise UserError("parallel.sequence_parallel=true needs parallel.tp of at least 2; leave it at null")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse a string such as `tp2+pp2+ulysses2`; `1` is one rank. Raises UserError.

        TP sequence parallelism is on with tp > 1, and off with `nosp`.
        """
        degrees, nosp = {}, False
        for part in text.split("+") if text != "1" else ():
            match = re.fullmatch(r"([a-z]+)(\d+)", part)
            if part == "nosp":
                nosp = True
            elif match and match[1] in AXES and match[1] not in degrees:
                degrees[match[1]] = int(match[2])
            else:
                raise UserError(
                    f"layout {text!r}: cannot read {part!r}; write degrees of {', '.join(AXES)} joined by "
                    "'+', such as tp2+pp2+ulysses2, and nosp for no TP sequence parallelism"
                )
        return cls(**degrees, sequence_parallel=degrees.get("tp", 1) > 1 and not nosp)

    def __str__(self) -> str:
        parts = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("nosp")
        return "+".join(parts) or "1"

    @property
    def replica_size(self) -> int:
        """Count the ranks that together hold one model replica."""
        return self.tp * self.pp * self.ulysses * self.ring

    @property
    def fewest_ranks(self) -> int:
        """Count the ranks of the smallest world that admits the degrees, whatever dp is."""
        shared = self.ep * self.etp  # by the ranks of a pipeline stage
        replicas = next(n for n in range(1, shared + 1) if self.tp * self.context * n % shared == 0)
        return self.replica_size * replicas

    @property
    def world_size(self) -> int:
        return self.replica_size * self.dp

    @property
    def context(self) -> int:
        """Return Megatron's context-parallel size."""
        return self.ulysses * self.ring

    def with_world(self, world_size: int) -> "Layout":
        """Return this layout with the data-parallel degree that fills `world_size` ranks. Raises UserError."""
        if world_size % self.replica_size:
            raise UserError(
                f"world size {world_size} is not a multiple of tp {self.tp} x pp {self.pp} x ulysses {self.ulysses} x "
                f"ring {self.ring} = {self.replica_size}; start a multiple of it, or lower a degree"
            )
        layout = replace(self, dp=world_size // self.replica_size)
        ranks = layout.tp * layout.context * layout.dp
        if ranks % (self.ep * self.etp):
            raise UserError(
                f"parallel.ep={self.ep} x etp={self.etp} does not divide the {ranks} ranks of a pipeline stage (tp "
                f"{self.tp} x ulysses {self.ulysses} x ring {self.ring} x dp {layout.dp}); lower "
                "one of them, or start more ranks"
            )
        return layout
