"""The cookbook's `weights.build_hf_model` merges our adapters as `tools.convert merge` does, or raises."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from checkpoints.test_merge import ShortNumbers, merge, short_model
from safetensors.torch import load_file
from support.serve.server import PYTHON

from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.peft_folder import write_adapter

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .tinker-venv/.ready installs the cookbook"),
]
DENSE, ATTENTION = ("attention", "mlp", "lm_head"), ("attention",)
# Folder of the cookbook's merge -> what it said, of every pair of folders it is given.
SCRIPT = """
import json, sys
from tinker_cookbook.weights import build_hf_model
said = []
for base, adapter, out, strategy in json.loads(sys.argv[1]):
    try:
        build_hf_model(base_model=base, adapter_path=adapter, output_path=out, dtype="float32", merge_strategy=strategy)
        said.append("")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print("said", json.dumps(said))
"""


def tensors(folder: Path):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_the_cookbook_merges_what_we_merge(tmp_path):
    """In bits, of short numbers, where the adapter has no experts; adapters of experts it refuses."""
    cases = {
        "dense": ("qwen3", DENSE), "experts": ("deepseek-v3", ATTENTION), "adapted-experts": ("qwen3-moe", DENSE),
    }  # fmt: skip
    asked = []
    for case, (family, targets) in cases.items():
        (tmp_path / case).mkdir()
        hf, adapter = short_model(family, tmp_path / case / "hf"), tmp_path / case / "adapter"
        lora = LoraConfig(rank=4, alpha=2.0, targets=targets)
        write_adapter(adapter, read_architecture(hf), lora, ShortNumbers(), str(hf))
        for strategy in ("shard", "full"):
            asked.append([str(hf), str(adapter), str(tmp_path / case / strategy), strategy])
    command = [str(PYTHON), "-c", SCRIPT, json.dumps(asked)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = json.loads(ran.stdout.rsplit("said ", 1)[1])
    assert said[:4] == [""] * 4 and all("Expert LoRA weights must be 3D" in words for words in said[4:])
    for case in ("dense", "experts"):
        folder = tmp_path / case
        assert merge(folder / "hf", folder / "adapter", folder / "ours") == 0
        ours = tensors(folder / "ours")
        assert any(not tensor.equal(ours[name]) for name, tensor in tensors(folder / "hf").items())
        for strategy in ("shard", "full"):
            theirs = tensors(folder / strategy)
            assert theirs.keys() == ours.keys() and all(tensor.equal(ours[name]) for name, tensor in theirs.items())
