"""The catalogue of one-line bugs fits today's code, and its runner (run.py) tells the truth.

An entry of a *.toml file here:

    [[mutant]]
    name = "clipping-off"           # once in the catalogue
    file = "engine/step/optimizer.py"
    before = '''the line, or lines, which occur once in the file'''
    after = '''what stands there instead'''
    suffers = "what a user would suffer"
    tests = ["tests/numerics/test_x.py::test_y"]  # one at least must fail; few and fast
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

NO_LINE_RUNS = {"engine/rl/backends/protocol.py"}  # a protocol
RUNNER = Path(__file__).with_name("run.py")
sys.path.insert(0, str(RUNNER.parent))  # as where it runs as a script
SPEC = importlib.util.spec_from_file_location("mutants_run", RUNNER)
run = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = run
SPEC.loader.exec_module(run)

MUTANT = '''
[[mutant]]
name = "{name}"
file = "engine/sums.py"
before = """{before}"""
after = """{after}"""
suffers = "sums are wrong"
tests = ["tests/test_sums.py"]
'''


@pytest.fixture
def project(tmp_path):
    """A repository of one function and one test, which sees a wrong sum and no wrong default."""
    root = tmp_path / "project"
    (root / "tests/mutants").mkdir(parents=True)
    (root / "engine").mkdir()
    (root / "engine/sums.py").write_text("def add(a, b=0):\n    return a + b\n")
    (root / "tests/test_sums.py").write_text(
        "from isoloss.engine.sums import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    )
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    full\n    slow\n    sglang\n    docs\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    def written(*mutants: tuple[str, str, str]) -> Path:
        text = "".join(MUTANT.format(name=name, before=before, after=after) for name, before, after in mutants)
        (root / "tests/mutants/engine.toml").write_text(text)
        return root

    return written


def test_every_mutant_applies():
    mutants = run.read_catalogue(run.ROOT)
    assert [fault for mutant in mutants if (fault := mutant.fault(run.ROOT))] == []
    assert len(mutants) >= 80


def test_every_module_has_one():
    """A module without a mutant is a module whose tests nobody has tried to fool."""
    files = {mutant.file for mutant in run.read_catalogue(run.ROOT)}
    modules = {
        str(path.relative_to(run.ROOT))
        for package in ("engine", "models", "parallel", "tools")
        for path in (run.ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    without = sorted(modules - files - NO_LINE_RUNS)
    assert not without, f"tests/mutants/*.toml has no mutant of {', '.join(without)}"


def test_the_runner_tells_killed_from_survived(project, capsys):
    root = project(("wrong-sum", "a + b", "a - b"), ("wrong-default", "b=0", "b=1"))
    assert run.main([], root, ()) == 1
    out = capsys.readouterr().out
    assert "1 of 2 killed, 1 of them by make test" in out
    assert out.splitlines()[-1] == "SURVIVED: wrong-default (engine/sums.py): sums are wrong"
    assert run.main(["wrong-sum"], root, ()) == 0
    assert (root / "engine/sums.py").read_text() == "def add(a, b=0):\n    return a + b\n"


def test_a_crash_at_import_is_no_kill(project, capsys):
    assert run.main([], project(("crash", "def add(a", "def add((a")), ()) == 1
    assert "BROKEN: crash" in capsys.readouterr().out


def test_tests_that_fail_anyway_kill_nothing(project, capsys):
    root = project(("wrong-sum", "a + b", "a - b"))
    (root / "engine/sums.py").write_text("def add(a, b=0):\n    return 2 * (a + b)\n")
    assert run.main([], root, ()) == 1
    assert "must pass before a mutant is planted" in capsys.readouterr().err


def test_a_mutant_is_pinned_to_the_cheapest_row_that_notices(project, capsys):
    """Row 5 is run after the others; 1 and 2 see nothing, and 5 would notice as well as 3, by far longer."""
    root = project(("wrong-sum", "a + b", "a - b"), ("wrong-default", "b=0", "b=1"))
    (root / "tests/test_sums.py").write_text(
        "import time, pytest\nfrom isoloss.engine.sums import add\n\n"
        "@pytest.mark.parametrize('row', [5, pytest.param(4, marks=pytest.mark.slow), 3, 2, 1])\n"
        "def test_add(row):\n    time.sleep(row / 5)\n    assert add(row, 1) == row + 1 or row < 3\n"
    )
    catalogue = root / "tests/mutants/engine.toml"
    before = catalogue.read_text()
    assert run.main(["--pin"], root, ()) == 1
    assert "SURVIVED" in capsys.readouterr().out
    found = (root / ".mutant-pins.jsonl").read_text()
    pinned = before.replace("test_sums.py", "test_sums.py::test_add[3]", 1)
    assert catalogue.read_text() == pinned

    catalogue.write_text(before)
    assert run.main(["--apply"], root, ()) == 1
    assert catalogue.read_text() == pinned
    assert run.main(["--pin", "--resume"], root, ()) == 1
    assert (root / ".mutant-pins.jsonl").read_text() == found, "nothing was run again"


def test_a_test_of_slow_rows_alone_is_refused(project, capsys):
    root = project(("wrong-sum", "a + b", "a - b"))
    test = root / "tests/test_sums.py"
    test.write_text("import pytest\npytestmark = pytest.mark.slow\n" + test.read_text())
    assert run.main([], root, ()) == 1
    assert "make test-all runs no row of tests/test_sums.py" in capsys.readouterr().err


def test_lists_of_tests_of_any_form_become_a_row():
    text = (
        '[[mutant]]\nname = "a"\ntests = [\n    "x[1]",\n    "y",\n]\n\n# Of b.\n[[mutant]]\nname = "b"\ntests = ["z"]'
    )
    assert run.pinned.name_rows(text, {"a": "x[]]", "b": 'z["]'}) == (
        '[[mutant]]\nname = "a"\ntests = ["x[]]"]\n\n# Of b.\n[[mutant]]\nname = "b"\ntests = ["z[\\"]"]'
    )


@pytest.mark.parametrize(
    "mutants, says",
    [
        ([("gone", "a * b", "a - b")], "gone: its line occurs 0 times in engine/sums.py"),
        ([("twice", "a", "c")], "twice: its line occurs 3 times in engine/sums.py"),
        ([("same", "a + b", "a + b")], "same: it changes nothing"),
    ],
)
def test_a_mutant_that_does_not_apply_is_an_error(project, capsys, mutants, says):
    assert run.main([], project(*mutants), ()) == 1
    assert says in capsys.readouterr().err
