"""Checkpoints through Megatron's dist_checkpointing: any layout loads what any other saved; whole or not there."""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.storage import WriteResult

from isoloss.engine.checkpoint import reader
from isoloss.engine.checkpoint.optimizer_state import complete_state
from isoloss.engine.checkpoint.writer import HostCopies, Share
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import HUGGINGFACE
from isoloss.models.model import Model
from isoloss.models.weights import hf_checkpoint, manifest, pickle_check
from isoloss.models.weights.checkpoint_dirs import folders, newest_first, step_of
from isoloss.models.weights.checkpoint_names import native_style
from isoloss.models.weights.distcp import Folder
from isoloss.models.weights.manifest import DamagedError
from isoloss.models.weights.side_files import SideFiles
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects

STEP_FOLDER = "step_{:08d}"
_LEFTOVER = re.compile(r"\.step_([0-9]+)\.(old|partial)")
Result = TypeVar("Result")


class NotWrittenError(UserError):
    """A checkpoint could not be written: the disk is full, broken or read-only. Nothing of it is left."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint that this rank holds its share of, and that is not on the disk yet.

    It has the form that the converter writes: weights under Megatron-Core's names, a manifest with checksums, and
    config.json, tokenizer and the like in the folder HUGGINGFACE. Nothing in training reads a global random state
    (dropout is 0, the data order is a function of seed and step), so weights, optimizer state and `extra` are all that
    a run needs to go on exactly.
    """

    folder: Path
    share: Share
    side_files: SideFiles
    stop_token_ids: tuple[int, ...]
    arch: Architecture
    dtype: torch.dtype

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write `folder`: under a temporary name, synced to disk, then renamed at once.

        group: every rank of the world; None: the world's own, which nothing else may use meanwhile. Collective over it.
        Raises NotWrittenError, on every rank, where the disk of one refuses.
        """
        partial = _partial(self.folder)
        try:
            told = _together(self.folder, lambda: (self.share.write(), self.share.records), group)
            _together(self.folder, lambda: self._complete(partial, told) if dist.get_rank() == 0 else None, group)
        except NotWrittenError:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete what is there of it under its temporary name."""
        if dist.get_rank() == 0:
            shutil.rmtree(_partial(self.folder), ignore_errors=True)

    def _complete(
        self, partial: Path, told: Sequence[tuple[list[WriteResult], Mapping[str, manifest.FileRecord]]]
    ) -> None:
        """What rank 0 adds. told: by every rank, what it wrote where, with size and checksum of the files."""
        self.share.complete([written for written, _ in told])
        self.side_files.write(partial / HUGGINGFACE, self.arch, self.stop_token_ids)
        records = {name: record for _, of_rank in told for name, record in of_rank.items()} | _small_files(partial)
        (partial / manifest.NAME).write_text(self._describe(partial, records).to_json(), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            manifest.sync(path)
        partial.rename(self.folder)
        manifest.sync(self.folder.parent)

    def _describe(self, partial: Path, records: Mapping[str, manifest.FileRecord]) -> manifest.Manifest:
        return manifest.Manifest(
            kind="trained",
            family=self.arch.family,
            vocab_size=self.arch.vocab_size,
            key_style=native_style(self.arch),
            dtypes=(str(self.dtype).removeprefix("torch."),),
            num_tensors=len(Folder(partial).tensors),
            files=records,
        )


def stage(
    folder: Path,
    model: Model,
    optimizer: ChainedOptimizer,
    side_files: SideFiles,
    extra: Mapping[str, object],
    copies: HostCopies | None = None,
    stop_token_ids: Sequence[int] = (),
) -> Staged:
    """Take a checkpoint to host memory. With `copies` training may go on before it is written.

    Raises UserError where `folder` exists, NotWrittenError, on every rank, where it cannot be made. Collective over the
    world.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; choose another folder for this checkpoint, or delete it")
    partial = _partial(folder)
    _together(folder, lambda: _make_anew(partial) if dist.get_rank() == 0 else None, None)
    state = _state(model, optimizer, extra, is_loading=False)
    share = Share(partial, state, model.mesh.dp_context, copies)
    return Staged(folder, share, side_files, tuple(stop_token_ids), model.arch, model.dtype)


def load(folder: Path, model: Model, optimizer: ChainedOptimizer) -> dict[str, object]:
    """Load weights and optimizer state into this layout; returns `extra`. Collective over the world.

    Raises DamagedError, on every rank and before anything is loaded, where a file is damaged.
    """
    common, tensors = verify(folder)
    wanted = _state(model, optimizer, {}, is_loading=True)
    with reader.reading(tensors):
        state: Any = dist_checkpointing.load(wanted, str(folder), common_strategy=reader.Common(common))
    for index, module in enumerate(model.modules):
        module.load_state_dict(
            state[f"model{index}"] | {key: None for key in module.state_dict() if _is_extra_state(key)}
        )
    whole = state["optimizer"]
    for part in [whole] if "optimizer" in whole or "state" in whole else whole.values():  # one, or dense and experts
        for level in (part, part.get("optimizer", {})):
            if "state" in level:  # not with the distributed optimizer; Megatron leaves a step count of 0 out
                level["state"].setdefault("common_step", torch.zeros(()))
    optimizer.load_state_dict(state["optimizer"])
    complete_state(optimizer)
    return state["extra"]


def read_extra(folder: Path) -> dict[str, object]:
    """The `extra` of a complete checkpoint, without its tensors. Enters no collective and needs no process group.

    Raises DamagedError where the file that holds it is.
    """
    manifest.check_checksums(folder, manifest.read(folder), [pickle_check.COMMON])
    return pickle_check.read_common(folder).get("extra", {})


def newest_whole(
    checkpoints: Path, read: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any], dict[Path, DamagedError]] | None:
    """The newest checkpoint of a run that `read` (`load` or `read_extra`) finds whole, what it gave, and what is wrong
    with those that are newer; None where the run has saved nothing. Enters the collectives of `read`.

    Raises DamagedError where none is whole.
    """
    damaged: dict[Path, DamagedError] = {}
    for folder in newest_first(checkpoints):
        try:
            return folder, read(folder), damaged
        except DamagedError as problem:
            damaged[folder] = problem
    if damaged:
        raise DamagedError(
            f"none of the {len(damaged)} checkpoint(s) in {checkpoints} is whole, so the run cannot go on: "
            f"{next(iter(damaged.values()))}, or delete all to start anew"
        )
    return None


def set_aside(folder: Path) -> Path:
    """Keep a damaged checkpoint under a name that no run takes for one; returns it. One of this name is replaced."""
    kept = folder.with_name(f"damaged_{folder.name}")
    shutil.rmtree(kept, ignore_errors=True)
    folder.rename(kept)
    return kept


def prune(written: Path, keep: int) -> None:
    """Delete all but the newest `keep` of the checkpoint just written and older ones, and what a killed run left
    behind. One of a later step than `written` is another run's, and stays. Rank 0 only."""
    for leftover in folders(written.parent, _LEFTOVER):
        shutil.rmtree(leftover)
    until = [path for path in newest_first(written.parent) if step_of(path) <= step_of(written) and path != written]
    for path in until[keep - 1 :]:
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)  # a half-deleted folder must not look like a checkpoint
        shutil.rmtree(doomed)


