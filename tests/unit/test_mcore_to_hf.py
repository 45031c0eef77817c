"""Checkpoints back into Hugging Face folders."""

import json
from pathlib import Path

import pytest
import torch
from worlds import plain_megatron

from isoloss.models import certificate, transfer
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


def convert(checkpoint: Path, out: Path, hf: Path, **options) -> dict:
    transfer.run(plan_export(checkpoint, hf, **options).plan, out)
    return json.loads((out / certificate.NAME).read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_files_are_those_that_the_model_was_published_in(
    architecture, sharded, dtype, tiny_hf, plain_checkpoint, tmp_path
):
    hf = tiny_hf(
        architecture,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        max_shard_size="60KB" if sharded else "50GB",
    )
    record = convert(plain_checkpoint(hf), tmp_path / "out", hf)
    published = sorted(path.name for path in hf.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*published, certificate.NAME])
    for name in published:
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes(), name
    assert record["files"].keys() == set(published) and not record["verified"]
