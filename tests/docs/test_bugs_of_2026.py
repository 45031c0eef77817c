"""The page of other trainers' bugs: what it says holds them is there."""

import re
import tomllib
from pathlib import Path

from isoloss.tools.prove.bugs import PLANTED_BUGS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bugs_of_2026.md"
HOLDS = re.compile(r"(plant|mutant|test) `([^`]+)`")


def bugs() -> list[str]:
    """What the page says of each, in one line."""
    text = re.sub(r"\n  +", " ", PAGE.read_text().partition("\n## ")[2])
    return [line for line in text.splitlines() if line.startswith("- **")]


def test_there_are_thirty_with_a_thread_and_a_cost():
    assert len(bugs()) == len(set(bugs())) == 30
    for bug in bugs():
        assert re.match(r"- \*\*[^*]+\.\*\* [\w/-]+ \d{2,5}\b.*\. Cost: .*\. Held by ", bug), bug


def test_the_table_of_the_front_page_is_of_them():
    rows = re.findall(r"^\| ([\w-]+) (\d+) \|.*\| `([\w-]+)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 8
    for trainer, thread, plant in rows:
        of_thread = [bug for bug in bugs() if re.search(rf"{trainer} [^.]*\b{thread}\b", bug)]
        assert plant in PLANTED_BUGS and any(f"plant `{plant}`" in bug for bug in of_thread), (trainer, thread)


def test_what_holds_them_is_there():
    catalogue = [tomllib.loads(file.read_text()) for file in (ROOT / "tests" / "mutants").glob("*.toml")]
    mutants = {mutant["name"] for file in catalogue for mutant in file["mutant"]}
    for bug in bugs():
        holds = HOLDS.findall(bug.partition("Held by")[2])
        assert holds, bug
        for kind, name in holds:
            if kind == "test":
                file, _, function = name.partition("::")
                assert f"\ndef {function}(" in (ROOT / file).read_text(), name
            else:
                assert name in (PLANTED_BUGS if kind == "plant" else mutants), name
