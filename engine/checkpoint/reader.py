"""Give Megatron's loading what isoloss has read of a checkpoint, in place of files that Megatron would unpickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from isoloss.models.mcore import patches
from isoloss.models.weights import pickle_check
from isoloss.models.weights.distcp import Folder
from isoloss.models.weights.mmap import fetch
from isoloss.parallel import UserError


class Common(TorchCommonLoadStrategy):
    """Returns the contents of `common.pt`, read before, where Megatron would unpickle the file."""

    def __init__(self, common: dict[str, Any]):
        super().__init__()
        self._common = common

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return self._common

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        raise UserError(f"{checkpoint_dir} would have objects unpickled; isoloss loads none")


class TensorReader(StorageReader):
    """Reads the tensors of a checkpoint for torch, without unpickling `.metadata` or the archives of tensors."""

    def __init__(self, folder: Folder):
        super().__init__()
        self._folder = folder
        tensors = folder.tensors.items()
        self._pieces = {(key, piece.offsets): piece for key, tensor in tensors for piece in tensor.pieces}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        return self._folder.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key, offset = item.storage_index.fqn, item.storage_index.offset
            if item.type is not LoadItemType.TENSOR or key not in self._folder.tensors:
                raise UserError(f"{self._folder.path} holds {key} as an object; isoloss loads none")
            stored = self._folder.tensors[key]
            piece = self._pieces[key, tuple(offset or (0,) * len(stored.shape))]
            source = narrow_tensor_by_index(
                self._folder.stored_piece(stored, piece), item.storage_offsets, item.lengths
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(fetch(source, self._folder.path / piece.file))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@contextmanager
def reading(folder: Folder) -> Iterator[None]:
    """Make Megatron load tensors from this folder. Raises UserError on every rank if a rank cannot read a file."""
    try:
        with patches.reader_of_tensors(TensorReader(folder)):
            yield
    except CheckpointException as error:
        problem = pickle_check.problem_of(error)
        if problem is None:
            raise
        raise problem from None
