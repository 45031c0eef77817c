"""Checkpoints back into Hugging Face folders."""

import gc
import json
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Set
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import plain_megatron
from support.models.families import FAMILIES, write_folder
from torch.distributed.checkpoint import format_utils

from isoloss.models.conversion import certificate, hf_files, hf_to_mcore, tensors, transfer
from isoloss.models.conversion.hf_files import HFTensor, arrange
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.conversion.tensors import SplitPart
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, HFReader, check
from isoloss.models.weights.side_files import SideFiles
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError


@pytest.fixture
def assert_parts_are_those_of(monkeypatch) -> Callable[..., None]:
    """assert_parts_are_those_of(hf, checkpoint, dtype): of the folder that it was made from, bit by bit."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)

    def check(hf: Path, checkpoint: Path, dtype: torch.dtype) -> None:
        arch, reader = read_architecture(hf), HFReader(hf)
        weights = CheckpointWeights(checkpoint, arch)
        for weight in weight_map(arch):
            for index, part in enumerate(weight.parts):
                content = SplitPart(weight, index, dtype, weights)
                wanted = reader.get(part).to(dtype)
                found = torch.cat([block.flatten() for block in content.blocks()])
                assert content.nbytes == wanted.nbytes and found.dtype == dtype
                assert torch.equal(found, wanted.flatten()), part

    return check


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_parts_of_every_family_in_every_style(
    architecture, style, deep_hf, plain_checkpoint, assert_parts_are_those_of
):
    hf = deep_hf(architecture)
    assert_parts_are_those_of(hf, plain_checkpoint(hf, style=style), torch.float32)


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("layout", plain_megatron.LAYOUTS)
@pytest.mark.parametrize("architecture", ["qwen3", "glm-4.5"])
def test_parts_of_every_layout(architecture, layout, style, deep_hf, plain_checkpoint, assert_parts_are_those_of):
    hf = deep_hf(architecture, tie_word_embeddings=architecture == "qwen3")
    checkpoint = plain_checkpoint(hf, style=style, **plain_megatron.LAYOUTS[layout])
    assert_parts_are_those_of(hf, checkpoint, torch.bfloat16)


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", ["deepseek-v3", "gpt-oss", "qwen3-moe"])
def test_parts_of_experts_apart(architecture, style, deep_hf, plain_checkpoint, assert_parts_are_those_of):
    hf = deep_hf(architecture)
    checkpoint = plain_checkpoint(hf, style=style, **plain_megatron.experts_apart(architecture))
    assert_parts_are_those_of(hf, checkpoint, torch.float32)


def convert(checkpoint: Path, out: Path, **options) -> dict:
    """Returns the record of the conversion."""
    transfer.run(plan_export(checkpoint, **options).plan, out, workers=1)
    return json.loads((out / certificate.NAME).read_text())


def assert_same_folder(found: Path, published: Path, but: Set[str] = frozenset()) -> None:
    """The same files, byte by byte, but for how the index is laid out."""
    names = {path.name for path in published.iterdir()} - but
    assert {path.name for path in found.iterdir()} - but == names | {certificate.NAME}
    for name in names - {INDEX}:
        assert (found / name).read_bytes() == (published / name).read_bytes(), name
    if INDEX in names:
        ours, theirs = (json.loads((folder / INDEX).read_text()) for folder in (found, published))
        assert ours["weight_map"] == theirs["weight_map"]
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


def published(deep_hf, architecture: str, sharded: bool, dtype: torch.dtype, **changes) -> Path:
    return deep_hf(architecture, dtype=dtype, max_shard_size="150KB" if sharded else "50GB", **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_there_and_back_again(architecture, sharded, dtype, deep_hf, tmp_path):
    """Whole files, bit by bit: with them every tensor, header, configuration and the names of the shards."""
    hf = published(deep_hf, architecture, sharded, dtype)
    transfer.run(hf_to_mcore.plan(hf).transfer, tmp_path / "mcore", workers=1)
    record = convert(tmp_path / "mcore", tmp_path / "out")
    assert_same_folder(tmp_path / "out", hf)
    assert record["files"].keys() == {path.name for path in hf.iterdir()} and record["verified"] is False


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", plain_megatron.LAYOUTS)
def test_plain_megatron_core_into_the_files_that_were_published(layout, tie, deep_hf, plain_checkpoint, tmp_path):
    hf = published(deep_hf, "llama", True, torch.float32, tie_word_embeddings=tie)
    record = convert(plain_checkpoint(hf, **plain_megatron.LAYOUTS[layout]), tmp_path / "out", hf=hf)
    assert_same_folder(tmp_path / "out", hf)
    assert (record["vocab_size"], record["padded_vocab"]) == (307, 370)


def test_a_checkpoint_of_whole_tensors(deep_hf, plain_checkpoint, tmp_path):
    """As torch's own tools write a checkpoint anew: one piece holds all layers and experts of a kind."""
    hf, whole = deep_hf("qwen3-moe"), tmp_path / "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        format_utils.dcp_to_torch_save(plain_checkpoint(hf), tmp_path / "state.pt")
        format_utils.torch_save_to_dcp(tmp_path / "state.pt", whole)
    tensors = CheckpointWeights(whole, read_architecture(hf)).folder.tensors
    experts = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert [piece.sizes[:2] for piece in experts.pieces] == [(4, 6)]
    convert(whole, tmp_path / "out", hf=hf)
    assert_same_folder(tmp_path / "out", hf)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tied_embeddings_there_and_back_again(architecture, deep_hf, tmp_path):
    hf = published(deep_hf, architecture, True, torch.bfloat16, tie_word_embeddings=True)
    transfer.run(hf_to_mcore.plan(hf).transfer, tmp_path / "mcore", workers=1)
    convert(tmp_path / "mcore", tmp_path / "out")
    assert_same_folder(tmp_path / "out", hf)


