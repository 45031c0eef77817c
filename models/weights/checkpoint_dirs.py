"""The folders in which Megatron-LM and Megatron-Bridge keep checkpoints: which one of them a path means.

A run of theirs has a folder with `iter_0000100`, `iter_0000200` and so on in it, and a tracker, a file that names the
newest one that is whole. What they convert from elsewhere may stand in `release` instead.
Source: Megatron-LM, megatron/training/checkpointing.py; Megatron-Bridge, training/utils/checkpoint_utils.py.
"""

import re
from pathlib import Path

from isoloss.models.weights.distcp import METADATA, is_checkpoint
from isoloss.parallel.runtime.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def checkpoint_folder(path: str | Path) -> Path:
    """The checkpoint that `path` means: the one that its tracker names, or `path` itself where it has none.

    Raises UserError where the tracker names none that is there, or it is of a format that is not read.
    """
    path = Path(path)
    if is_checkpoint(path) or not path.is_dir():
        return path
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
    return folder


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
    """What to do instead."""
    names = [name for name in _iterations(path) if name != but]
    return f"give {path / names[-1]}" if names else "copy it again"


def _iterations(path: Path) -> list[str]:
    """Of the checkpoints in a folder, the newest last."""
    found = [each.name for each in path.glob("iter_[0-9]*") if is_checkpoint(each)]
    return sorted(found, key=lambda name: (len(name), name))
