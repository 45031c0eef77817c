"""A layout as the keys that a user writes on the command line of a recipe."""

from isoloss.parallel import Layout

# Those of tests/gpu, as far as there are devices.
ON_GPUS = (
    "1",
    "tp2",
    "tp2+nosp",
    "pp2",
    "pp2+vpp2",
    "ulysses2",
    "ring2",
    "ulysses2+ring2",
    "dp2",
    "tp2+pp2",
    "tp2+pp2+dp2",
)


def overrides(layout: Layout) -> list[str]:
    """Every degree but dp, which is what remains of the world, and TP sequence parallelism as it is."""
    degrees = [
        f"parallel.{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "ulysses", "ring", "ep", "etp")
    ]
    return [*degrees, f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}"]
