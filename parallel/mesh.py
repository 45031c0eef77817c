"""The mesh of named process groups; the only module that touches `megatron.core.parallel_state`."""

import math
from dataclasses import dataclass
from typing import Any

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
    ulysses: dist.ProcessGroup  # neighbours, which exchange heads for sequence shards
    ring: dist.ProcessGroup  # the ranks round which keys and values are passed
    context: dist.ProcessGroup  # ulysses x ring: the ranks that share one packed row
    dp: dist.ProcessGroup  # the ranks with the same shard of other samples: loss counts are reduced here
    dp_context: dist.ProcessGroup  # dense gradients and losses are summed here
    stage: dist.ProcessGroup  # tp x pp: the ranks that hold the distinct parameters of one replica
    ep: dist.ProcessGroup  # the ranks that divide the experts of a layer among them
    etp: dist.ProcessGroup  # the ranks that divide each expert's matrices
    expert_dp: dist.ProcessGroup  # the ranks that hold the same part of the same experts: their gradients' sum
    megatron: ProcessGroupCollection
    cp_kernel: str = "isoloss"  # who exchanges tokens inside attention

    @classmethod
    def create(cls, layout: Layout, cp_kernel: str = "isoloss") -> "Mesh":
        """Create the groups; `torch.distributed` is initialised and has `layout.world_size` ranks.

        Collective over the world. A previous mesh of this process is replaced, and its groups destroyed.
        """
        if layout.world_size != dist.get_world_size():
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {dist.get_world_size()}")
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
        grid: Any = parallel_state.get_hierarchical_context_parallel_groups()  # from the innermost
        return cls(
            layout=layout,
            tp=tp,
            pp=pp,
            ulysses=_one(grid[0]),
            ring=_one(grid[1]),
            context=_one(parallel_state.get_context_parallel_group()),
            dp=_one(parallel_state.get_data_parallel_group()),
            dp_context=_one(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            # Only scalars are summed over it: no communicator, with buffers, where another has the same ranks.
            stage=tp if layout.pp == 1 else pp if layout.tp == 1 else _one(parallel_state.get_model_parallel_group()),
            ep=_one(parallel_state.get_expert_model_parallel_group()),
            etp=_one(parallel_state.get_expert_tensor_parallel_group()),
            expert_dp=_one(parallel_state.get_expert_data_parallel_group()),
            megatron=ProcessGroupCollection.use_mpu_process_groups(),
            cp_kernel=cp_kernel,
        )

    def is_first_stage(self, chunk: int) -> bool:
        """Whether model chunk `chunk` of this rank holds the embedding."""
        return self.pp.rank() == 0 and chunk == 0

    def is_last_stage(self, chunk: int) -> bool:
        """Whether model chunk `chunk` of this rank computes the loss."""
        return self.pp.rank() == self.layout.pp - 1 and chunk == self.layout.vpp - 1

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which something of the loss is summed, or gathered, one after the other: those that have more
        than one rank. Both also carry more than scalars."""
        return [group for group in (self.dp_context, self.pp) if group.size() > 1]

    @property
    def document_multiple(self) -> int:
        """Each document of a packed row is padded to a multiple of this: Transformer Engine's kernels cut it into two
        chunks of one size for every context rank."""
        return 1 if self.cp_kernel == "isoloss" or self.layout.context == 1 else 2 * self.layout.context

    @property
    def row_multiple(self) -> int:
        """A packed row is padded to a multiple of this, so that every shard of it has the same length."""
        shards = self.layout.context * (self.layout.tp if self.layout.sequence_parallel else 1)
        return math.lcm(shards, self.document_multiple)


def _one(group) -> dist.ProcessGroup:
    """Megatron types its groups as one, several or an int; in this mesh each axis is one."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def reuse_world_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The world's own group where `group` has all its ranks in their order: on GPUs a second one would be a second
    communicator. For scalars: what is large overlaps with others in a group of its own."""
    world = dist.group.WORLD
    return world if world and dist.get_process_group_ranks(group) == list(range(world.size())) else group


def destroy() -> None:
    """Destroy the groups of the present mesh, if there is one; the world group stays."""
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not world]:
        dist.destroy_process_group(group)
