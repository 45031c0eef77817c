"""Parts of a model are counted in a process of their own, and are affine in the tokens."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import families

from isoloss.engine.memory.counting import Setting, head_of, layers_of
from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.mcore.activation_memory import KEEP_ALL
from isoloss.models.mcore.kernels import ALL
from isoloss.parallel import Layout

pytestmark = pytest.mark.xdist_group("counting")  # one process counts for all of it, and keeps the counts
WIDTH, VOCABULARY = 64, 8192
SIZES = {"hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": VOCABULARY,
         "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(families.published("qwen3", **SIZES)))
    arch = read_architecture(folder)
    return Setting(arch, Layout(), KEEP_ALL, ALL, torch.bfloat16, torch.float32, True, None, LoraConfig())


def test_what_a_layer_keeps_is_known_by_hand(setting):
    """In bf16: queries, keys and values projected, queries copied for their norm, both rotated, values, the output,
    its log-sum-exp in fp32; two sums of the residual stream, two norms' outputs; gate, up and their product. The norms
    keep a number in fp32 for each row or head."""
    few, many = layers_of(setting, (1024, 2048))
    attention, mlp = (after.kept - before.kept for before, after in zip(few.layers[0], many.layers[0], strict=True))
    heads = 4 * 16 + 2 * 16  # channels of queries and keys
    projected = heads + 2 * 16
    kept = 2 * (projected + 4 * 16 + heads + 4 * 16) + 4 * 4 + 4 * (4 + 2)
    assert attention == 1024 * (kept + 2 * 3 * WIDTH + 2 * 4)
    assert mlp == 1024 * 2 * (3 * 192 + WIDTH)
    assert many.embedding.kept - few.embedding.kept >= 1024 * 2 * WIDTH


def test_every_level_is_affine_in_the_tokens(setting):
    """To what the allocator rounds up."""
    few, middle, many = layers_of(setting, (1024, 4096, 8192))
    for a, b, c in zip(*(counts.layers[0] for counts in (few, middle, many)), strict=True):
        assert np.abs(a.levels + (c.levels - a.levels) * 3 / 7 - b.levels).max() <= 20 * 512
        assert len(a.levels) > 10 and a.levels.max() > a.kept


def test_a_tied_embedding_waits_for_the_gradient_of_the_head(setting):
    tied = replace(setting, arch=replace(setting.arch, tie_embeddings=True))
    assert head_of(setting, 512).kept <= 512 < VOCABULARY * WIDTH * 2 <= head_of(tied, 512).kept


def test_the_process_that_asks_stays_as_it_is(setting):
    environment, empty = dict(os.environ), torch.empty
    layers_of(setting, (512,))
    assert not dist.is_initialized() and torch.empty is empty and dict(os.environ) == environment
    assert not torch.ones(1).is_cuda and torch.device("meta") == torch.empty(1, device="meta").device


def test_a_count_that_fails_says_so_and_the_next_one_is_answered(setting):
    with pytest.raises(RuntimeError, match=r"memory could not be counted \(.*memory.check=false"):
        layers_of(setting, ("many",))
    assert layers_of(setting, (256,))[0].layers
