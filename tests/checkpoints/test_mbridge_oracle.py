"""The weight map against an independent one: what mbridge makes of the same models, bit for bit.

tests/oracles/mbridge holds the models, mbridge's results as hashes, and the script that made them. Embeddings are
compared padded, as `Vocabulary.shard` gives them: mbridge was told to pad to the same multiple.
"""

import json
from pathlib import Path

import pytest
import torch
from oracles.mbridge import tiny_models
from safetensors.torch import load_file

from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.mappings import QKV, GatedMLP
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.checkpoint_names import Style, checkpoint_rows
from isoloss.models.weights.weight_map import weight_map

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ORACLE = json.loads((Path(tiny_models.__file__).parent / "hashes.json").read_text(encoding="utf-8"))


def te_name(weight: Weight, arch: Architecture) -> str:
    """What mbridge calls a weight: the parameter of Transformer Engine's spec, with grouped experts."""
    (place,) = checkpoint_rows(weight, arch, Style.PER_LAYER)
    if weight.expert is None:
        return place.key
    return place.key.replace(".experts.experts.", ".experts.") + str(weight.expert)


def tiny(family, folder):
    """(Weight, its name in the oracle, its Hugging Face tensors) for every weight of the model."""
    tiny_models.write(family, folder)
    arch = read_architecture(folder)
    weights = weight_map(arch)
    tensors = load_file(folder / "model.safetensors")
    assert sorted(part.tensor for weight in weights for part in weight.parts) == sorted(tensors)
    return [(weight, te_name(weight, arch), [tensors[part.tensor] for part in weight.parts]) for weight in weights]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shard_is_mbridges(family, tp, tmp_path):
    ours, shapes = {}, {}
    for weight, name, tensors in tiny(family, tmp_path):
        assert name not in ours
        whole = weight.mapping.merge(tensors)
        shards = [weight.mapping.shard(whole, tp, rank) for rank in range(tp)]
        ours[name] = [tiny_models.sha256(shard) for shard in shards]
        shapes[name] = [*shards[0].shape]
    if tp == 1:
        theirs = {name: [entry["sha256"]] for name, entry in ORACLE["families"][family].items()}
        assert shapes == {name: entry["shape"] for name, entry in ORACLE["families"][family].items()}
    else:
        theirs = ORACLE["tp2"][family]
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hashes_tell_other_orders_apart(family, tmp_path):
    num_controls = {QKV: 0, GatedMLP: 0}
    for weight, name, tensors in tiny(family, tmp_path):
        whole, shards = ORACLE["families"][family][name]["sha256"], ORACLE["tp2"][family][name]
        if isinstance(weight.mapping, QKV):  # one after the other
            assert tiny_models.sha256(torch.cat(tensors)) != whole
        elif isinstance(weight.mapping, GatedMLP):  # exchanged, and split over TP without regard to the halves
            assert tiny_models.sha256(torch.cat(tensors[::-1])) != whole
            assert not {tiny_models.sha256(half) for half in torch.cat(tensors).chunk(2)} & {*shards}
        else:
            continue
        num_controls[type(weight.mapping)] += 1
    assert all(num_controls.values())
