"""The folder of a run: its name, what must hold before anything is written, and where the run came from."""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import yaml

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.config.schema import Config
from isoloss.engine.data.chat_template import asks_for_the_date
from isoloss.engine.instruments.files import replace_text
from isoloss.engine.run.records import CONFIG, METRICS, PROVENANCE
from isoloss.engine.step.optimizer import OPTIMIZER
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.models.mcore import transformer_engine
from isoloss.parallel import UserError
from isoloss.parallel.ops import flash_attention
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime import device, environment
from isoloss.parallel.runtime.versions import version_of

DATE_KEY = "data.date"  # in a checkpoint
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Of something besides the configuration that must stay the same when a run goes on.

    of: its name in messages and checkpoints.
    value: a digest or a short text.
    decided_by: what the user can set back.
    """

    of: str
    value: str
    decided_by: str


def check_folder(config: Config, run_name: str, arch: Architecture) -> None:
    """Refuse, before anything is written, a folder that cannot take this run. Enters no collective.

    That is one that is not a folder, one that the user named and that holds another run, and, with checkpoint.resume,
    one whose newest checkpoint belongs to a run with other data or state.
    """
    folder = run_folder(config, run_name)
    check_writable(folder, "output_dir")
    check_writable(cache_folder(config), "data.cache_dir")
    if profiled := config.train.profiled(None):
        check_writable(profiled[1], "train.profile")
    if config.checkpoint.resume:
        check_resume(config, folder / "checkpoints", arch)
    check_free(config, folder)


def check_free(config: Config, folder: Path) -> None:
    """Refuse a folder that the user named and that holds another run."""
    if config.output_dir and not config.checkpoint.resume and (folder / METRICS).exists():
        raise UserError(
            f"output_dir={folder} holds a run already; choose another, or set checkpoint.resume=true to go on with it"
        )


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be created or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{key}={folder} cannot be a folder: {there} is a file; choose another path")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".isoloss-", dir=there))  # some folders, /proc among them, refuse it to all
    except OSError as error:
        why = f"no permission in {there}" if isinstance(error, PermissionError) else f"{there}: {error.strerror}"
        raise UserError(f"{key}={folder} cannot be written: {why}; choose another path") from None


def check_resume(config: Config, checkpoints: Path, arch: Architecture) -> None:
    """Refuse to go on from a checkpoint of a run that differs in its `resume_fingerprint`."""
    found = checkpoint.newest_whole(checkpoints, checkpoint.read_extra)
    if found is None:
        return
    newest, extra, _ = found
    for key, now in resume_fingerprint(config, arch).items():
        if recorded(extra, key, newest) != now:
            raise UserError(
                f"{key}={now!r} differs from the {extra[key]!r} of {newest}, so this would be another run; "
                "set it back, or start a new run in another output_dir"
            )


def check_fingerprints(config: Config, run_name: str, fingerprints: Sequence[Fingerprint]) -> None:
    """As `check_resume`, of what is in the files that the configuration names. Enters no collective."""
    folder = run_folder(config, run_name) / "checkpoints"
    found = checkpoint.newest_whole(folder, checkpoint.read_extra) if config.checkpoint.resume else None
    if found is None:
        return
    newest, extra, _ = found
    for now in fingerprints:
        before = recorded(extra, now.of, newest)
        if before != now.value:
            raise UserError(
                f"{now.of} is not what {newest} was trained with (fingerprint {now.value}, then {before}), so this "
                f"would be another run: {now.decided_by} differs; set it back, or start a new run in another output_dir"
            )


def with_date(config: AnyConfig, run_name: str) -> AnyConfig:
    """The configuration with a data.date, where a chat template asks for one: that of the checkpoint which the run goes
    on from, or today's. Enters no collective."""
    if config.data.date is not None or not asks_for_the_date(tokenizer_folder(config)):
        return config
    folder = run_folder(config, run_name) / "checkpoints"
    found = checkpoint.newest_whole(folder, checkpoint.read_extra) if config.checkpoint.resume else None
    day = found[1].get(DATE_KEY) if found else None
    return dataclasses.replace(config, data=dataclasses.replace(config.data, date=day or str(date.today())))


def recorded(extra: Mapping[str, object], key: str, newest: Path) -> object:
    """What a checkpoint tells of `key`. Raises UserError where it tells nothing: nobody knows if it is the same run."""
    if key not in extra:
        raise UserError(
            f"checkpoint {newest} does not tell {key}: another recipe, or an earlier isoloss, wrote it; go on with "
            f"that one, or start a new run from its weights with model.path={newest} in another output_dir"
        )
    return extra[key]


