"""Turn a command line into a checked configuration and run it; turn a mistake into one line and exit status 2."""

import argparse
import contextlib
import errno
import functools
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isoloss.engine.config.config_file import dump, record, recorded
from isoloss.engine.config.help import terminal_help
from isoloss.engine.config.parse import build, defaults, known_keys, mappings, unknown_key
from isoloss.engine.config.schema import Config
from isoloss.engine.instruments import startup
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import PreemptedError, UserError
from isoloss.parallel.runtime import environment, program
from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.errors import PREEMPTED
from isoloss.recipes import command_line, config_files, interrupts
from isoloss.recipes.config_files import ConfigFiles

CONF = Path(__file__).parent / "conf"
ASSETS = Path(__file__).parent / "assets"
# Presets without preset=NAME: the shipped demonstration, or plain defaults if the user names a model, for which the
# demonstration's random weights, schedule and evaluation rows would make no sense.
DEMONSTRATION, PLAIN = "tiny", "plain"
# Errors of a disk that refuses to write, which are no bugs.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Recipe:
    """A recipe: the class of its configuration, and as MODULE:FUNCTION its loop, a function of that and a run's
    name."""

    config: type[Config]
    loop: str


RECIPES = {
    "sft": Recipe(Config, "isoloss.engine.sft.loop:train_sft"),
    "grpo": Recipe(RLConfig, "isoloss.engine.rl.loop:train_rl"),
    "dapo": Recipe(RLConfig, "isoloss.engine.rl.loop:train_rl"),
}

setup_globals()  # Hydra's resolvers, such as ${now:%Y}
OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS / name), replace=True)


def main(recipe: str, argv: Sequence[str] | None = None) -> int:
    """Compose the configuration of `recipe`, one of RECIPES, and run it.

    argv: words of the command line; None: those of this process, on which a key may stand only once. In words that a
        program gives, the last value of a key counts.

    Return the exit status: 0 done; 2 a mistake of the user, or a disk that refused to write (one line on standard
    error); 75 ended by a signal after saving; 130 the same by Ctrl-C. Any other end is a crash, which keeps its
    traceback.
    """
    with interrupts.watched(last=argv is None):
        return _main(recipe, argv)


def _main(recipe: str, argv: Sequence[str] | None) -> int:
    config_class = RECIPES[recipe].config
    parser = argparse.ArgumentParser(
        prog=program.name_of(f"isoloss.recipes.{recipe}"),
        description=f"Run the {recipe} recipe; several ranks: torchrun --nproc_per_node N -m isoloss.recipes.{recipe}",
        epilog=f"presets: {', '.join(presets(recipe))}",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="preset=NAME, config=FILE, and any key of the configuration"
    )
    parser.add_argument(
        "-h", "--help", nargs="?", const="", metavar="GROUP", help="tell about every key, or those of a group, and stop"
    )
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    program.add_version(parser)
    words = sys.argv[1:] if argv is None else argv
    arguments, options = parser.parse_known_args(words)
    try:
        command_line.refuse_options(options, words)
        if argv is None:
            command_line.refuse_repeated(config_class, arguments.overrides)
        command_line.refuse_spaces([*known_keys(config_class), "preset", "config"], arguments.overrides)
        if arguments.help is not None:
            text = terminal_help(config_class, arguments.help, shutil.get_terminal_size().columns)
            print_once(text if arguments.help else f"{parser.format_help()}\n{text}")
            return 0
        config, values, preset = compose_config(recipe, config_class, arguments.overrides)
        command_line.refuse_unread(arguments.overrides, values)
        if argv is None:
            command_line.refuse_without_effect(config_class, arguments.overrides, values)
        if arguments.cfg:
            print_once(dump(values))
            return 0
        command_line.refuse_missing_start(config.model.path)
        command_line.refuse_missing_ranks(recipe, config, words)
        if recorded():
            listed = ", ".join(f"{path} (sha256 {digest[:12]})" for path, digest in recorded().items())
            print_once(f"configuration: preset={preset}, then {listed}\n")
        announce(recipe, config)
        startup.prepare(config)  # torch must not be imported before
        run(recipe, config, f"{recipe}-{preset}")
        return 0
    except UserError as error:
        print_error_once(str(error))
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        file = error.filename or "a file of the run"
        print_error_once(f"{file}: {error.strerror}; make room for it, or mend the disk")
        return 2
    except PreemptedError as end:
        end_torchrun(end.told)
        return interrupts.STATUS if end.told == signal.SIGINT else PREEMPTED
    finally:
        dist = sys.modules.get("torch.distributed")  # imported only if something ran
        with contextlib.suppress(Exception):  # after a mistake the other ranks may be gone already
            if dist is not None and dist.is_initialized():
                dist.destroy_process_group()


def run(recipe: str, config: Config, run_name: str) -> None:
    """Run the loop of a recipe."""
    # Imported here, as it takes seconds that help and mistakes of a command line need not wait for.
    pkgutil.resolve_name(RECIPES[recipe].loop)(config, run_name)


def presets(recipe: str) -> list[str]:
    """Return the names of a recipe's presets."""
    return sorted(path.stem for path in (CONF / recipe / "preset").glob("*.yaml"))


