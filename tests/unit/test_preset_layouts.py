"""The presets for clusters say of themselves what they are, and it is so."""

import re
from pathlib import Path

import pytest
from support.plans.planned_presets import CLAIM, architecture, cluster_presets

from isoloss.engine.rl.config import RLConfig
from isoloss.models.weights.weight_map import num_parameters

NAMES = {"8b": "Qwen3-8B", "32b": "Qwen3-32B", "70b": "Llama-3.1-70B", "30b_a3b": "Qwen3-30B-A3B",
         "27b": "Qwen3.5-27B", "26b_a4b": "Gemma-4-26B-A4B"}  # fmt: skip


@pytest.mark.parametrize("preset", cluster_presets(), ids=str)
def test_a_preset_is_what_its_first_lines_say(preset, tmp_path):
    head = CLAIM.sub("", preset.text.partition("\ndata:")[0])
    words = " ".join(head.replace("\n#", " ").split())
    config = preset.config(tmp_path)
    longest = config.rollout.max_new_tokens if isinstance(config, RLConfig) else config.data.max_length
    assert (f"{longest:,} tokens" in words) or (longest == 131072 and "128k tokens" in words)
    assert config.data.max_length <= config.batch.max_tokens  # no row runs alone for its length
    assert f"Planned for {NAMES[preset.size]}, not run on a GPU" in words
    assert config.train.precision == "bf16"
    assert ("on one node" in words) == ([claim.gpus for claim in preset.claims] == [8])
    assert ("on one or two nodes" in words) == ([claim.gpus for claim in preset.claims] == [8, 16])
    assert ("on one GPU" in words) == ([claim.gpus for claim in preset.claims] == [1])
    assert ("on the same GPUs" in words) == (isinstance(config, RLConfig) and config.rollout.colocated)


@pytest.mark.parametrize("preset", cluster_presets(), ids=str)
def test_a_preset_says_what_it_keeps_in_cpu_memory(preset, tmp_path):
    """Of each parameter the weight, two moments and the gradient, in fp32."""
    config = preset.config(tmp_path)
    words = " ".join(preset.text.replace("\n#", " ").split())
    share = config.memory.offload_optimizer
    gigabytes = round(16 * share * num_parameters(architecture(tmp_path)) / 1e9, -1)
    assert (f"stepped in CPU memory, {gigabytes:,.0f} GB" in words) == (share > 0)
    assert ("half of the optimizer" in words) == (share == 0.5) and share in (0, 0.5, 1)


@pytest.mark.parametrize("preset", cluster_presets(), ids=str)
def test_layers_are_computed_again_only_where_it_is_said(preset, tmp_path):
    memory = preset.config(tmp_path).memory
    words = " ".join(preset.text.replace("\n#", " ").split())
    assert memory.recompute in ("none", "full")
    if memory.recompute == "none":
        assert "computed again" not in words
    elif memory.recompute_layers is None:
        assert "every layer is computed again" in words
    else:
        assert f"{memory.recompute_layers} of {architecture(tmp_path).num_layers} layers are computed again" in words


PAGE = Path(__file__).parents[2] / "docs" / "presets.md"
ROW = re.compile(r"^\| `(\w+_(?:1gpu|h100))` \| (\d+) \| `(.+?)` \| ([\d./ ]+) \| ([\d.]+) \| [\d,]+ \|$", re.MULTILINE)


@pytest.mark.parametrize(("heading", "recipe"), (("## Supervised fine-tuning", "sft"), ("## GRPO and DAPO", "grpo")))
def test_the_page_tells_what_presets_claim(heading, recipe):
    part = PAGE.read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    told = {
        (name, int(gpus), layout, max(float(peak) for peak in peaks.split("/")), float(seconds))
        for name, gpus, layout, peaks, seconds in ROW.findall(part)
    }
    assert told == {
        (preset.name, claim.gpus, claim.layout, claim.peak, claim.seconds)
        for preset in cluster_presets(recipe)
        for claim in preset.claims
    }
