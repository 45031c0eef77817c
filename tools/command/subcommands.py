"""List the subcommands of `isoloss`. Imports none of them: help, completion and mistakes answer at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Subcommand:
    """A subcommand: its name, the module whose function `main` runs it, and a line for the list.

    words: kind of words that it takes: keys, a recipe and then keys, or others.
    has_script: False if pyproject.toml has no command isoloss-NAME.
    """

    name: str
    module: str
    text: str
    words: Literal["keys", "recipe", "others"] = "others"
    has_script: bool = True

    @property
    def recipe(self) -> str | None:
        """Return the recipe that the subcommand runs; None for a tool."""
        return self.name if self.module.startswith("isoloss.recipes.") else None


SUBCOMMANDS = (
    Subcommand("sft", "isoloss.recipes.sft", "fine-tune a model on rows of text, prompts or messages", "keys"),
    Subcommand("grpo", "isoloss.recipes.grpo", "reinforcement learning with GRPO and its relatives", "keys"),
    Subcommand("dapo", "isoloss.recipes.dapo", "the same with DAPO's dynamic sampling and overlong shaping", "keys"),
    Subcommand("audit", "isoloss.tools.audit.__main__", "what the loss will see of your rows", "recipe"),
    Subcommand("plan", "isoloss.tools.plan.__main__", "memory and seconds of a run, without a GPU", "recipe"),
    Subcommand("prove", "isoloss.tools.prove.__main__", "compare loss and gradients of layouts on your data", "keys"),
    Subcommand("convert", "isoloss.tools.convert.__main__", "convert checkpoints from and to Hugging Face"),
    Subcommand("migrate", "isoloss.tools.migrate.__main__", "translate a configuration of verl, TRL or slime"),
    Subcommand("config", "isoloss.tools.config.__main__", "compare configurations: presets, files and runs"),
    Subcommand("serve", "isoloss.tools.serve.__main__", "train and sample for clients of the Tinker API"),
    Subcommand("watch", "isoloss.tools.watch", "follow a run by the files of its folder"),
    Subcommand("reward-curve", "isoloss.tools.reward_curve", "draw the reward of one or more runs", has_script=False),
    Subcommand(
        "samples", "isoloss.tools.samples", "show the best, worst or failed completions of a run", has_script=False
    ),
    Subcommand("doctor", "isoloss.tools.doctor.__main__", "list what is installed, missing or does not go together"),
    Subcommand(
        "completion", "isoloss.tools.command.completion", "print what completes words in a shell", has_script=False
    ),
)
BY_NAME = {subcommand.name: subcommand for subcommand in SUBCOMMANDS}
