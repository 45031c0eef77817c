"""Load a checkpoint into Megatron-Core's model of its Transformer Engine spec, on a stand-in for Transformer Engine.

Runs on a rank of `te_pool`: the stand-in has to be there before Megatron-Core is imported.
"""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from support.models import plain_megatron

from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.mappings import padded_vocab_size
from isoloss.models.weights.checkpoint_names import checkpoint_rows, native_style
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout, Mesh


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors of the folder's weights, without padding."""
    arch, reader = read_architecture(folder), HFReader(folder)
    found: dict[str, torch.Tensor] = {}
    for weight in weight_map(arch):
        whole = reader.whole(weight)
        for place in checkpoint_rows(weight, arch, native_style(arch)):
            rows = whole[slice(*place.rows)]
            found.setdefault(place.key, torch.zeros(*place.axes, *rows.shape))[place.index] = rows
    return found


@dataclass(frozen=True)
class Loaded:
    """How many tensors and empty objects were loaded, and the keys of those that are not what the folder holds."""

    tensors: int
    objects: int
    wrong: list[str]


def load(checkpoint: Path, folder: Path) -> Loaded:
    """The checkpoint was made from the Hugging Face folder."""
    arch, mesh = read_architecture(folder), Mesh.create(Layout.parse("dp1"))
    spec = plain_megatron.get_gpt_decoder_block_spec
    with mock.patch.object(
        plain_megatron, "get_gpt_decoder_block_spec", lambda config, **_: spec(config, use_transformer_engine=True)
    ):
        model = plain_megatron.build(arch, mesh, padded_vocab_size(arch.vocab_size, 1))
    metadata = {"dp_cp_group": mesh.dp_context}
    wanted = dict(model.sharded_state_dict(metadata=metadata))
    # The stand-in's parameters are NaN until they are loaded, in place.
    dist_checkpointing.load(dict(wanted), str(checkpoint))
    whole, wrong, tensors = expected(folder), [], 0
    apply_factories(wanted)
    for value in nested_values(wanted):
        if isinstance(value, ShardedTensor):
            tensors += 1
            axes = value.prepend_axis_num
            start = value.global_offset[axes] if len(value.global_offset) > axes else 0
            rows = whole[value.key][value.global_offset[:axes]][start : start + value.local_shape[0]]
            data = value.data.view(value.local_shape)
            if not torch.equal(data[: len(rows)], rows) or data[len(rows) :].any():
                wrong.append(value.key)
    objects = [value.unique_key for value in nested_values(wanted) if isinstance(value, ShardedObject)]
    return Loaded(tensors, len(objects), wrong)
