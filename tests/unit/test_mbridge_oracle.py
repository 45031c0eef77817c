"""The weight map against an independent one: what mbridge makes of the same models, bit for bit.

tests/oracles/mbridge holds the models, mbridge's results as hashes, and the script that made them. Embeddings are
compared padded, as `Vocabulary.shard` gives them: mbridge was told to pad to the same multiple.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from oracles.mbridge import tiny_models
from safetensors.torch import load_file

from isoloss.models.forms import GateUp, Qkv
from isoloss.models.registry import read_architecture
from isoloss.models.weights import weight_map

FAMILIES = ("llama", "qwen2", "qwen3")
ORACLE = json.loads((Path(tiny_models.__file__).parent / "hashes.json").read_text(encoding="utf-8"))


def te_name(name: str, names: Collection[str]) -> str:
    """What the Transformer Engine spec calls a weight of the local spec; `names`: all weights of the model."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name)
    layer, norm, _ = name.partition(".pre_mlp_layernorm.weight")
    if norm and f"{layer}.mlp.router.weight" not in names:  # experts do not share a norm with their first layer
        name = f"{layer}.mlp.linear_fc1.layer_norm_weight"
    return name


def tiny(family, folder):
    """(Weight, its name in the oracle, its Hugging Face tensors) for every weight of the model."""
    tiny_models.write(family, folder)
    weights = weight_map(read_architecture(folder))
    names = {weight.name for weight in weights}
    tensors = load_file(folder / "model.safetensors")
    assert sorted(name for weight in weights for name in weight.hf_names) == sorted(tensors)
    return [(weight, te_name(weight.name, names), [tensors[name] for name in weight.hf_names]) for weight in weights]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shard_is_mbridges(family, tp, tmp_path):
    ours, shapes = {}, {}
    for weight, name, tensors in tiny(family, tmp_path):
        assert name not in ours
        whole = weight.form.merge(tensors)
        shards = [weight.form.shard(whole, tp, rank) for rank in range(tp)]
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
    num_controls = {Qkv: 0, GateUp: 0}
    for weight, name, tensors in tiny(family, tmp_path):
        whole, shards = ORACLE["families"][family][name]["sha256"], ORACLE["tp2"][family][name]
        if isinstance(weight.form, Qkv):  # one after the other
            assert tiny_models.sha256(torch.cat(tensors)) != whole
        elif isinstance(weight.form, GateUp):  # exchanged, and split over TP without regard to the halves
            assert tiny_models.sha256(torch.cat(tensors[::-1])) != whole
            assert not {tiny_models.sha256(half) for half in torch.cat(tensors).chunk(2)} & {*shards}
        else:
            continue
        num_controls[type(weight.form)] += 1
    assert all(num_controls.values())


def test_names_of_a_layer_with_experts_are_the_oracles():
    layer = "decoder.layers.1"
    experts = {f"{layer}.mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in range(6) for i in (1, 2)}
    attention = {f"self_attention.{part}" for part in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")}
    parts = {"input_layernorm", "pre_mlp_layernorm", "mlp.router", *attention}
    names = experts | {f"{layer}.{part}.weight" for part in parts}
    theirs = {name for name in ORACLE["families"]["qwen3_moe"] if name.startswith(layer)}
    assert {te_name(name, names) for name in names} == theirs