def export_hf(folder: Path, model: Model, own_dtypes: Mapping[str, torch.dtype]) -> None:
    """Write safetensors with the Hugging Face names of a text model; each rank that holds weights that no other does
    writes its own.

    own_dtypes: of tensors that are not written in config.json's type, by name.
    Collective over the world.
    """
    arch = model.arch.text_only()
    tensors = model.hf_tensors(arch.torch_dtype, arch, own_dtypes)
    mine = ((name, tensor.cpu()) for name, tensor, write in tensors if write)
    entries = hf_checkpoint.write_shards(folder, f"stage{model.mesh.pp.rank():03d}-rank{dist.get_rank():05d}", mine)
    entries_of_ranks = gather_objects(entries)
    if dist.get_rank() == 0:
        hf_checkpoint.finish(folder, [entry for entry in entries_of_ranks if entry])
    dist.barrier()


def _state(model: Model, optimizer: ChainedOptimizer, extra: Mapping[str, object], *, is_loading: bool) -> dict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": model.mesh.dp_context,
    }
    models: dict[str, Any] = {
        f"model{index}": module.sharded_state_dict(metadata=metadata) for index, module in enumerate(model.modules)
    }
    optimizer_state = optimizer.sharded_state_dict(models.copy(), is_loading, metadata=metadata)
    if not is_loading:
        return {**models, "optimizer": optimizer_state, "extra": dict(extra)}
    # Which modules have an extra state depends on the layer spec; without fp8 there is nothing in it.
    models = {
        name: {key: value for key, value in model.items() if not _is_extra_state(key)} for name, model in models.items()
    }
    return {**models, "optimizer": optimizer_state}


def _is_extra_state(key: str) -> bool:
    return pickle_check.EXTRA_STATE in key


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _small_files(folder: Path) -> dict[str, manifest.FileRecord]:
    """Size and checksum of the files beside those of tensors, whose writers noted theirs."""
    small = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp"]
    return {
        path.relative_to(folder).as_posix(): manifest.FileRecord(path.stat().st_size, manifest.crc32(path))
        for path in small
    }


def _together(folder: Path, act: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """act() on this rank; returns what it gave on every rank. One all-gather over the group.

    Raises NotWrittenError of `folder`, on every rank, where the disk of one refused.
    """
    mine: Any = None
    problem = None
    try:
        mine = act()
    except OSError as error:
        problem = error.strerror or str(error)
    outcomes = gather_objects((mine, problem), group)
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise NotWrittenError(
                f"checkpoint {folder} could not be written ({problem}, on rank {rank}): make room for it, or mend the "
                "disk; the run goes on from the one before with checkpoint.resume=true"
            )
    return [result for result, _ in outcomes]


def verify(folder: Path) -> tuple[dict[str, Any], Folder]:
    """That every file holds what was written, of which the ranks share the reading; returns what was read of it: what
    is no tensor, and where the tensors are. Nothing of it was run, and loading must read neither again.
    Raises DamagedError, or UserError, on every rank.

    Collective over the world: one all-gather.
    """
    problem: UserError | None = None
    found: Any = None
    try:
        written = manifest.read(folder)
        names = sorted(written.files)[dist.get_rank() :: dist.get_world_size()]
        manifest.check_checksums(folder, written, names)
        found = pickle_check.read_common(folder), pickle_check.read_tensors(folder)
    except UserError as error:
        problem = error
    for told in gather_objects(problem):
        if told:
            raise told
    return found
