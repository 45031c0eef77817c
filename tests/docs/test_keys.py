"""The page of other trainers' keys is what their tables say."""

import re
import tomllib
from pathlib import Path

from isoloss.tools.dev import keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "keys.md").read_text()


def test_the_page_is_generated_anew():
    assert keys.page() == PAGE, "run python -m isoloss.tools.dev.keys"


def test_a_key_stands_in_the_row_and_column_of_its_table():
    """Read from the tables without their reader."""
    rows = {cells[0].strip("` "): cells[1:] for line in PAGE.splitlines() if line.startswith("| `")
            for cells in [line.strip("|").split("|")]}  # fmt: skip
    files = {"verl_rl": 0, "verl_sft": 0, "trl_common": 1, "trl_grpo": 1, "trl_sft": 1, "slime": 2}
    shown = 0
    for name, column in files.items():
        table = tomllib.loads((ROOT / "tools" / "migrate" / f"{name}.toml").read_text())["keys"]
        for key, fields in table.items():
            for ours in re.findall(r"([\w.]+)(?:\|\S+)?", fields.get("to", "")):
                short = key.replace("actor_rollout_ref.", "A.")
                assert f"`{short}`" in rows[ours][column], (key, ours)
                shown += 1
    assert shown > 200


def test_a_pipe_names_no_key_of_ours():
    """`algorithm.clip_high|--eps-clip-high`: the key counts only where the other one is not set."""
    assert "|--eps" not in PAGE and "`--eps-clip`" in PAGE
