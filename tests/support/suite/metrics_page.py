"""The keys of metrics that docs/reading_a_run.md explains."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reading_a_run.md"
# An item of a list begins with the keys that it explains, and may name more after a full stop: `a`, `b`: ... `c`: ...
ITEM = re.compile(r"((?:`[\w@/]+`(?:, )?)+)(?: \([^)]*\))?:")


def explained() -> set[str]:
    """Return the keys of the page, with NAME and SOURCE where a run has its own names."""
    items = re.findall(r"^- (.*(?:\n  .*)*)", PAGE.read_text(), re.M)
    return {key for item in items for keys in ITEM.findall(item) for key in re.findall(r"`([^`]+)`", keys)}


def unexplained(keys: Iterable[str]) -> set[str]:
    """Return those of a run's keys that the page does not explain."""
    known = explained()
    parts = {key for key in keys if key.startswith("reward/")} if "reward/NAME" in known else set()
    # Of several data sources each has its own: gsm8k/reward_mean.
    return {key for key in keys if key not in known | parts and key.partition("/")[2] not in known}


def keys_of_runs(folder: Path) -> set[str]:
    """Return the keys of metrics.jsonl and eval.jsonl of every run under a folder."""
    files = [file for name in ("metrics.jsonl", "eval.jsonl") for file in folder.rglob(name)]
    files = [file for file in files if ".cache" not in file.relative_to(folder).parts]  # rows that a program gave
    return {key for file in files for line in file.read_text().splitlines() for key in json.loads(line)}
