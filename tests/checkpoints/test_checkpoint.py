"""A training checkpoint goes on in any other layout, for every family, under Transformer Engine's names."""

import itertools
import json
import math
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.families import MODELS, SPARSE, VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.checkpoints import load_and_train, logits, refusal, train_and_save
from support.runs.saves import both_ways, operations

from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.checkpoint_names import checkpoint_rows, native_style
from isoloss.models.weights.manifest import check_checksums
from isoloss.models.weights.manifest import read as read_manifest
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import UserError

LENGTHS = (2, 40, 17, 29, 33, 60)


@pytest.mark.parametrize(("name", "distributed_optimizer"), itertools.product(MODELS, (False, True)))
def test_a_checkpoint_goes_on_in_another_layout(name, distributed_optimizer, tmp_path, pool):
    folder = write_folder(name, tmp_path / "model")
    samples = make_samples(LENGTHS, VOCAB)
    saved_in = {"tp": 2, "ep": 2 if name in SPARSE else 1, "distributed_optimizer": distributed_optimizer}
    checkpoint = tmp_path / "checkpoint"
    wanted = pool.run(2, train_and_save, folder, checkpoint, samples, saved_in)
    found = pool.run(2, load_and_train, folder, checkpoint, samples, {**saved_in, "tp": 1, "ep": 1, "pp": 2})

    wanted = {weight: tensor for rank in wanted for weight, tensor in rank.items()}
    found = {weight: tensor for rank in found for weight, tensor in rank.items()}
    assert found.keys() == wanted.keys()
    for weight, tensor in wanted.items():
        torch.testing.assert_close(found[weight], tensor, rtol=0, atol=2e-5, msg=lambda m, w=weight: f"{w}: {m}")

    arch = read_architecture(folder)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    keys = {
        key for key in metadata.state_dict_metadata if not key.startswith("optimizer") and "_extra_state" not in key
    }
    expected = {place.key for weight in weight_map(arch) for place in checkpoint_rows(weight, arch, native_style(arch))}
    assert {key for key in keys if not key.startswith("chained")} == expected


def test_layers_of_other_shapes_without_a_dense_one(tmp_path, pool):
    """Megatron-Core would stack what all layers have: here one has more key/value heads, and sinks."""
    folder = write_folder("mimo-v2-flash", tmp_path / "model", mlp_layer_types=["sparse"] * 2)
    samples = make_samples(LENGTHS, VOCAB)
    (wanted,) = pool.run(1, train_and_save, folder, tmp_path / "checkpoint", samples, {})
    found = pool.run(2, load_and_train, folder, tmp_path / "checkpoint", samples, {"pp": 2})
    for weight, tensor in {**found[0], **found[1]}.items():
        torch.testing.assert_close(tensor, wanted[weight], rtol=0, atol=2e-5, msg=lambda m, w=weight: f"{w}: {m}")


def test_files_are_those_of_megatrons_own_strategy(tmp_path, pool):
    """To the bit: tensors, what is not a tensor, and what `.metadata` tells of both."""
    folder, theirs, ours = write_folder("qwen3-moe", tmp_path / "model"), tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    pool.run(2, both_ways, folder, theirs, ours, VOCAB)
    files = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in ours.iterdir()) == files
    # How many a rank writes depends on Megatron's release.
    assert {name.split("_")[2] for name in files if name.endswith(".distcp")} == {"0", "1"}
    for name in files:
        if name == "common.pt":
            assert entries(ours / name) == entries(theirs / name)
        elif name != ".metadata":
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    of_theirs, of_ours = (pickle.loads((each / ".metadata").read_bytes()) for each in (theirs, ours))
    assert of_ours.storage_data == of_theirs.storage_data
    assert of_ours.state_dict_metadata == of_theirs.state_dict_metadata


