"""Bugs that trainers have shipped, to be planted into the engine: a proof that cannot catch them proves nothing.

Each replaces the function that the engine really calls, says which runs must then fail, and leaves all others as they
were. docs/normalization.md tells where they come from.
"""

import copyreg

from isoloss.tools.planted_bugs.bug import NO_BUG, PlantedBug, RunTraits
from isoloss.tools.planted_bugs.dense import DENSE
from isoloss.tools.planted_bugs.experts import EXPERTS
from isoloss.tools.planted_bugs.policy import POLICY
from isoloss.tools.planted_bugs.prefixes import PREFIXES

PLANTED_BUGS = {bug.name: bug for bug in (*DENSE, *EXPERTS, *POLICY, *PREFIXES)}


def _by_name(name: str) -> PlantedBug:
    return PLANTED_BUGS.get(name, NO_BUG)


# The functions of a bug do not pickle; its name does, and every process has the table.
copyreg.pickle(PlantedBug, lambda bug: (_by_name, (bug.name,)))

__all__ = ["NO_BUG", "PLANTED_BUGS", "PlantedBug", "RunTraits"]
