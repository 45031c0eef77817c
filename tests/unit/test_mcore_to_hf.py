"""Checkpoints back into Hugging Face folders."""

from pathlib import Path

import pytest
import torch
from worlds import plain_megatron

from isoloss.models.checkpoint_read import CheckpointWeights
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