def entries(archive: Path) -> dict[str, bytes]:
    """Of a file of torch.save, without the archive's own name, which is that of its file."""
    with zipfile.ZipFile(archive) as found:
        return {name.partition("/")[2]: found.read(name) for name in found.namelist()}


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, pool):
    """Every file whole, and the names of all; the rank that wrote a file syncs it itself, be it on another machine."""
    model = write_folder("qwen3", tmp_path / "model")
    folder = tmp_path / "kept" / "checkpoint"
    folder.parent.mkdir()
    first, second = pool.run(2, operations, model, folder, VOCAB)
    renamed = first.index(("rename", str(folder), 0))
    before, after = first[:renamed], first[renamed + 1 :]
    partial = str(folder.with_name(".checkpoint.partial"))
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "isoloss.json", "huggingface/config.json"} <= files.keys()
    for name, size in files.items():
        assert ("fsync", f"{partial}/{name}", size) in before, name
    synced = [path for _, path, _ in before]
    for entry in (partial, *(f"{partial}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_dir())):
        assert entry in synced, entry
    assert str(folder.parent) in [path for _, path, _ in after]
    for rank, done in enumerate((first, second)):
        own = {f"{partial}/{name}": size for name, size in files.items() if name.startswith(f"__{rank}_")}
        assert own and own.items() <= {path: size for _, path, size in done}.items()
        # While it writes: before the manifest is.
        of_manifest = [at for at, (_, path, _) in enumerate(first) if path.endswith("isoloss.json")]
        assert rank or all(first.index(("fsync", path, size)) < min(of_manifest) for path, size in own.items())


@pytest.fixture
def checkpoint(tmp_path, pool) -> Path:
    folder = write_folder("qwen3-moe", tmp_path / "model")
    pool.run(2, train_and_save, folder, tmp_path / "checkpoint", make_samples(LENGTHS, VOCAB), {"tp": 2})
    return tmp_path / "checkpoint"


def test_the_manifest_names_every_file(checkpoint):
    manifest = read_manifest(checkpoint)
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert files == {*manifest.files, "isoloss.json"}
    assert (manifest.kind, manifest.family, manifest.vocab_size) == ("trained", "qwen3_moe", VOCAB)
    assert manifest.dtypes == ("float32",)
    check_checksums(checkpoint, manifest)
    config = json.loads((checkpoint / "huggingface" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_is_named_on_every_rank(checkpoint, damage, tmp_path, pool):
    path = max(checkpoint.glob("__1_*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    with pytest.raises(UserError, match=path.name) as refusal:
        pool.run(2, load_and_train, tmp_path / "model", checkpoint, make_samples(LENGTHS, VOCAB), {"ep": 2})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "pp": 2}, {"ep": 2}])
def test_a_checkpoint_is_a_model_to_start_from(checkpoint, parallel, tmp_path, pool):
    """model.path=CHECKPOINT has the weights that loading the checkpoint gives; without the Hugging Face folder."""
    samples = make_samples(LENGTHS, VOCAB, seed=5)
    world = 1 if not parallel else 4 if "tp" in parallel else 2
    loaded = pool.run(world, logits, tmp_path / "model", samples, parallel, checkpoint)
    started = pool.run(world, logits, checkpoint, samples, parallel)
    untrained = pool.run(world, logits, tmp_path / "model", samples, parallel)
    assert torch.equal(loaded[0], started[0])
    assert not torch.equal(loaded[0], untrained[0])


def test_a_flipped_bit_of_a_checkpoint_to_start_from_is_named_on_every_rank(checkpoint, tmp_path, pool):
    path = max(checkpoint.glob("__1_*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name} is damaged"):
        pool.run(2, logits, checkpoint, make_samples(LENGTHS, VOCAB, seed=5), {"ep": 2})


def test_weights_that_are_no_numbers_end_every_rank(pool, tmp_path):
    """One stage reads them. The other would wait for it in the first collective."""
    folder = write_folder("llama", tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][1, 2] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    one, other = pool.run(2, refusal, folder, {"pp": 2})
    assert one == other and one.startswith("model.layers.1.mlp.gate_proj.weight in ") and "infinite or NaN" in one
