"""The key of servers that ask for one, as `Authorization: Bearer KEY`. It is never written or said anywhere."""

from dataclasses import dataclass, field

from isoloss.engine.rl.config import RolloutConfig
from isoloss.parallel import UserError
from isoloss.parallel.runtime import environment


@dataclass(frozen=True)
class ApiKey:
    """variable: the environment variable that holds the key; its name is no secret."""

    variable: str
    value: str = field(repr=False)

    def hidden_in(self, text: str) -> str:
        """Return the text without the key: the user sees what a server says, which may repeat what it was sent."""
        return text.replace(self.value, "***")


def api_key_of(config: RolloutConfig) -> ApiKey | None:
    """The key in the variable rollout.api_key_env. Raises UserError where that holds none that can be sent, or where
    the key would be seen by others."""
    name = config.api_key_env
    if name is None or config.backend == "transformers":
        return None
    value = environment.variable(name)
    if not value:
        raise UserError(
            f"rollout.api_key_env={name}: that environment variable is {'not set' if value is None else 'empty'}; "
            "export the servers' key in it, on every node of the trainer, or set rollout.api_key_env=null"
        )
    if not value.isascii() or not value.isprintable() or " " in value:
        raise UserError(
            f"rollout.api_key_env={name}: the value of that environment variable holds a space, the end of a line or "
            "another character that cannot be sent; export the key alone"
        )
    if config.server_command is not None and value in config.server_command:
        raise UserError(
            f"rollout.server_command holds the key of rollout.api_key_env={name}, which config.yaml and the list of "
            "processes would show; let the command read it from a file (docs/rollout.md)"
        )
    return ApiKey(name, value)
