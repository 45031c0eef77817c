"""What cannot be run, as one table: loss x layout x model x precision x optimizer x memory.

Rules about the value of a single key stand where the key is defined (engine/config.py), and so do those that a `Layout`
fulfils whatever runs on it (parallel/mesh.py). Here is all that needs two of configuration, model and layout, and every
assertion of Megatron-Core that a user could reach. `check` needs no process group, no GPU and no weights.

A refusal is one line: the key, its value, why it cannot be, and what would do. Where several rules are broken the first
in the table speaks, so causes stand before their consequences. To add a rule, write it down in the tuple of its
subject, and a run that breaks it into tests/support/impossible.py.
"""

from isoloss.engine.compatibility.layouts import EXPERTS, LAYOUT_AND_MODEL, STAGES
from isoloss.engine.compatibility.rule import Setup
from isoloss.engine.compatibility.training import MEMORY, MOE, PRECISION_AND_OPTIMIZER
from isoloss.engine.compatibility.transformer_engine import TRANSFORMER_ENGINE
from isoloss.engine.config import Config
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout, UserError

RULES = (
    *LAYOUT_AND_MODEL, *STAGES, *EXPERTS, *MOE, *PRECISION_AND_OPTIMIZER, *TRANSFORMER_ENGINE, *MEMORY,
)  # fmt: skip


def check(config: Config, arch: Architecture, layout: Layout) -> None:
    """Raises UserError for the first rule of the table that the setup breaks."""
    setup = Setup(config, arch, layout)
    for rule in RULES:
        if rule.broken(setup):
            raise UserError(rule.refusal(setup))
