"""The mesh of named process groups. No other module touches `megatron.core.parallel_state`."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from isoloss.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank, by name. Every collective of isoloss takes one of them as an argument."""

    layout: Layout
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    ulysses: dist.ProcessGroup  # neighbours, which exchange tokens for heads
    ring: dist.ProcessGroup  # the ranks that pass keys and values round
    context: dist.ProcessGroup  # ulysses x ring: the ranks that share one packed row
    dp: dist.ProcessGroup  # the ranks with the same shard of other samples: loss counts are summed here
    dp_context: dist.ProcessGroup  # dense gradients and losses are summed here
    stage: dist.ProcessGroup  # tp x pp: the ranks that hold the distinct parameters of one replica
    ep: dist.ProcessGroup  # the ranks that divide the experts of a layer
    etp: dist.ProcessGroup  # the ranks that divide each expert's matrices
    expert_dp: dist.ProcessGroup  # the ranks with the same part of the same experts: expert gradients are summed here
    megatron: ProcessGroupCollection
    cp_kernel: str = "isoloss"  # owner of the exchange of tokens inside attention: isoloss, or Transformer Engine

    @classmethod
    def create(cls, layout: Layout, cp_kernel: str = "isoloss") -> "Mesh":
        """Create the groups, and destroy those of a previous mesh of this process, which then is not `usable`. In a
        world of one rank, take over its groups: one process may hold several models.

        `torch.distributed` must be initialized. Raises ValueError if the world has not `layout.world_size` ranks.
        Collective over the world.
        """
        if layout.world_size != dist.get_world_size():
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {dist.get_world_size()}")
        if layout.world_size > 1 or not _is_alive(parallel_state.get_tensor_model_parallel_group(False)):
            destroy()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.context,
                hierarchical_context_parallel_sizes=[layout.ulysses, layout.ring],
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
        tp, pp = (
            _one(parallel_state.get_tensor_model_parallel_group()),
            _one(parallel_state.get_pipeline_model_parallel_group()),
        )
        grid: Any = parallel_state.get_hierarchical_context_parallel_groups()  # innermost axis first
        return cls(
            layout=layout,
            tp=tp,
            pp=pp,
            ulysses=_one(grid[0]),
            ring=_one(grid[1]),
            context=_one(parallel_state.get_context_parallel_group()),
            dp=_one(parallel_state.get_data_parallel_group()),
            dp_context=_one(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            # Only scalars are summed over this group. A group with the same ranks saves a communicator with buffers.
            stage=tp if layout.pp == 1 else pp if layout.tp == 1 else _one(parallel_state.get_model_parallel_group()),
            ep=_one(parallel_state.get_expert_model_parallel_group()),
            etp=_one(parallel_state.get_expert_tensor_parallel_group()),
            expert_dp=_one(parallel_state.get_expert_data_parallel_group()),
            megatron=ProcessGroupCollection.use_mpu_process_groups(),
            cp_kernel=cp_kernel,
        )

    @property
    def usable(self) -> bool:
        """Return whether the groups of this mesh still exist."""
        return _is_alive(self.tp)

    def is_first_stage(self, chunk: int) -> bool:
        """Return True if model chunk `chunk` of this rank holds the embedding."""
        return self.pp.rank() == 0 and chunk == 0

    def is_last_stage(self, chunk: int) -> bool:
        """Return True if model chunk `chunk` of this rank computes the loss."""
        return self.pp.rank() == self.layout.pp - 1 and chunk == self.layout.vpp - 1

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups, of more than one rank, over which totals of the loss are reduced one after the other.

        The groups also carry tensors, so they are no extra communicators.
        """
        return [group for group in (self.dp_context, self.pp) if group.size() > 1]

    @property
    def document_multiple(self) -> int:
        """Return the number of tokens to a multiple of which each document of a packed row is padded.

        Transformer Engine's kernels cut a document into two chunks of one size for every context rank.
        """
        return 1 if self.cp_kernel == "isoloss" or self.layout.context == 1 else 2 * self.layout.context

    @property
    def row_multiple(self) -> int:
        """Return the number of tokens to a multiple of which a packed row is padded, so that all shards are equal."""
        shards = self.layout.context * (self.layout.tp if self.layout.sequence_parallel else 1)
        return math.lcm(shards, self.document_multiple)


def _is_alive(group: Any) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _one(group) -> dist.ProcessGroup:
    """Narrow Megatron's type of a group, which also allows several groups or an int."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def reuse_world_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the world's group if `group` has all ranks of the world in their order, else `group`.

    On GPUs this saves a second communicator. Use it for scalars: large messages overlap with others in their own group.
    """
    world = dist.group.WORLD
    return world if world and dist.get_process_group_ranks(group) == list(range(world.size())) else group


def make_gather_buffer(tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
    """Make Megatron's buffer for gathered rows, which all layers share from the first one on."""
    parallel_state.get_global_memory_buffer().get_tensor([tokens, 1, hidden_size], dtype, "mpu")


def destroy() -> None:
    """Destroy all groups of this process, those of the present mesh included, except the world group."""
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not world]:
        dist.destroy_process_group(group)