def compose_config(
    recipe: str, config_class: type[ConfigT], overrides: Sequence[str]
) -> tuple[ConfigT, dict[str, Any], str]:
    """Compose a configuration. Return it, checked, with its plain values and the preset's name. Raises UserError."""
    values, preset, files = compose_values(recipe, config_class, overrides)
    try:
        return build(config_class, values), values, preset
    except UserError as error:
        raise UserError(f"{error}{files.place(str(error), overrides)}") from None


def compose_values(
    recipe: str, config_class: type[Config], overrides: Sequence[str]
) -> tuple[dict[str, Any], str, ConfigFiles]:
    """Compose the preset, the files of config=FILE and the overrides, of which a later one wins. Return plain values,
    which are not checked with each other, the preset's name, and the files. Raises UserError."""
    files, overrides = config_files.read(config_class, overrides, _keys_of_others(config_class))
    record(files.files)
    named = files.give("model.path") or any(override.startswith("model.path=") for override in overrides)
    given, others = _parsed(config_class, overrides)
    preset = next(name for name in (given, files.preset, PLAIN if named else DEMONSTRATION) if name is not None)
    if preset.endswith(command_line.CONFIG_ENDINGS):
        raise UserError(f"preset={preset} is a file: write config={preset}")
    if preset not in presets(recipe):
        raise UserError(f"preset={preset!r} does not exist; choose one of {', '.join(presets(recipe))}")
    try:
        tree = OmegaConf.merge(
            _schema(config_class), OmegaConf.load(CONF / recipe / f"preset/{preset}.yaml"), files.nested()
        )
        for override in others:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        composed = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from None
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}, preset, files


@functools.cache
def _schema(config_class: type[Config]) -> DictConfig:
    """Return the defaults of all keys; to be merged, not written to."""
    return DictConfig(defaults(config_class))


def _parsed(config_class: type[Config], overrides: Sequence[str]) -> tuple[str | None, list[Override]]:
    """Return the preset that overrides name, None without one, and the others as Hydra reads them. Raises UserError."""
    preset, others, keys = None, [], known_keys(config_class)
    open_keys = mappings(config_class)
    parser = OverridesParser.create()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            is_file = override.endswith(command_line.CONFIG_ENDINGS)
            hint = f"write config={override}" if is_file else "write overrides as key=value"
            raise UserError(f"cannot read {override!r}; {hint}")
        if key != "preset" and key not in keys and not any(key.startswith(f"{name}.") for name in open_keys):
            raise UserError(unknown_key(key, [*keys, "preset", "config"], _keys_of_others(config_class)))
        try:
            parsed = parser.parse_override(override)
        except HydraException:
            raise UserError(
                f"cannot read the value of {override!r}: put quotes around it, besides those of the shell, such as "
                f"\"{key}='a (b), c'\""
            ) from None
        if parsed.is_sweep_override():
            raise UserError(
                f"cannot read {override!r}: write a list as {key}=[{value}], or text in quotes: {key}='...'"
            )
        if parsed.package is not None:
            raise UserError(f"cannot read {override!r}: a name must not hold @; give it in a file of config=FILE")
        if key == "preset":
            preset = value
        else:
            others.append(parsed)
    return preset, others


def _keys_of_others(config_class: type[Config]) -> dict[str, str]:
    """Return the recipes that have a key which a configuration class lacks, by the key."""
    keys: dict[str, str] = {}
    for name, recipe in RECIPES.items():
        for key in set(known_keys(recipe.config)).difference(known_keys(config_class)):
            keys[key] = f"{keys[key]} and {name}" if key in keys else name
    return keys


def announce(recipe: str, config: Config) -> None:
    """Print a first line on a terminal, as imports and a first reading of the rows may take long."""
    if environment.rank_and_world()[0] == 0 and sys.stdout.isatty():
        say(f"{recipe}: {config.model.path} on {', '.join(config.data.paths('train'))}; starting")


def end_torchrun(received: signal.Signals) -> None:
    """End torchrun's agent, if one started this rank: it would take the end for a crash, and start the ranks again.

    received: signal that ended the run.
    """
    agent = environment.torchrun_agent()
    # After SIGINT or SIGTERM the agent is ending too, or it has sent SIGTERM itself to start the ranks on other nodes.
    if agent is None or received in (signal.SIGTERM, signal.SIGINT):
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an ending agent sends SIGTERM to its ranks
    if environment.local_rank() == 0:
        os.kill(agent, signal.SIGTERM)


def print_once(text: str) -> None:
    """Print to standard output on rank 0."""
    if environment.rank_and_world()[0] == 0:
        print(text, end="")


def print_error_once(message: str) -> None:
    """Print a mistake on the first rank of this node that fails."""
    # All ranks find the same mistake, but torchrun stops the others, perhaps rank 0, when one ends. So the rank prints
    # that creates a file.
    if environment.rank_and_world()[1] > 1:
        parent = psutil.Process(os.getppid())
        marker = Path(tempfile.gettempdir()) / f"isoloss-mistake-{parent.pid}-{parent.create_time()}"
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # without such a file every rank prints it
            pass
    say(f"isoloss: error: {message}", error=True)
