"""List the subcommands of `isoloss`. Imports none of them: help, completion and mistakes answer at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """A subcommand: its name, the module whose function `main` runs it, and a line for the list."""

    name: str
    module: str
    text: str

    @property
    def recipe(self) -> str | None:
        """Return the recipe that the subcommand runs; None for a tool."""
        return self.name if self.module.startswith("isoloss.recipes.") else None


SUBCOMMANDS = (
    Subcommand("sft", "isoloss.recipes.sft", "fine-tune a model on rows of text, prompts or messages"),
    Subcommand("grpo", "isoloss.recipes.grpo", "train a model by reinforcement learning with GRPO and its relatives"),
    Subcommand("dapo", "isoloss.recipes.dapo", "the same with DAPO: dynamic sampling, clip-higher, overlong shaping"),
    Subcommand("plan", "isoloss.tools.plan.__main__", "does a run fit its GPUs? Memory and seconds, without a GPU"),
    Subcommand("prove", "isoloss.tools.prove.__main__", "compare loss and gradients of layouts on your data"),
    Subcommand("convert", "isoloss.tools.convert.__main__", "checkpoints from and to Hugging Face"),
    Subcommand("migrate", "isoloss.tools.migrate.__main__", "translate a configuration of verl, TRL or slime"),
    Subcommand("config", "isoloss.tools.config.__main__", "compare configurations: presets, files and runs"),
    Subcommand("reward-curve", "isoloss.tools.reward_curve", "draw the reward of one or more runs"),
    Subcommand("doctor", "isoloss.tools.doctor.__main__", "what is installed, missing or does not go together"),
    Subcommand("completion", "isoloss.tools.command.completion", "print a script that completes words in a shell"),
)
BY_NAME = {subcommand.name: subcommand for subcommand in SUBCOMMANDS}
