"""Check and create the folder of a run, and record where the run came from."""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.config.config_file import dump
from isoloss.engine.config.config_file import recorded as recorded_files
from isoloss.engine.config.schema import Config
from isoloss.engine.data.chat_template import asks_for_the_date
from isoloss.engine.instruments.files import replace_text
from isoloss.engine.run.records import CONFIG, LOCK, METRICS, PROVENANCE
from isoloss.engine.step.optimizer import OPTIMIZER
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.models.mcore import transformer_engine
from isoloss.parallel import UserError
from isoloss.parallel.ops import flash_attention
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime import device, environment
from isoloss.parallel.runtime.versions import version_of

DATE_KEY = "data.date"  # its key in a checkpoint
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A digest of something outside of the configuration that a resumed run must not change.

    name: name in messages and checkpoints.
    value: a digest or a short text.
    decided_by: files or keys on which the value depends, for a message.
    """

    name: str
    value: str
    decided_by: str


def check_folder(config: Config, run_name: str, arch: Architecture) -> None:
    """Raise UserError for a folder that cannot take this run: it cannot be written, the user named it and it holds
    another run, or with checkpoint.resume its newest checkpoint has another `resume_fingerprint`. Enters no
    collective."""
    folder = run_folder(config, run_name)
    check_writable(folder, "output_dir")
    check_writable(cache_folder(config), "data.cache_dir")
    if profiled := config.train.profiled(None):
        check_writable(profiled[1], "train.profile")
    check_resume(config, run_name, arch)
    check_free(config, folder)


def check_free(config: Config, folder: Path) -> None:
    """Raise UserError for a folder that the user named and that holds another run."""
    if config.output_dir and not config.checkpoint.resume and (folder / METRICS).exists():
        raise UserError(
            f"output_dir={folder} holds a run already; choose another, or set checkpoint.resume=true to go on with it"
        )


def check_writable(folder: Path, key: str) -> None:
    """Raise UserError for a folder that cannot be created or written to. key: key that names it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{key}={folder} cannot be a folder: {existing} is a file; choose another path")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".isoloss-", dir=existing))  # tried: /proc refuses all users
    except OSError as error:
        why = f"no permission in {existing}" if isinstance(error, PermissionError) else f"{existing}: {error.strerror}"
        raise UserError(f"{key}={folder} cannot be written: {why}; choose another path") from None


def check_resume(config: Config, run_name: str, arch: Architecture) -> None:
    """Raise UserError if the run would go on from a checkpoint with another `resume_fingerprint`."""
    if (resumed := _checkpoint_to_resume(config, run_name)) is None:
        return
    newest, extra = resumed
    for key, now in resume_fingerprint(config, arch).items():
        if recorded(extra, key, newest) != now:
            raise UserError(
                f"{key}={now!r} differs from the {extra[key]!r} of {newest}, so this would be another run; "
                "set it back, or start a new run in another output_dir"
            )


def check_fingerprints(config: Config, run_name: str, fingerprints: Sequence[Fingerprint]) -> None:
    """Raise UserError if the run would go on from a checkpoint with other fingerprints. Enters no collective."""
    if (resumed := _checkpoint_to_resume(config, run_name)) is None:
        return
    newest, extra = resumed
    for now in fingerprints:
        before = recorded(extra, now.name, newest)
        if before != now.value:
            raise UserError(
                f"{now.name} is not what {newest} was trained with (fingerprint {now.value}, then {before}), so this "
                f"would be another run: {now.decided_by} differs; set it back, or start a new run in another output_dir"
            )


def with_date(config: AnyConfig, run_name: str) -> AnyConfig:
    """Return the configuration with a data.date if a chat template asks for one: that of the resumed checkpoint, else
    today's. Enters no collective."""
    if config.data.date is not None or not asks_for_the_date(tokenizer_folder(config)):
        return config
    resumed = _checkpoint_to_resume(config, run_name)
    day = resumed[1].get(DATE_KEY) if resumed else None
    return dataclasses.replace(config, data=dataclasses.replace(config.data, date=day or str(date.today())))


