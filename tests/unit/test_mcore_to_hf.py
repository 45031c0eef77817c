"""Checkpoints back into Hugging Face folders."""

import json
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from worlds import plain_megatron

from isoloss.models import certificate, hf_to_mcore, transfer
from isoloss.models.checkpoint_hf import INDEX
from isoloss.models.checkpoint_read import CheckpointWeights
from isoloss.models.mcore_to_hf import plan_export
from isoloss.models.registry import FAMILIES, read_architecture
from isoloss.models.transfer_worker import Sources
from isoloss.models.weight_segments import WeightRows
from isoloss.models.weights import weight_map


def assert_segments_are_the_split_weights(checkpoint: Path, hf: Path, dtype: torch.dtype) -> None:
    arch, sources = read_architecture(hf), Sources()
    weights = CheckpointWeights(checkpoint, arch)
    for weight in weight_map(arch):
        rows, parts = WeightRows(weights, weight), weight.form.split(weights.whole(weight))
        for index, (part, wanted) in enumerate(zip(weight.parts, parts, strict=True)):
            segments = rows.part(index, dtype)
            found = b"".join(bytes(piece) for segment in segments for piece in segment.read(sources))
            assert sum(segment.nbytes for segment in segments) == len(found) == wanted.numel() * dtype.itemsize
            assert found == wanted.to(dtype).contiguous().view(torch.uint8).numpy().tobytes(), part


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_segments_of_every_family_in_every_style(architecture, style, tiny_hf, plain_checkpoint):
    hf = tiny_hf(architecture)
    assert_segments_are_the_split_weights(plain_checkpoint(hf, style=style), hf, torch.float32)


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("layout", plain_megatron.LAYOUTS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Glm4MoeForCausalLM"])
def test_segments_of_every_layout(architecture, layout, style, tiny_hf, plain_checkpoint):
    hf = tiny_hf(architecture, tie_word_embeddings=architecture == "Qwen3ForCausalLM")
    checkpoint = plain_checkpoint(hf, style=style, **plain_megatron.LAYOUTS[layout])
    assert_segments_are_the_split_weights(checkpoint, hf, torch.bfloat16)


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM"])
def test_segments_of_experts_apart(architecture, style, tiny_hf, plain_checkpoint):
    hf = tiny_hf(architecture)
    checkpoint = plain_checkpoint(hf, style=style, **plain_megatron.experts_apart(architecture))
    assert_segments_are_the_split_weights(checkpoint, hf, torch.float32)


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


def published(tiny_hf, architecture: str, sharded: bool, dtype: torch.dtype, **changes) -> Path:
    return tiny_hf(architecture, dtype=dtype, max_shard_size="60KB" if sharded else "50GB", **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_there_and_back_again(architecture, sharded, dtype, tiny_hf, tmp_path):
    """Whole files, bit by bit: with them every tensor, header, configuration and the names of the shards."""
    hf = published(tiny_hf, architecture, sharded, dtype)
    transfer.run(hf_to_mcore.plan(hf).transfer, tmp_path / "mcore", workers=1)
    record = convert(tmp_path / "mcore", tmp_path / "out")
    assert_same_folder(tmp_path / "out", hf)
    assert record["files"].keys() == {path.name for path in hf.iterdir()} and record["verified"] is False
