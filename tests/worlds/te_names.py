"""Load a checkpoint into Megatron-Core's model of its Transformer Engine spec, on a stand-in for Transformer Engine.

    python te_names.py CHECKPOINT FOLDER

CHECKPOINT was made from the Hugging Face folder FOLDER. Prints as JSON how many tensors and empty objects were loaded,
and the keys of those that are not what the folder holds. A process of its own, because the stand-in has to be there
before Megatron-Core is imported. Its modules have an `_extra_state`, as the real ones do.
"""

import json
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1] / "oracles" / "mbridge"), str(Path(__file__).parents[1])]
import te_stub  # noqa: E402


class Linear(te_stub.Linear):
    def __init__(self, *args, parallel_mode, **options):
        super().__init__(*args, parallel_mode=parallel_mode, **options)
        self.parallel_mode = parallel_mode


te_stub.Linear = Linear
te_stub.install()
for module in (te_stub.RMSNorm, Linear, te_stub.LayerNormLinear, te_stub.GroupedLinear, te_stub.DotProductAttention):
    module.get_extra_state = lambda self: None
    module.set_extra_state = lambda self, state: None
    module.fp8_meta, module.fp8, module.fp8_calibration = {"fp8_checkpoint": False}, False, False

import torch  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories  # noqa: E402

from isoloss.models.checkpoint_hf import HFReader  # noqa: E402
from isoloss.models.checkpoint_keys import native_style, places  # noqa: E402
from isoloss.models.forms import padded_vocab_size  # noqa: E402
from isoloss.models.registry import read_architecture  # noqa: E402
from isoloss.models.weights import weight_map  # noqa: E402
from isoloss.parallel import Layout, Mesh, launch  # noqa: E402
from worlds import plain_megatron  # noqa: E402


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors of the folder's weights, without padding."""
    arch, reader = read_architecture(folder), HFReader(folder)
    found: dict[str, torch.Tensor] = {}
    for weight in weight_map(arch):
        (place,) = places(weight, arch, native_style(arch))
        found.setdefault(place.key, torch.zeros(*place.axes, *weight.shape))[place.index] = reader.whole(weight)
    return found


def main(checkpoint: Path, folder: Path) -> None:
    launch.init_process_group()
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
    print(json.dumps({"tensors": tensors, "objects": len(objects), "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
