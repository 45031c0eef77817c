"""The folder that a run writes: its name, what must hold before anything is written, and where it came from."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
import yaml

from isoloss.engine import checkpoint
from isoloss.engine.config import Config
from isoloss.engine.optimizer import OPTIMIZER
from isoloss.models import manifest, transformer_engine
from isoloss.models.registry import read_architecture
from isoloss.parallel import UserError, device


def check_output(config: Config, run_name: str) -> None:
    """Refuse, before anything is written, a folder that cannot take this run. Enters no collective.

    That is one that is not a folder, one that the user named and that holds another run, and, with checkpoint.resume,
    one whose newest checkpoint belongs to a run with other data or state.
    """
    folder = run_folder(config, run_name)
    check_writable(folder, "output_dir")
    check_writable(cache_folder(config), "data.cache_dir")
    if config.checkpoint.resume:
        check_resume(config, folder / "checkpoints")
    elif config.output_dir and holds_run(folder):
        raise UserError(
            f"output_dir={folder} holds a run already; choose another, or set checkpoint.resume=true to go on with it"
        )


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be created or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{key}={folder} cannot be a folder: {there} is a file; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}={folder} cannot be written: no permission in {there}; choose another path")


def check_resume(config: Config, checkpoints: Path) -> None:
    """Refuse to go on from a checkpoint of a run that differs in what `identity` names."""
    newest = checkpoint.latest(checkpoints)
    if newest is None:
        # Our own checkpoints are whole or not there, so somebody copied or deleted a part of these.
        broken = sorted(checkpoints.glob("step_*"))
        if broken:
            raise UserError(
                f"checkpoint {broken[-1]} is not complete (no {manifest.NAME}): copy it again, or delete it to start "
                "anew"
            )
        return
    extra = checkpoint.read_extra(newest)
    for key, now in identity(config).items():
        if key not in extra:
            raise UserError(f"checkpoint {newest} was not written by this recipe (no {key}); choose another output_dir")
        if extra[key] != now:
            raise UserError(
                f"{key}={now!r} differs from the {extra[key]!r} of {newest}, so this would be another run; "
                "set it back, or start a new run in another output_dir"
            )


def identity(config: Config) -> dict[str, object]:
    """What must not change when a run goes on: the model, and `config.identity`."""
    arch = repr(read_architecture(config.model.path))
    digest = hashlib.sha256(arch.encode()).hexdigest()[:12]
    return {"architecture of model.path, as a digest,": digest, **config.identity()}


def run_folder(config: Config, run_name: str) -> Path:
    """The run's folder, before it is numbered."""
    return Path(config.output_dir or f"runs/{run_name}")


def cache_folder(config: Config) -> Path:
    """Where tokenized rows are kept: several runs side by side share it."""
    parent = Path(config.output_dir).parent if config.output_dir else Path("runs")
    return Path(config.data.cache_dir) if config.data.cache_dir else parent / ".cache"


def holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def open_output(config: Config, run_name: str) -> Path:
    """The run's folder, created by rank 0 with config.yaml and run.json in it. One broadcast over the world.

    The default is runs/<run_name>, numbered if it exists and checkpoint.resume is off.
    """
    answer: list[Path | None] = [None]
    if dist.get_rank() == 0:
        answer[0] = _create_output(config, run_name)
    dist.broadcast_object_list(answer, src=0)
    assert answer[0] is not None
    return answer[0]


def _create_output(config: Config, run_name: str) -> Path:
    folder = run_folder(config, run_name)
    if not config.checkpoint.resume and holds_run(folder):
        number = 2
        while Path(f"{folder}-{number}").exists():
            number += 1
        folder = Path(f"{folder}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    resolved = dataclasses.replace(config, output_dir=str(folder))
    (folder / "config.yaml").write_text(yaml.safe_dump(_plain(resolved), sort_keys=False))
    (folder / "run.json").write_text(json.dumps(_provenance(config), indent=2) + "\n")
    return folder


def _plain(config: Config) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(config)))


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
        "optimizer": OPTIMIZER,
        "device": device.describe(layout.world_size),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "git_revision": git.stdout.strip() or None,
    }
