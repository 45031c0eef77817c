"""Bugs are drawn at random, and each is judged by the rows that run its function (fresh.py)."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as where it runs as a script
import fresh

SUMS = '''
LIMIT: int | None = 3


def add(a: int | None, b: int) -> int:
    """Adds."""
    return a + b


def double(a):
    return a * 2


def unused(a):
    return a - 1
'''
TESTS = """
import pytest
from isoloss.engine.sums import add, double

def test_add():
    assert add(1, 2) == 3

@pytest.mark.slow
def test_double():
    assert double(3) == 6
"""


@pytest.fixture
def project(tmp_path):
    """A repository of three functions: a quick row sees one, a slow row another, nobody the third."""
    root = tmp_path / "project"
    for folder in ("tests/mutants", *fresh.PACKAGES):
        (root / folder).mkdir(parents=True)
    (root / "engine/sums.py").write_text(SUMS)
    (root / "tests/test_sums.py").write_text(TESTS)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    full\n    slow\n    sglang\n    docs\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_a_drawn_bug_changes_a_line_that_something_evaluates(project):
    drawn = fresh.draw(project, 99, seed=1)
    assert all(mutant.fault(project) in (None, f"{mutant.name}: it names no tests") for mutant in drawn)
    lines = [line for mutant in drawn for line in mutant.before.split("\n") if line not in mutant.after.split("\n")]
    assert len(lines) == len(drawn)
    assert {line.strip() for line in lines} == {"return a + b", "return a * 2", "return a - 1", "LIMIT: int | None = 3"}
    assert fresh.draw(project, 2, seed=1) == drawn[:2]


def test_each_is_judged_by_the_rows_that_come_by(project, tmp_path, capsys):
    file = tmp_path / "drawn.toml"
    assert fresh.main([str(file), "--count", "4", "--seed", "1", "--slow"], project, ()) == 0
    out = capsys.readouterr().out
    names = {entry["before"].strip(): entry["name"] for entry in tomllib.loads(file.read_text())["mutant"]}
    told = {line.split()[-2]: line.split() for line in out.splitlines() if "fresh-" in line and "SURVIVED" not in line}
    assert (
        told[names["return a + b"]][0] == "pinned" and told[names["return a + b"]][-1] == "tests/test_sums.py::test_add"
    )
    assert told[names["return a * 2"]] == ["SLOW", names["return a * 2"], "tests/test_sums.py::test_double"]
    assert names["return a - 1"] not in told
    assert "1 of 4 were noticed alone" in out
    assert (project / "engine/sums.py").read_text() == SUMS

    found = file.with_suffix(".jsonl").read_text()
    assert fresh.main([str(file)], project, ()) == 0
    assert file.with_suffix(".jsonl").read_text() == found, "nothing was run again"
