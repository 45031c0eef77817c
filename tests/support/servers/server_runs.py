"""Small runs on servers that stand somewhere: the model, the keys, and what such a run leaves."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from isoloss.recipes import launch
from support.runs import rl_runs


def write_inputs(folder: Path) -> Path:
    """Those of `rl_runs`, with weights of some kind, which a server reads when it starts."""
    model = rl_runs.write_inputs(folder) / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return folder


def overrides_of(inputs: Path, out: Path, servers: Sequence[str]) -> list[str]:
    return [
        *rl_runs.overrides_of(inputs, out),
        "rollout.backend=sglang",
        f"rollout.servers=[{','.join(servers)}]",
        "rollout.weight_sync=tensor",
        "rollout.timeout=60",
    ]


def run(overrides: Sequence[str]) -> int:
    """The status of the recipe, in this process."""
    return launch.main("grpo", overrides)