def test_without_a_record_files_are_filled_in_order(deep_hf, plain_checkpoint, tmp_path, monkeypatch):
    hf = deep_hf("glm-4.5")
    checkpoint = shutil.copytree(plain_checkpoint(hf), tmp_path / "mcore")
    SideFiles.of(hf).write(checkpoint / "huggingface", read_architecture(hf))
    record = convert(checkpoint, tmp_path / "one")
    assert sorted(record["files"]) == ["config.json", "generation_config.json", "model.safetensors"]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    monkeypatch.setattr(hf_files.arrange, "__defaults__", (100_000,))
    record = convert(checkpoint, tmp_path / "several", dtype="bfloat16")
    shards = sorted(name for name in record["files"] if name.endswith(".safetensors"))
    assert shards == [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    assert len(shards) > 2 and all(record["files"][name]["bytes"] < 110_000 for name in shards)
    reader, arch = HFReader(tmp_path / "several"), read_architecture(tmp_path / "several")
    check(reader, arch)
    assert arch.dtype == "bfloat16"
    for weight in weight_map(arch):
        wanted = HFReader(hf).whole(weight).to(torch.bfloat16 if weight.trained else torch.float32)
        assert torch.equal(reader.whole(weight), wanted)


def test_a_flipped_bit_is_named_though_there_is_no_manifest(deep_hf, plain_checkpoint, tmp_path):
    hf = deep_hf("llama")
    checkpoint = shutil.copytree(plain_checkpoint(hf, 2, tp=2), tmp_path / "mcore")
    weights = CheckpointWeights(checkpoint, read_architecture(hf))
    fc2 = weights.folder.tensors["decoder.layers.mlp.linear_fc2.weight"].pieces[0]
    start, _ = weights.folder.payload(weights.folder.tensors["decoder.layers.mlp.linear_fc2.weight"], fc2)
    with (checkpoint / fc2.file).open("r+b") as file:
        file.seek(start + 1000)
        byte = file.read(1)[0]
        file.seek(start + 1000)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(
        UserError, match=rf"{fc2.file} is damaged: decoder.layers.mlp.linear_fc2.weight fails its checksum"
    ):
        convert(checkpoint, tmp_path / "out", hf=hf)
    assert not (tmp_path / "out").exists()


def test_only_files_without_checksums_of_their_own_are_read_whole(deep_hf, plain_checkpoint, tmp_path):
    hf = deep_hf("llama")
    assert not any(source.checksum for source in plan_export(plain_checkpoint(hf), hf).plan.sources)
    transfer.run(hf_to_mcore.plan(hf).transfer, tmp_path / "mcore", workers=1)
    assert all(source.checksum for source in plan_export(tmp_path / "mcore").plan.sources)


def test_a_number_too_large_for_the_type_is_named(deep_hf, tmp_path, pool):
    """In a tensor that is put together from the columns of two ranks."""
    hf = shutil.copytree(deep_hf("llama"), tmp_path / "hf")
    tensors = load_file(hf / SINGLE)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = 1e6
    save_file(tensors, hf / SINGLE, metadata={"format": "pt"})
    pool.run(2, plain_megatron.save_as, hf, tmp_path / "mcore", {"tp": 2})
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.weight in .* holds numbers too large for float16"):
        convert(tmp_path / "mcore", tmp_path / "out", hf=hf, dtype="float16")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells how much memory there is")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_no_tensor_is_in_memory_as_a_whole(dtype, tmp_path):
    """Two threads together need less than a third of the largest tensor, on the way in and on the way back."""
    hf = write_folder("llama", tmp_path / "hf", vocab_size=75_000, hidden_size=448, tie_word_embeddings=True)
    assert peak(lambda: transfer.run(hf_to_mcore.plan(hf, dtype).transfer, tmp_path / "mcore", workers=2)) < 44 << 20
    back = plan_export(tmp_path / "mcore", dtype="float32").plan
    assert peak(lambda: transfer.run(back, tmp_path / "out", workers=2)) < 44 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells how much memory there is")
def test_memory_does_not_grow_with_the_number_of_experts(tmp_path):
    """Those of gpt-oss are transposed one at a time, each of 6 MB or 12; all are 290 MB."""
    sizes = {"hidden_size": 1200, "intermediate_size": 1250, "num_local_experts": 16, "vocab_size": 307}
    hf = write_folder("gpt-oss", tmp_path / "hf", num_hidden_layers=1, **sizes)
    assert peak(lambda: transfer.run(hf_to_mcore.plan(hf).transfer, tmp_path / "mcore", workers=2)) < 120 << 20
    assert peak(lambda: transfer.run(plan_export(tmp_path / "mcore").plan, tmp_path / "out", workers=2)) < 120 << 20


def peak(work: Callable[[], object]) -> int:
    """By how many bytes the anonymous memory of this process grows meanwhile."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous())

    gc.collect()
    before, watcher = anonymous(), threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most[0] - before


def anonymous() -> int:
    """Bytes of this process that are of no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def test_a_header_is_that_of_the_safetensors_library(tmp_path):
    """Which orders tensors by type, then by name."""
    tensors = {
        "c": torch.zeros(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(1),
        "d": torch.zeros(5, dtype=torch.bfloat16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
    (file,) = arrange([HFTensor(name, kinds[t.dtype], tuple(t.shape)) for name, t in tensors.items()])
    assert [tensor.name for tensor in file.tensors] == ["b", "c", "a", "d"]
    assert (tmp_path / "file").read_bytes().startswith(file.header())
