"""Plant bugs that trainers have shipped into the engine: a proof that cannot catch them proves nothing.

Each replaces the function that the engine really calls, names the runs that must then fail, and changes no other run.
docs/normalization.md has their origins.
"""

import copyreg

from isoloss.tools.prove.bugs.adapters import ADAPTERS
from isoloss.tools.prove.bugs.bug import NO_BUG, PlantedBug, RunTraits
from isoloss.tools.prove.bugs.dense import DENSE
from isoloss.tools.prove.bugs.experts import EXPERTS
from isoloss.tools.prove.bugs.policy import POLICY, PREFIXES

PLANTED_BUGS = {bug.name: bug for bug in (*DENSE, *EXPERTS, *POLICY, *PREFIXES, *ADAPTERS)}


def _by_name(name: str) -> PlantedBug:
    return PLANTED_BUGS.get(name, NO_BUG)


# The functions of a bug do not pickle; its name does, and every process has the table.
copyreg.pickle(PlantedBug, lambda bug: (_by_name, (bug.name,)))

__all__ = ["NO_BUG", "PLANTED_BUGS", "PlantedBug", "RunTraits"]
