"""Define the keys of agents: programs that call the model several times on the way to a reward."""

from dataclasses import dataclass
from typing import Literal

from isoloss.parallel.runtime.config_key import Keys, key


@dataclass(frozen=True)
class EnvironmentConfig(Keys, group="environment"):
    """The program around the model (docs/agents.md)."""

    program: str | None = key(
        None,
        "A function agent(session, row) of yours, file.py:function or package.module:function, or command:COMMAND of a "
        "shell, which gets OPENAI_BASE_URL and OPENAI_API_KEY. It calls the model as often as it likes, and gives the "
        "reward. null: a prompt is completed once, and reward.function gives the reward.",
    )
    workers: int = key(2, "Processes in which the function runs, a thread a session.", at_least=1)
    concurrency: int = key(256, "Sessions in progress at a time.", at_least=1)
    endpoint: bool = key(
        False,
        "Give sessions a URL and a key for clients of OpenAI's chat completions; command: has them always. Needs "
        "isoloss[serve].",
    )
    python: str | None = key(
        None, "Interpreter of these processes, such as that of another virtual environment; null: the trainer's."
    )
    retries: int = key(
        2,
        "Further tries of a session that ended by a fault, not by the policy. They are answered from its record for as "
        "long as they ask the same.",
        at_least=0,
    )

    @property
    def serves(self) -> bool:
        """Return whether sessions have a URL."""
        return self.endpoint or (self.program or "").startswith("command:")


@dataclass(frozen=True)
class AgentConfig(Keys, group="agent"):
    """The dialogue of a program and the model (docs/agents.md)."""

    history: Literal["append", "template"] = key(
        "append",
        "What the model reads of its own turns where the chat template writes them in other tokens: the tokens that "
        "they were made of (append), or the template's (template), which makes a branch.",
    )
    tool_parser: str | None = key(
        None,
        "What finds calls of tools in a reply: hermes, or a function of yours, file.py:function, from text to (text, "
        "calls). null: the tokenizer's response template.",
        choices=("hermes",),
        or_function=True,
    )
    max_turns: int = key(16, "Most calls of the model in a session.", at_least=1)
    max_tokens: int | None = key(
        None, "Most tokens that the model makes in a session; null: max_turns x rollout.max_new_tokens.", at_least=1
    )
    timeout: float = key(
        600.0, "Seconds that a program may take for itself, between two calls of the model and after the last.", above=0
    )