def _checkpoint_to_resume(config: Config, run_name: str) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the checkpoint that the run goes on from, and its `extra`; None for a new run."""
    if not config.checkpoint.resume:
        return None
    newest = checkpoint.newest_undamaged(run_folder(config, run_name) / "checkpoints", checkpoint.read_extra)
    return newest and newest[:2]


def recorded(extra: Mapping[str, object], key: str, newest: Path) -> object:
    """Return the value of `key` in a checkpoint. Raises UserError if it has none."""
    if key not in extra:  # whether it is the same run is unknown then
        raise UserError(
            f"checkpoint {newest} does not tell {key}: another recipe, or an earlier isoloss, wrote it; go on with "
            f"that one, or start a new run from its weights with model.path={newest} in another output_dir"
        )
    return extra[key]


def resume_fingerprint(config: Config, arch: Architecture) -> dict[str, object]:
    """Return the values that a resumed run must not change, by key: of the model and of the configuration."""
    digest = hashlib.sha256(repr(arch).encode()).hexdigest()[:12]
    return {"architecture of model.path, as a digest,": digest, **config.resume_fingerprint()}


def settings(config: Config) -> dict[str, object]:
    """Return the settings that a resumed run may change, by key, as plain values."""
    groups = {name: getattr(config, name, None) for name in ("optim", "loss", "moe", "algorithm")}
    values = {
        f"{name}.{key}": value
        for name, group in groups.items()
        if group is not None
        for key, value in dataclasses.asdict(group).items()
    }
    plain: dict[str, object] = json.loads(json.dumps(values | {"train.steps": config.train.steps}))
    return plain


def changed_settings(config: Config, before: Mapping[str, object]) -> list[str]:
    """Return a line about `settings` that differ from a checkpoint's. before: the checkpoint's; may lack some or
    all."""
    now = settings(config)
    changed = [f"{key} is {now[key]}, was {before[key]}" for key in now if key in before and now[key] != before[key]]
    return [f"changed since that checkpoint: {'; '.join(changed)}"] if changed else []


def run_folder(config: Config, run_name: str) -> Path:
    """Return the run's folder, without the number of a default name that is taken."""
    return Path(config.output_dir or f"runs/{run_name}")


def tokenizer_folder(config: Config) -> Path:
    """Return the folder of tokenizer and chat templates: model.tokenizer's, or else the model's."""
    return hf_folder(config.model.tokenizer or config.model.path)


def cache_folder(config: Config) -> Path:
    """Return the folder of tokenized rows, which runs in neighbouring folders share."""
    parent = Path(config.output_dir).parent if config.output_dir else Path("runs")
    return Path(config.data.cache_dir) if config.data.cache_dir else parent / ".cache"


def step_folder(output_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return output_dir / "checkpoints" / checkpoint.STEP_FOLDER.format(step)


def replace_export(output_dir: Path, name: str, export: Callable[[Path], None]) -> Path:
    """Write a folder by `export` and rename it to output_dir/name, replacing an earlier one. Return it.

    Collective over the world: `export` and two barriers.
    """
    folder, unfinished = output_dir / name, output_dir / f".{name}.partial"
    if is_main():
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    export(unfinished)
    if is_main():
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    dist.barrier()
    return folder


@contextlib.contextmanager
def open_folder(config: Config, run_name: str, total_steps: int | None = None) -> Iterator[Path]:
    """Create the run's folder on rank 0, with config.yaml and run.json, and lock it for this run until the end.

    total_steps: number of optimizer steps of the run, for run.json.

    The default is runs/<run_name>, numbered if it exists and checkpoint.resume is off. Raises UserError on every rank
    if another run is writing the folder. One broadcast over the world.
    """
    with contextlib.ExitStack() as stack:
        outcome: list[Path | UserError | None] = [None]
        if is_main():
            try:
                outcome[0] = stack.enter_context(_claim(config, run_name, total_steps))
            except UserError as error:
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        assert outcome[0] is not None
        yield outcome[0]


@contextlib.contextmanager
def _claim(config: Config, run_name: str, total_steps: int | None) -> Iterator[Path]:
    folder = run_folder(config, run_name)
    if config.output_dir or config.checkpoint.resume:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = _new_folder(folder)
    with _alone(folder):
        check_free(config, folder)  # again: a run may have begun and ended here since
        resolved = dataclasses.replace(config, output_dir=str(folder))
        plain = json.loads(json.dumps(dataclasses.asdict(resolved)))  # tuples become lists
        replace_text(folder / CONFIG, dump(plain))
        replace_text(folder / PROVENANCE, json.dumps(_provenance(config, total_steps), indent=2) + "\n")
        yield folder


def _new_folder(first: Path) -> Path:
    """Create and return `first`, or the first of `first`-2, `first`-3 and so on that does not exist."""
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = first if number == 1 else Path(f"{first}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # another run may have created it just now
            continue
        return folder
    raise AssertionError("there is always one more number")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock `folder` against other runs. The lock ends with the process, however that ends. Raises UserError."""
    with open(folder / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output_dir={folder} is being written by another run; wait for its end, or choose another output_dir"
            ) from None
        except OSError:
            pass  # a network file system without locks: another run cannot be noticed
        yield


def _provenance(config: Config, total_steps: int | None) -> dict:
    packages = ("isoloss", "torch", "megatron-core", "transformers", "numpy")
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    layout = config.parallel.layout().with_world(dist.get_world_size())
    return {
        "command": sys.argv,
        "config_files": recorded_files(),  # the SHA-256 of each, by path
        "layout": str(layout),
        "world_size": layout.world_size,
        "layers": transformer_engine.description(config.model.transformer_engine),
        "attention": flash_attention.description(config.kernels.attention, config.train.precision),
        "optimizer": OPTIMIZER,
        "device": device.describe(layout.world_size),
        "total_steps": total_steps,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
        "environment": environment.added(),  # without variables that the user had set
        "git_revision": git.stdout.strip() or None,
    }
