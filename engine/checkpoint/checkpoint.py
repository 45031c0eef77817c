"""Save and load checkpoints by Megatron's dist_checkpointing: complete or absent, and loadable on any layout."""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
from isoloss.parallel import Mesh, UserError
from isoloss.parallel.collectives import gather_objects

STEP_FOLDER = "step_{:08d}"
_LEFTOVER = re.compile(r"\.step_([0-9]+)\.(old|partial)")
Result = TypeVar("Result")


class Holds(Protocol):
    """Describe what a checkpoint holds the weights of: a `Model`, or the `Adapter` of one.

    adapter_record: keys of the adapter and a fingerprint of its model; None for a whole model.
    """

    @property
    def modules(self) -> Sequence[Any]: ...

    @property
    def arch(self) -> Architecture: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def adapter_record(self) -> Mapping[str, Any] | None: ...


class NotWrittenError(UserError):
    """A checkpoint could not be written, as the disk is full, broken or read-only. No part of it is left."""


@dataclass(frozen=True)
class Staged:
    """This rank's share of a checkpoint in host memory, not written yet.

    The checkpoint has the converter's form: weights under Megatron-Core's names, a manifest with checksums, and
    config.json and tokenizer in the folder HUGGINGFACE.
    """

    # There is no random state in it: dropout is 0 and the order of the data is a function of seed and step, so weights,
    # optimizer state and `extra` are all that a resumed run needs to be bit-equal.

    folder: Path
    share: Share
    side_files: SideFiles
    stop_token_ids: tuple[int, ...]
    arch: Architecture
    dtype: torch.dtype
    adapter: Mapping[str, Any] | None

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write `folder` under a temporary name, sync it to disk, and rename it. Collective over `group`.

        group: all ranks of the world; None: the default group, which no other thread may use meanwhile.
        Raises NotWrittenError on every rank if the disk of one rank refuses.
        """
        partial = _partial(self.folder)
        try:
            shares = _together(self.folder, lambda: (self.share.write(), self.share.records), group)
            _together(self.folder, lambda: self._complete(partial, shares) if dist.get_rank() == 0 else None, group)
        except NotWrittenError:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete what was written under the temporary name."""
        if dist.get_rank() == 0:
            shutil.rmtree(_partial(self.folder), ignore_errors=True)

    def _complete(
        self, partial: Path, shares: Sequence[tuple[list[WriteResult], Mapping[str, manifest.FileRecord]]]
    ) -> None:
        """Add the files of rank 0. shares: for every rank where each tensor was written, and records of its files."""
        self.share.complete([written for written, _ in shares])
        self.side_files.write(partial / HUGGINGFACE, self.arch, self.stop_token_ids)
        records = {name: record for _, files in shares for name, record in files.items()} | _small_files(partial)
        (partial / manifest.NAME).write_text(self._describe(partial, records).to_json(), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            manifest.sync(path)
        partial.rename(self.folder)
        manifest.sync(self.folder.parent)

    def _describe(self, partial: Path, records: Mapping[str, manifest.FileRecord]) -> manifest.Manifest:
        return manifest.Manifest(
            kind="trained" if self.adapter is None else "adapter",
            family=self.arch.family,
            vocab_size=self.arch.vocab_size,
            key_style=native_style(self.arch),
            dtypes=(str(self.dtype).removeprefix("torch."),),
            num_tensors=len(Folder(partial).tensors),
            files=records,
            adapter=self.adapter,
        )


def stage(
    folder: Path,
    model: Holds,
    optimizer: ChainedOptimizer,
    side_files: SideFiles,
    extra: Mapping[str, object],
    copies: HostCopies | None = None,
    stop_token_ids: Sequence[int] = (),
) -> Staged:
    """Copy a checkpoint to host memory. With `copies`, training may go on before `Staged.write`.

    extra: further state, in plain containers and tensors. Rank 0's is saved, and other ranks' may differ from it.
    Raises UserError if `folder` exists, and NotWrittenError on every rank if its temporary folder cannot be made.
    Collective over the world.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; choose another folder for this checkpoint, or delete it")
    partial = _partial(folder)
    _together(folder, lambda: _make_anew(partial) if dist.get_rank() == 0 else None, None)
    state = _state(model, optimizer, is_loading=False)
    share = Share(partial, state, extra, model.mesh.dp_context, copies)
    return Staged(folder, share, side_files, tuple(stop_token_ids), model.arch, model.dtype, model.adapter_record)


def load(folder: Path, model: Holds, optimizer: ChainedOptimizer) -> dict[str, object]:
    """Load weights and optimizer state into this layout; return `extra`. Collective over the world.

    Raises on every rank, before anything is loaded, DamagedError if a file is damaged, and UserError for an adapter
    where a whole model is trained, for the reverse, and for another adapter.
    """
    common, tensors = verify(folder)
    _check_adapter(folder, manifest.read(folder).adapter, model.adapter_record)
    wanted = _state(model, optimizer, is_loading=True)
    with reader.reading(tensors):
        state: Any = dist_checkpointing.load(wanted, str(folder), common_strategy=reader.Common(common))
    for index, module in enumerate(model.modules):  # a chunk without adapters has no state
        module.load_state_dict(
            state.get(f"model{index}", {}) | {key: None for key in module.state_dict() if _is_extra_state(key)}
        )
    saved = state["optimizer"]
    for part in [saved] if "optimizer" in saved or "state" in saved else saved.values():  # one, or dense and experts
        for level in (part, part.get("optimizer", {})):
            if "state" in level:  # absent with the distributed optimizer. Megatron leaves out a step count of 0
                level["state"].setdefault("common_step", torch.zeros(()))
    optimizer.load_state_dict(state["optimizer"])
    complete_state(optimizer)
    return state["extra"]


def _check_adapter(folder: Path, saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> None:
    if saved is None:
        if here is None:
            return
        raise UserError(
            f"{folder} holds a whole model, and lora.rank={here['rank']} trains an adapter: set lora.rank=0, or "
            "start a new run in another output_dir"
        )
    if here is None:
        raise UserError(
            f"{folder} holds an adapter, and lora.rank=0 trains a whole model: set lora.rank={saved['rank']}, "
            "or start a new run in another output_dir"
        )
    for name in here:
        if saved.get(name) == here[name]:
            continue
        if name == "base":
            raise UserError(
                f"{folder} holds an adapter of other weights than those of model.path ({saved.get(name)}, not "
                f"{here[name]}): give the model that the adapter was trained on"
            )
        raise UserError(
            f"{folder} holds an adapter with lora.{name}={saved.get(name)}, and here lora.{name} means {here[name]}: "
            "correct the key, or begin anew"
        )


def read_extra(folder: Path) -> dict[str, object]:
    """Read the `extra` of a complete checkpoint, but no tensor. Enters no collective and needs no process group.

    Raises DamagedError if the file that holds `extra` is damaged.
    """
    manifest.check_checksums(folder, manifest.read(folder), [pickle_check.COMMON])
    return pickle_check.read_common(folder).get("extra", {})


def newest_undamaged(
    checkpoints: Path, read: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any], dict[Path, DamagedError]] | None:
    """Return the newest undamaged checkpoint, the result of `read` on it, and the errors of newer, damaged ones.

    read: `load` or `read_extra`; this function enters its collectives.
    Returns None if there is no checkpoint. Raises DamagedError if all are damaged.
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
    """Rename a damaged checkpoint so that no run loads it; return the new path. An older folder there is deleted."""
    aside = folder.with_name(f"damaged_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


def prune(written: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `written`, and partial folders of killed runs. Rank 0 only.

    Checkpoints of later steps than `written` are kept, as they belong to another run.
    """
    for leftover in folders(written.parent, _LEFTOVER):
        shutil.rmtree(leftover)
    until = [path for path in newest_first(written.parent) if step_of(path) <= step_of(written) and path != written]
    for path in until[keep - 1 :]:
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)  # a partly deleted folder must not be taken for a checkpoint
        shutil.rmtree(doomed)


def export_hf(folder: Path, model: Model, own_dtypes: Mapping[str, torch.dtype]) -> None:
    """Write safetensors with the Hugging Face names of a text model. Collective over the world.

    Every rank writes the weights that it owns.
    own_dtypes: types of the tensors, by name, that are not written in config.json's type.
    """
    arch = model.arch.text_only()
    tensors = model.hf_tensors(arch.torch_dtype, arch, own_dtypes)
    owned = ((name, tensor.cpu()) for name, tensor, write in tensors if write)
    entries = hf_checkpoint.write_shards(folder, f"stage{model.mesh.pp.rank():03d}-rank{dist.get_rank():05d}", owned)
    entries_of_ranks = gather_objects(entries)
    if dist.get_rank() == 0:
        hf_checkpoint.finish(folder, [entry for entry in entries_of_ranks if entry])
    dist.barrier()


def _state(model: Holds, optimizer: ChainedOptimizer, *, is_loading: bool) -> dict:
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
        return {**models, "optimizer": optimizer_state}
    # Which modules have an extra state depends on the layer spec. Without fp8 it is empty.
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
    """Return size and checksum of all files but those of tensors, which their writers recorded."""
    small = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp"]
    return {
        path.relative_to(folder).as_posix(): manifest.FileRecord(path.stat().st_size, manifest.crc32(path))
        for path in small
    }


def _together(folder: Path, act: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """Call act() on this rank; return the results of all ranks. One all-gather over the group.

    Raises NotWrittenError, naming `folder`, on every rank if the disk of one refused.
    """
    result: Any = None
    problem = None
    try:
        result = act()
    except OSError as error:
        problem = error.strerror or str(error)
    outcomes = gather_objects((result, problem), group)
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise NotWrittenError(
                f"checkpoint {folder} could not be written ({problem}, on rank {rank}): make room for it, or mend the "
                "disk; the run goes on from the one before with checkpoint.resume=true"
            )
    return [result for result, _ in outcomes]


def verify(folder: Path) -> tuple[dict[str, Any], Folder]:
    """Check the checksums of all files, divided among the ranks; return the common state and the index of the tensors.

    Raises DamagedError or UserError on every rank. Collective over the world: one all-gather.
    """
    problem: UserError | None = None
    contents: Any = None
    try:
        written = manifest.read(folder)
        names = sorted(written.files)[dist.get_rank() :: dist.get_world_size()]
        manifest.check_checksums(folder, written, names, shown=dist.get_rank() == 0)
        # Loading uses these and reads neither file again: a pickle that was checked could be replaced until then.
        contents = pickle_check.read_common(folder), pickle_check.read_tensors(folder)
    except UserError as error:
        problem = error
    for rank_problem in gather_objects(problem):
        if rank_problem:
            raise rank_problem
    return contents
