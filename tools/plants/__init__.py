"""Known bugs, to be planted into the production code: what a proof has to catch before it may be believed.

Each patches the function that the engine really calls, says which runs it spoils, and leaves all others as they were.
They are mistakes that trainers have shipped (docs/normalization.md).
"""

from isoloss.tools.plants.dense import DENSE
from isoloss.tools.plants.experts import EXPERTS
from isoloss.tools.plants.plant import NONE, Plant, Run
from isoloss.tools.plants.rl import RL

PLANTS = {plant.name: plant for plant in DENSE}
RL_PLANTS = {plant.name: plant for plant in RL}
MOE_PLANTS = {plant.name: plant for plant in EXPERTS}
EVERY_PLANT = PLANTS | RL_PLANTS | MOE_PLANTS

__all__ = ["EVERY_PLANT", "MOE_PLANTS", "NONE", "PLANTS", "RL_PLANTS", "Plant", "Run"]
