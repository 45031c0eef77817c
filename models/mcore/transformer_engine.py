"""Transformer Engine: which one is here, and what its attention can do with packed rows.

Read, not run: Megatron-Core 0.16.1's wrappers and Transformer Engine 2.9 to 2.19 (docs/transformer_engine.md).
"""

from megatron.core.utils import get_te_version
from packaging.version import Version

# The oldest one that Megatron-Core 0.16.1 is released for.
OLDEST = Version("2.9")
# What Megatron-Core 0.17 calls the version where there is none.
ABSENT = Version("0")
# The release from which on a kernel of its attention takes packed rows that are split over ranks.
SPLITS_PACKED_ROWS_SINCE = {
    "p2p": OLDEST,
    "a2a": Version("2.10"),
    "all_gather": Version("2.18"),
    "a2a+p2p": Version("2.19"),
}


def installed() -> Version | None:
    """The version that imports here, or None."""
    version: Version | None = get_te_version()
    return version if version and version > ABSENT else None


def description(used: bool) -> str:
    """Return the name in run.json and the opening lines of a run's layers."""
    return f"Transformer Engine {installed()}" if used else "Megatron-Core"
