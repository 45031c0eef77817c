"""The folders in which isoloss, Megatron-LM and Megatron-Bridge keep checkpoints: which one of them a path means.

A run of isoloss has a folder `checkpoints`, with `step_00000100`, `step_00000200` and so on in it, and once it is done
`hf`, a model for transformers. A run of the others has a folder with `iter_0000100`, `iter_0000200` and so on in it,
and a tracker, a file that names the newest one that is whole. What they convert from elsewhere may stand in `release`
instead.
Source: Megatron-LM, megatron/training/checkpointing.py; Megatron-Bridge, training/utils/checkpoint_utils.py.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from isoloss.models.weights import manifest
from isoloss.models.weights.distcp import METADATA, is_checkpoint
from isoloss.parallel.runtime.errors import UserError

CHECKPOINTS, EXPORT = "checkpoints", "hf"
_STEP = re.compile(r"step_([0-9]+)")
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def checkpoint_folder(path: str | Path) -> Path:
    """The checkpoint that `path` means: the newest of a run, or `path` itself where it is no folder of a run. Of a run
    of isoloss without checkpoints it is the model for transformers that the run wrote.

    Raises UserError where the newest one is not whole or not there, or it is of a format that is not read.
    """
    path = Path(path)
    if is_checkpoint(path) or not path.is_dir():
        return path
    if not (path / "config.json").is_file() and (steps := newest_first(path) or newest_first(path / CHECKPOINTS)):
        return _whole(steps)
    folder = _newest(path) if (path / TRACKER).is_file() else path
    if any(folder.glob("mp_rank_[0-9][0-9]*")):
        raise UserError(
            f"{folder} is in Megatron-LM's legacy format (mp_rank_00/...), of which nothing is read; let Megatron-LM "
            "write it anew: its training command with --auto-detect-ckpt-format --ckpt-convert-format torch_dist "
            "--ckpt-convert-save DIR"
        )
    if folder != path and not is_checkpoint(folder):
        raise UserError(
            f"{folder}, which {TRACKER} names, has no {METADATA}: it is not a torch_dist checkpoint, or not whole; "
            f"{_others(path, but=folder.name)}"
        )
    if folder == path and _iterations(path) and not (path / "config.json").is_file():
        raise UserError(f"{path} has no {TRACKER} that says which of its checkpoints is meant; {_others(path)}")
    return export_of(path) if folder == path else folder


def export_of(path: str | Path) -> Path:
    """The model for transformers that the run of isoloss in `path` wrote, or `path` itself where there is none."""
    path = Path(path)
    if (path / "config.json").is_file() or not (path / EXPORT / "config.json").is_file():
        return path
    return path / EXPORT


def newest_first(checkpoints: Path) -> list[Path]:
    """The checkpoints in the folder `checkpoints` of a run, the newest first, whole or not.

    A checkpoint is a folder with the name of a step, and no link: everything else there belongs to the user.
    """
    return sorted(folders(checkpoints, _STEP), key=step_of, reverse=True)


def folders(where: Path, names: re.Pattern[str]) -> list[Path]:
    """The folders of these names, no links."""
    found = where.iterdir() if where.is_dir() else ()
    return [path for path in found if names.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _whole(steps: Sequence[Path]) -> Path:
    """The newest of some checkpoints of isoloss. Raises UserError where it is not whole: an older one is not what was
    asked for."""
    whole = [path for path in steps if is_checkpoint(path) and (path / manifest.NAME).is_file()]
    if steps[0] not in whole:
        raise UserError(
            f"{steps[0]} is the newest checkpoint of its run, and is not complete; "
            + (f"give {whole[0]}, which is" if whole else "copy it again")
        )
    return steps[0]


def _newest(path: Path) -> Path:
    tracker = path / TRACKER
    said = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if said != RELEASE and not re.fullmatch(r"[0-9]{1,18}", said):
        raise UserError(
            f"{tracker} holds {said[:40]!r} where the number of an iteration should stand, or {RELEASE!r}; "
            f"{_others(path)}"
        )
    folder = path / (said if said == RELEASE else f"iter_{int(said):07d}")
    if not folder.is_dir():
        raise UserError(f"{tracker} names {folder.name}, which is not there; {_others(path, but=folder.name)}")
    return folder


def _others(path: Path, but: str = "") -> str:
    """Return the advice to give another checkpoint of the run, or to copy this one again."""
    names = [name for name in _iterations(path) if name != but]
    return f"give {path / names[-1]}" if names else "copy it again"


def _iterations(path: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest last."""
    found = [each.name for each in path.glob("iter_[0-9]*") if is_checkpoint(each)]
    return sorted(found, key=lambda name: (len(name), name))
