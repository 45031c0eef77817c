"""Folders of Megatron-LM and Megatron-Bridge: what plain Megatron-Core trained and saved is what comes out."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support import megatron_runs
from support.families import FAMILIES, config, published
from support.megatron_runs import TRACKER, Held
from transformers import AutoModelForCausalLM

from isoloss.tools import convert

STACKED, PER_LAYER = {"non_homogeneous_layers": False}, {"non_homogeneous_layers": True}
ROWS = {
    "Megatron-LM": ("qwen3", {"metadata": STACKED}),
    "Megatron-LM, layers apart": ("qwen3", {"metadata": PER_LAYER, "optimizer": "dp_reshardable"}),
    "Megatron-LM before 0.14": ("qwen3", {"optimizer": "fully_sharded_model_space", "vocab_multiple": 37}),
    "Megatron-Bridge": ("qwen3", {"metadata": STACKED, "bridge": True}),
    "saved inside of a wrapper": ("qwen3", {"metadata": PER_LAYER, "bridge": True, "prefix": "module.model."}),
    "experts": ("qwen3-moe", {"metadata": STACKED, "bridge": True}),
}


def mcore_to_hf(checkpoint: Path, out: Path, *options: object) -> int:
    return convert.main(["mcore-to-hf", "--checkpoint", str(checkpoint), "--out", str(out), *map(str, options)])


def assert_holds(out: Path, held: Held) -> None:
    """transformers gives the logits of plain Megatron-Core, and the tensors that have one name each are equal."""
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        found = model(input_ids=held.tokens).logits
    assert (found - held.logits).abs().max() <= 2e-5 * held.logits.std()
    exported = load_file(out / "model.safetensors")
    for ours, theirs in (
        ("model.layers.1.self_attn.o_proj.weight", "decoder.layers.1.self_attention.linear_proj.weight"),
        ("model.norm.weight", "decoder.final_layernorm.weight"),
    ):
        assert torch.equal(exported[ours], held.parameters[theirs])
    rows = exported["model.embed_tokens.weight"]
    assert torch.equal(rows, held.parameters["embedding.word_embeddings.weight"][: len(rows)])


@pytest.mark.parametrize("name", ROWS)
def test_what_was_trained_comes_out(name, tiny_hf, tmp_path, pool, capsys):
    family, options = ROWS[name]
    hf = tiny_hf(family)
    (held,) = pool.run(1, megatron_runs.train_and_save, hf, tmp_path / "ckpt", 100, options)
    assert mcore_to_hf(tmp_path / "ckpt", tmp_path / "out", "--hf", hf) == 0
    assert f"{tmp_path}/ckpt/iter_0000100: {family.replace('-', '_')}, " in capsys.readouterr().out
    assert_holds(tmp_path / "out", held)
