"""Safetensors folders: streamed out in shards, read back by us and by transformers; damaged ones refused by name."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.models import families
from support.models.decoders import attending, with_mlp
from transformers import AutoModelForCausalLM

from isoloss.engine.step.model_source import open_weights
from isoloss.models.families import gpt_oss
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.weight import Part
from isoloss.models.weights.hf_checkpoint import (
    HFReader,
    check,
    finish,
    write_shards,
)
from isoloss.models.weights.random_weights import RandomWeights
from isoloss.models.weights.side_files import SideFiles
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError


def tiny_folder(path, tie=False, dtype=torch.float32):
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "head_dim": 4, "intermediate_size": 20, "vocab_size": 67}
    model = families.make("llama", dtype=dtype, tie_word_embeddings=tie, **sizes)
    model.save_pretrained(path)
    return model


def export(source, target, weights, stages=1, max_shard_bytes=4000):
    """As an engine exports: through whole Megatron-Core weights, one writer a pipeline stage."""

    def stream(part):
        for weight in part:
            whole = weight.mapping.merge([source.get(part) for part in weight.parts])
            yield from zip((part.tensor for part in weight.parts), weight.mapping.split(whole))

    size = -(-len(weights) // stages)
    parts = [weights[k * size : (k + 1) * size] for k in range(stages)]
    finish(target, [write_shards(target, f"stage{k}", stream(part), max_shard_bytes) for k, part in enumerate(parts)])


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("stages", "max_shard_bytes", "dtype"),
    [(1, 10**9, torch.float32), (1, 4000, torch.bfloat16), (2, 4000, torch.float32), (2, 10**9, torch.float32)],
)
def test_round_trip_loads_in_transformers(tmp_path, tie, stages, max_shard_bytes, dtype):
    model = tiny_folder(tmp_path / "in", tie, dtype)
    arch = read_architecture(tmp_path / "in")
    reader, weights = HFReader(tmp_path / "in"), weight_map(arch)
    check(reader, arch)
    export(reader, tmp_path / "out", weights, stages, max_shard_bytes)
    SideFiles.of(tmp_path / "in").write(tmp_path / "out", arch)

    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    single = stages == 1 and max_shard_bytes == 10**9
    assert ("model.safetensors" in files) == single and ("model.safetensors.index.json" in files) != single
    assert not [name for name in files if "partial" in name]
    if not single:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        shards = sorted(set(index["weight_map"].values()))
        assert shards == [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
        assert len(shards) >= 2
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())

    check(HFReader(tmp_path / "out"), arch)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(t.dtype == dtype and torch.equal(t, expected[name]) for name, t in loaded.state_dict().items())


def test_shards_respect_the_limit_and_hold_only_their_own_bytes(tmp_path):
    tensor = torch.arange(100.0)
    views = [(f"v{i}", tensor[10 * i : 10 * i + 10]) for i in range(10)]  # contiguous views of one storage
    entries = write_shards(tmp_path, "rank0", views, max_shard_bytes=100)
    assert [entry.nbytes for entry in entries.values()] == [40] * 10
    assert len({entry.file for entry in entries.values()}) == 5
    finish(tmp_path, [entries])
    reader = HFReader(tmp_path)
    assert all(torch.equal(reader.get(Part(name, tuple(view.shape))), view) for name, view in views)
    assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 400
    with safe_open(tmp_path / "model-00001-of-00005.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_written_twice_is_a_bug(tmp_path):
    with pytest.raises(ValueError, match="a was written twice"):
        write_shards(tmp_path, "s", [("a", torch.ones(2)), ("a", torch.ones(2))])
    with pytest.raises(ValueError, match="a was written twice"):
        write_shards(tmp_path, "s", [("a", torch.ones(2)), ("a", torch.ones(2))], max_shard_bytes=1)
    entries = [write_shards(tmp_path, tag, [("a", torch.ones(2))]) for tag in "st"]
    with pytest.raises(ValueError, match="a was written by two writers"):
        finish(tmp_path, entries)


def test_an_export_never_overwrites_a_model_and_clears_what_a_broken_one_left(tmp_path):
    write_shards(tmp_path, "broken", [("b", torch.ones(2))])
    finish(tmp_path, [write_shards(tmp_path, "whole", [("a", torch.ones(2))])])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(UserError, match=r"already holds model.safetensors; choose an empty folder"):
        write_shards(tmp_path, "again", [("a", torch.ones(2))])


def test_reader_names_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"model.safetensors is not a safetensors file"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    finish(tmp_path, [write_shards(tmp_path, "s", [(n, torch.ones(2)) for n in "abc"], max_shard_bytes=8)])
    with pytest.raises(UserError, match="has no tensor d; its weights do not belong"):
        HFReader(tmp_path).get(Part("d", (1,)))
    save_file({"x": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(UserError, match=r"model-00003-of-00003.safetensors lacks c, which .* places there"):
        HFReader(tmp_path).get(Part("c", (1,)))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00003.safetensors \(1 of the 3 files"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="is not a safetensors index"):
        HFReader(tmp_path)


@pytest.mark.parametrize("tie", [False, True])
def test_check_names_the_tensor(tmp_path, tie):
    model = tiny_folder(tmp_path, tie)
    arch = read_architecture(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    def checked(**changes):
        kept = {name: t for name, t in {**tensors, **changes}.items() if t is not None}
        save_file(kept, tmp_path / "model.safetensors")
        check(HFReader(tmp_path), arch)

    checked()  # the old buffer and the copy of a tied lm_head do no harm
    with pytest.raises(UserError, match=r"lack model.norm.weight of shape \[16\]"):
        checked(**{"model.norm.weight": None})
    with pytest.raises(UserError, match=r"model.norm.weight has shape \[17\] where config.json calls for \[16\]"):
        checked(**{"model.norm.weight": torch.ones(17)})
    with pytest.raises(UserError, match=r"model.layers.3.mlp.up_proj.weight is a tensor that .* \(1 such\)"):
        checked(**{"model.layers.3.mlp.up_proj.weight": torch.ones(2, 2)})
    if tie:
        with pytest.raises(UserError, match=r"tie_word_embeddings=True contradicts .*: lm_head.weight differs"):
            checked(**{"lm_head.weight": tensors["lm_head.weight"] + 1})
    else:
        with pytest.raises(UserError, match=r"lack lm_head.weight"):
            checked(**{"lm_head.weight": None})


@pytest.mark.parametrize(
    ("kind", "called"),
    (
        (torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2"), (torch.uint8, "U8"),
        (torch.float64, "F64"), (torch.int32, "I32"),
    ),
)  # fmt: skip
@pytest.mark.parametrize("one", ("model.layers.1.self_attn.o_proj.weight", "model.norm.weight"))
def test_numbers_of_other_types_are_not_taken_for_weights(one, kind, called, tmp_path):
    """For the trainer as for the converter; also where they are packed into another shape, as bitsandbytes does."""
    tensors = {name: tensor.clone() for name, tensor in tiny_folder(tmp_path).state_dict().items()}
    arch = read_architecture(tmp_path)
    assert isinstance(open_weights(tmp_path, arch), HFReader)
    for shape in (tensors[one].shape, (tensors[one].numel(), 1)):
        save_file({**tensors, one: tensors[one].to(kind).view(shape)}, tmp_path / "model.safetensors")
        with pytest.raises(
            UserError, match=rf"^{one} in .*model.safetensors has the type {called}; only F32, BF16, F16"
        ):
            open_weights(tmp_path, arch)


@pytest.mark.parametrize("ending", ("qweight", "weight_packed", "weight_scale_inv"))
def test_quantized_tensors_under_other_names(ending, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in tiny_folder(tmp_path).state_dict().items()}
    arch = read_architecture(tmp_path)
    up = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file({**tensors, f"model.layers.0.mlp.up_proj.{ending}": up}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lack model.layers.0.mlp.up_proj.weight .*; the weights are quantized; take"):
        open_weights(tmp_path, arch)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_weights_that_are_no_numbers_are_refused_where_they_are_read(value, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in tiny_folder(tmp_path).state_dict().items()}
    arch = read_architecture(tmp_path)
    tensors["model.layers.1.self_attn.v_proj.weight"][2, 3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, arch)
    weights = {weight.name: weight for weight in weight_map(arch)}
    source.whole(weights["decoder.layers.0.self_attention.linear_qkv.weight"])
    with pytest.raises(
        UserError, match=r"^model.layers.1.self_attn.v_proj.weight in .*model.safetensors holds numbers"
    ):
        source.whole(weights["decoder.layers.1.self_attention.linear_qkv.weight"])


@pytest.mark.parametrize("name", ("model.safetensors", "config.json"))
def test_a_pointer_of_git_lfs_is_told_as_such(name, tmp_path):
    tiny_folder(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    with pytest.raises(UserError, match=rf"{name} is a pointer of Git LFS, not the file itself; run git lfs pull"):
        open_weights(tmp_path, read_architecture(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' stands twice"),
        ("[]", "a JSON object"),
    ),
    ids=("deep", "twice", "list"),
)
def test_a_config_that_readers_take_in_different_ways(text, says, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"^{tmp_path}/config.json .*{says}"):
        read_architecture(tmp_path)


def test_random_weights_depend_on_seed_and_name_alone(tmp_path):
    tiny_folder(tmp_path)
    arch = read_architecture(tmp_path)
    first, again, other = RandomWeights(arch, 1), RandomWeights(arch, 1), RandomWeights(arch, 2)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    weights = {weight.name: weight for weight in weight_map(arch)}
    forward = {name: first.whole(weight) for name, weight in weights.items()}
    assert all(torch.equal(again.whole(weights[name]), forward[name]) for name in reversed(weights))
    assert torch.equal(torch.get_rng_state(), state)
    q, k = (f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1))
    assert not torch.equal(forward[q], forward[k]) and not torch.equal(forward[q], other.whole(weights[q]))
    assert torch.equal(forward["decoder.final_layernorm.weight"], torch.ones(16))
    deeper = RandomWeights(replace(arch, layers=arch.layers[:1] * 12), 1)
    assert torch.equal(deeper.whole(weights[q]), forward[q])
    down = "decoder.layers.0.mlp.linear_fc2.weight"
    torch.testing.assert_close(deeper.whole(weights[down]), forward[down] * (3 / 12) ** 0.5)


def test_experts_that_share_a_tensor_begin_apart():
    """gpt-oss keeps all experts of a layer in one tensor; still no two are copies."""
    arch = gpt_oss.architecture(families.published("gpt-oss"))
    source = RandomWeights(arch, 1)
    down = [source.whole(w) for w in weight_map(arch) if "layers.0.mlp.experts" in w.name and "fc2.weight" in w.name]
    assert len(down) == 4
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(down, 2))


def test_random_weights_have_the_spread_that_was_asked_for(tmp_path):
    tiny_folder(tmp_path)
    arch = with_mlp(attending(read_architecture(tmp_path), qkv_bias=True), Dense(512))
    arch = replace(arch, hidden_size=256, layers=arch.layers[:1] * 8)
    source = RandomWeights(arch, 0, std=0.1)

    whole = {weight.name: source.whole(weight) for weight in weight_map(arch) if weight.layer == 0}
    assert whole["decoder.layers.0.mlp.linear_fc1.weight"].std().item() == pytest.approx(0.1, rel=0.02)
    assert whole["decoder.layers.0.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.025, rel=0.02)
    assert not whole["decoder.layers.0.self_attention.linear_qkv.bias"].any()