def resume_fingerprint(config: Config, arch: Architecture) -> dict[str, object]:
    """What must not change when a run goes on: the model, and what the configuration names."""
    digest = hashlib.sha256(repr(arch).encode()).hexdigest()[:12]
    return {"architecture of model.path, as a digest,": digest, **config.resume_fingerprint()}


def settings(config: Config) -> dict[str, object]:
    """What a run learns by and may go on with otherwise, by key: plain values, as a checkpoint holds them."""
    groups = {name: getattr(config, name, None) for name in ("optim", "loss", "moe", "algorithm")}
    values = {
        f"{name}.{key}": value
        for name, group in groups.items()
        if group is not None
        for key, value in dataclasses.asdict(group).items()
    }
    plain: dict[str, object] = json.loads(json.dumps(values | {"train.steps": config.train.steps}))
    return plain


def settings_told(config: Config, before: Mapping[str, object]) -> list[str]:
    """A line where `settings` are others than those of a checkpoint. before: none of a checkpoint without them."""
    now = settings(config)
    changed = [f"{key} is {now[key]}, was {before[key]}" for key in now if key in before and now[key] != before[key]]
    return [f"changed since that checkpoint: {'; '.join(changed)}"] if changed else []


def run_folder(config: Config, run_name: str) -> Path:
    """The run's folder, before it is numbered."""
    return Path(config.output_dir or f"runs/{run_name}")


def tokenizer_folder(config: Config) -> Path:
    """The folder of tokenizer and chat templates: of model.tokenizer, or else of the model."""
    return hf_folder(config.model.tokenizer or config.model.path)


def cache_folder(config: Config) -> Path:
    """Where tokenized rows are kept: several runs side by side share it."""
    parent = Path(config.output_dir).parent if config.output_dir else Path("runs")
    return Path(config.data.cache_dir) if config.data.cache_dir else parent / ".cache"


@contextlib.contextmanager
def open_folder(config: Config, run_name: str) -> Iterator[Path]:
    """The run's folder, created by rank 0 with config.yaml and run.json in it, for this run alone until the end.

    The default is runs/<run_name>, numbered if it exists and checkpoint.resume is off. Raises UserError, on every rank,
    where another run writes the folder now. One broadcast over the world.
    """
    with contextlib.ExitStack() as stack:
        answer: list[Path | UserError | None] = [None]
        if is_main():
            try:
                answer[0] = stack.enter_context(_claim(config, run_name))
            except UserError as error:
                answer[0] = error
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], UserError):
            raise answer[0]
        assert answer[0] is not None
        yield answer[0]


@contextlib.contextmanager
def _claim(config: Config, run_name: str) -> Iterator[Path]:
    folder = run_folder(config, run_name)
    if config.output_dir or config.checkpoint.resume:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = _new_folder(folder)
    with _alone(folder):
        check_free(config, folder)  # once more: a run may have begun and ended here since
        resolved = dataclasses.replace(config, output_dir=str(folder))
        plain = json.loads(json.dumps(dataclasses.asdict(resolved)))  # tuples become lists
        replace_text(folder / CONFIG, yaml.safe_dump(plain, sort_keys=False))
        replace_text(folder / PROVENANCE, json.dumps(_provenance(config), indent=2) + "\n")
        yield folder


def _new_folder(first: Path) -> Path:
    """`first`, or `first`-2 and so on: the first name that no folder has. Of two runs at once only one makes it."""
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = first if number == 1 else Path(f"{first}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always one more number")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other run writes `folder` meanwhile. The lock goes with the process, however that ends."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output_dir={folder} is being written by another run; wait for its end, or choose another output_dir"
            ) from None
        except OSError:
            pass  # a network file system that has no locks: then nobody knows of the other
        yield


def _provenance(config: Config) -> dict:
    packages = ("isoloss", "torch", "megatron-core", "transformers", "numpy")
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    layout = config.parallel.layout().with_world(dist.get_world_size())
    return {
        "command": sys.argv,
        "layout": str(layout),
        "world_size": layout.world_size,
        "layers": transformer_engine.description(config.model.transformer_engine),
        "attention": flash_attention.description(config.kernels.attention, config.train.precision),
        "optimizer": OPTIMIZER,
        "device": device.describe(layout.world_size),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
        "environment": environment.added(),  # besides what the user had set
        "git_revision": git.stdout.strip() or None,
    }
