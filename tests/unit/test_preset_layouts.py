"""The presets of supervised fine-tuning for clusters say of themselves what they are, and it is so."""

import pytest

from isoloss.engine.config import Config
from isoloss.recipes.launch import CONF, compose_config

# What the first lines of a file promise: GPUs, how the ranks share the model and its rows, and the longest document.
PROMISED = {
    "8b_h100": (8, {"tp": 2, "dp": 4}, 8192, "one node of 8", "tp 2 x dp 4"),
    "8b_128k_h100": (16, {"tp": 2, "ulysses": 4, "ring": 2}, 131072, "two nodes of 8", "tp 2 x Ulysses 4", "ring of 2"),
    "32b_h100": (16, {"tp": 8, "pp": 2, "vpp": 2}, 8192, "two nodes of 8", "tp 8 inside a node x pp 2"),
    "70b_h100": (32, {"tp": 8, "pp": 4, "vpp": 2}, 8192, "four nodes of 8", "tp 8 inside a node x pp 4", "interleaved"),
    "30b_a3b_h100": (16, {"ep": 8, "dp": 16}, 8192, "two nodes of 8", "over the 8 GPUs"),
}
AXES = ("tp", "pp", "vpp", "ulysses", "ring", "ep", "dp")


@pytest.mark.parametrize("preset", PROMISED)
def test_a_preset_is_what_its_first_lines_say(preset, tmp_path):
    gpus, axes, longest, *words = PROMISED[preset]
    head = " ".join((CONF / "sft" / "preset" / f"{preset}.yaml").read_text().replace("\n#", "").split("\n")[0].split())
    assert all(word in head for word in words), head
    given = [f"preset={preset}", f"model.path={tmp_path}", "data.train=[rows.jsonl]"]
    config, _, _ = compose_config("sft", Config, given)
    layout = config.parallel.layout().with_world(gpus)
    assert {axis: getattr(layout, axis) for axis in AXES} == dict.fromkeys(AXES, 1) | axes
    assert config.data.max_length == longest <= config.batch.max_tokens  # no row runs alone for its length
    assert config.train.precision == "bf16"
    assert config.memory.recompute == {"8b_128k_h100": "full", "30b_a3b_h100": "selective"}.get(preset, "none")
