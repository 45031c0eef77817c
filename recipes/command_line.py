"""Refuse mistakes of a command line before or after a configuration is composed of it."""

import shlex
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.engine.config.elsewhere import explanation, key_of
from isoloss.engine.config.help import as_written
from isoloss.engine.config.parse import defaults, key_types
from isoloss.engine.config.schema import Config
from isoloss.parallel import UserError
from isoloss.parallel.runtime import environment

CONFIG_ENDINGS = (".yaml", ".yml")  # of files that config=FILE takes; others need no such ending

START = "runs/sft-sort"  # of the presets `tiny` of reinforcement learning, and of the Makefile
# Keys that only evaluations read.
EVALUATION_KEYS = ("train.eval_every", "rollout.eval_temperature", "rollout.eval_top_p")

# By keys that are read under a condition only: the key of the condition, and its values with which they are not read.
WITHOUT_EFFECT = {
    "algorithm.kl_in algorithm.kl_estimator algorithm.kl_aggregation algorithm.reference_offload": {
        "algorithm.kl_coef": (0,)
    },
    "algorithm.entropy_aggregation": {"algorithm.entropy_coef": (0,)},
    "algorithm.overlong_penalty": {"algorithm.overlong_buffer": (0,)},
    "algorithm.max_draws algorithm.on_shortage": {"algorithm.dynamic_sampling": (False,)},
    "algorithm.importance_cap": {"algorithm.importance": ("none",)},
    "algorithm.gae_lambda algorithm.value_clip algorithm.critic_lr": {
        "algorithm.advantage": ("grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline")
    },
    "rollout.servers rollout.router rollout.server_command rollout.sync_dir rollout.api_key_env": {
        "rollout.backend": ("transformers", "megatron")
    },
}


def refuse_repeated(cls: Any, overrides: Sequence[str]) -> None:
    """Raise UserError for a key that stands twice on a command line, as only the last would count.

    Not called for overrides that a program gives, its own first and then its user's.
    """
    lists = {name for name, kind in key_types(cls) if typing.get_origin(kind) is tuple}
    seen: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key == "config":  # of several files the later wins, key by key
            continue
        if key in seen:
            both = f"{seen[key].strip('[]')},{value.strip('[]')}"
            hint = f"write a list as {key}=[{both}]" if key in lists else "give it once"
            raise UserError(f"{key} is given twice, as {key}={seen[key]} and as {override}; {hint}")
        seen[key] = value


def refuse_options(options: Collection[str], words: Sequence[str]) -> None:
    """Raise UserError for an option that does not exist, such as --lr 1e-4, with the key in its place.

    options: unknown options among `words`, the command line.
    """
    if not options:
        return
    option = next(iter(options))
    name, equals, value = option.partition("=")
    following = words[words.index(option) + 1 :] if option in words else []
    if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
        value = following[0]
    key = name.lstrip("-").replace("-", "_")
    if key == "config" or value.endswith(CONFIG_ENDINGS):
        hint = f"write config={value or 'FILE'}"
    elif reason := None if key_of(key) else explanation(key):
        hint = reason
    else:
        hint = f"write keys as key=value, such as {key_of(key) or key}={value or 'VALUE'}"
    raise UserError(f"there is no option {name}; {hint}")


def refuse_spaces(keys: Collection[str], words: Sequence[str]) -> None:
    """Raise UserError for `key = value`, `key= value` and `key =value`, with the correct form."""
    for index, word in enumerate(words[:-1]):
        key, _, value = word.partition("=")
        following = words[index + 1]
        if key not in keys or value or following.partition("=")[0] in keys:
            continue
        value = "".join(words[index + 1 : index + 3]) if following == "=" else following
        raise UserError(f"write {key}={value.removeprefix('=')} in one word, without spaces around the equals sign")


def refuse_unread(overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise UserError for a key of evaluations without data.eval."""
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    for key in EVALUATION_KEYS:
        if given.get(key, "0") not in ("0", "null") and not values["data"]["eval"]:
            raise UserError(f"{key}={given[key]} is of evaluations, and data.eval=[] has none: give data.eval=FILE")


def refuse_without_effect(cls: Any, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise UserError for a key on the command line that differs from its default, but is not read in this
    configuration."""
    given, plain = {key: value for key, _, value in (word.partition("=") for word in overrides)}, defaults(cls)
    # A loss function of the user's gets all of algorithm.*.
    user_loss = ":" in values.get("algorithm", {}).get("loss", "")
    for keys, switches in WITHOUT_EFFECT.items():
        for key in keys.split():
            group, name = key.split(".")
            if key not in given or values[group][name] == plain[group][name] or (user_loss and group == "algorithm"):
                continue
            for switch, off in switches.items():
                value = values[group][switch.partition(".")[2]]
                if value in off:
                    raise UserError(
                        f"{key}={given[key]} has no effect with {switch}={as_written(value)}: set {switch} to another "
                        f"value, or leave {key} out"
                    )


def refuse_missing_start(model_path: str) -> None:
    """Raise UserError if the model that demonstrations of reinforcement learning begin with was not made yet."""
    if model_path == f"{START}/hf" and not Path(model_path).exists():
        raise UserError(
            f"model.path={model_path}, with which the demonstration begins, was not made yet: run `python -m "
            f"isoloss.recipes.sft preset=sort output_dir={START}` first, or give model.path=DIR"
        )


def refuse_missing_ranks(recipe: str, config: Config, words: Sequence[str]) -> None:
    """Raise UserError for a layout of several ranks in a process without torchrun, with the command that starts them.

    words: the command line.
    """
    layout = config.parallel.layout()
    ranks = layout.fewest_ranks
    if ranks > 1 and environment.rank_and_world()[1] == 1:
        raise UserError(
            f"the layout {layout} needs {ranks} ranks, or a multiple, and this is one process without others: start "
            f"torchrun --nproc_per_node {ranks} -m isoloss.recipes.{recipe} {shlex.join(words)}"
        )
