"""The CPU seconds of the tests are held to tests/budget.toml, whatever machine they run on."""

import dataclasses
import os

import pytest
from support.suite import budget, calibration, durations
from support.suite.durations import Row

BUDGET = budget.Budget(
    calibration=0.1,
    folders={"test": {"rl": 60, "unit": 40}, "test-all": {"rl": 160, "unit": 40}},
    rows={"rl/test_a.py::test_a[1]": 50.0, "rl/test_b.py::test_b": 10.0, "unit/test_c.py::test_c": 40.0},
    history=[{"test": 90, "test-all": 190, "why": "the first"}, {"test": 100, "test-all": 200, "why": "a new loss"}],
)


def rows(**seconds: float) -> list[Row]:
    """What BUDGET allows, with these in place of some."""
    cpu = {"a": 50.0, "b": 10.0, "c": 40.0, "full": 100.0} | seconds
    return [
        Row(1.0, cpu["a"], "test", "tests/rl/test_a.py::test_a[1]"),
        Row(1.0, cpu["b"], "test", "tests/rl/test_b.py::test_b"),
        Row(1.0, cpu["c"], "test", "tests/unit/test_c.py::test_c"),
        Row(1.0, cpu["full"], "test-all", "tests/rl/test_a.py::test_a[2]"),
    ]


@pytest.mark.parametrize("slow", [1.0, 1.7])
def test_growth_of_more_than_five_percent_fails_on_a_machine_of_any_speed(slow):
    def check(**seconds: float) -> list[str]:
        scaled = [dataclasses.replace(row, cpu=row.cpu * slow) for row in rows(**seconds)]
        return budget.check(scaled, [9.0, 0.1 * slow, 0.0], BUDGET)

    assert check() == check(c=41.9) == check(full=107.0) == []
    lines = check(c=43.0)
    assert lines == [
        f"make {verb}, unit: 43 CPU seconds of 40: +3.0 unit/test_c.py::test_c" for verb in ("test", "test-all")
    ]
    (of_all, of_folder) = check(full=120.0)
    assert of_all.startswith("make test-all, all: 220 CPU seconds of 200: +120.0 rl/test_a.py::test_a[2] (new)")
    assert of_folder.startswith("make test-all, rl: 180 CPU seconds of 160: +120.0 rl/test_a.py::test_a[2] (new)")


def test_a_run_of_make_test_is_compared_with_its_own_budget():
    quick = rows()[:3]
    assert budget.check(quick, [0.1], BUDGET) == []
    lines = budget.check([dataclasses.replace(row, cpu=1.2 * row.cpu) for row in quick], [0.1], BUDGET)
    assert [line.split(":")[0] for line in lines] == ["make test, all", "make test, rl", "make test, unit"]


def test_a_new_folder_has_no_seconds():
    row = Row(1.0, 3.0, "test", "tests/new/test_a.py::test_a")
    lines = budget.check([*rows(), row], [0.1], BUDGET)
    assert lines == [
        f"make {verb}, new: 3 CPU seconds of 0: +3.0 new/test_a.py::test_a (new)" for verb in ("test", "test-all")
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"folders": BUDGET.folders | {"test": {"rl": 61, "unit": 40}}}, "the folders of test add up to 101 and not"),
        ({"history": [*BUDGET.history[:1], {**BUDGET.history[1], "why": " "}]}, "history entry 1 says no why"),
    ],
)
def test_nobody_raises_it_without_a_reason(changes, says):
    (line,) = budget.check(rows(), [0.1], dataclasses.replace(BUDGET, **changes))
    assert line.startswith(says)


def test_what_is_written_is_read_again(tmp_path, capsys):
    file, path = tmp_path / "durations.tsv", tmp_path / "budget.toml"
    more = Row(2.0, 7.0, "test", "tests/unit/test_c.py::test_c['\"\\n é]")
    lines = [f"{row.wall}\t{row.cpu}\t{row.verb}\t{row.name}" for row in [*rows(), more]]
    file.write_text("\n".join([*lines, "0\t0.2\tcalibration\tgw0", "1\t99\tnone\ttests/docs/test_d.py::test_d"]) + "\n")
    with pytest.raises(SystemExit):
        budget.main([], file, path)  # there is none yet
    assert budget.main(["--write", 'it "is"\nso'], file, path) == 0
    first = budget.Budget.parse(path.read_text())
    assert first.folders == {"test": {"rl": 60, "unit": 47}, "test-all": {"rl": 160, "unit": 47}}
    assert first.rows["unit/test_c.py::test_c['\"\\n é]"] == 7.0 and first.calibration == 0.2
    assert budget.main(["--write", "again"], file, path) == 0
    assert [entry["why"] for entry in budget.Budget.parse(path.read_text()).history] == ['it "is"\nso', "again"]
    capsys.readouterr()
    assert budget.main([], file, path) == 0
    file.write_text(file.read_text().replace("\t100.0\t", "\t130.0\t"))
    assert budget.main([], file, path) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "make test-all: 207 CPU seconds of 207 (207 on this machine, which is 1.00 times as slow)"
    assert told[-1].startswith("BUDGET: make test-all, rl: 190 CPU seconds of 160: +30.0 rl/test_a.py::test_a[2]")


@pytest.mark.parametrize("argv", [["--write", " "], ["--write", "of make test alone"]])
def test_a_budget_wants_a_reason_and_a_whole_run(argv, tmp_path):
    file = tmp_path / "durations.tsv"
    file.write_text("1\t50\ttest\ttests/rl/test_a.py::test_a\n0\t0.1\tcalibration\tgw0\n")
    with pytest.raises(SystemExit):
        budget.main(argv, file, tmp_path / "budget.toml")
    assert not (tmp_path / "budget.toml").exists()


def test_a_run_writes_the_verb_of_each_test_and_how_fast_the_machine_was(pytester):
    pytester.makeconftest(
        "from support.suite.durations import Durations\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Durations(config))\n"
    )
    pytester.makepyfile(
        "import pytest, time\n"
        "def test_quick():\n"
        "    ends = time.process_time() + 0.3\n"
        "    while time.process_time() < ends: pass\n"
        "@pytest.mark.full\ndef test_full(): pass\n"
        "@pytest.mark.docs\n@pytest.mark.full\ndef test_docs(): pass\n"
    )
    assert pytester.inline_run("-p", "no:cacheprovider").ret == 0
    tests, calibrations = durations.read(pytester.path / durations.FILE)
    assert [row.verb for row in tests] == ["test", "test-all", "none"]
    assert 0.3 <= tests[0].cpu < 0.6 and tests[1].cpu < 0.1, "the calibration is no test's"
    assert len(calibrations) == 1 and calibrations[0] > 0.01


def test_calibration_counts_the_cpu_time_of_its_thread():
    before = os.times()
    spent = calibration.cpu_seconds()
    after = os.times()
    assert 0 < spent <= after.user + after.system - before.user - before.system + 0.02
