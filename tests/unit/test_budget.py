"""The CPU seconds of the tests are held to tests/budget.toml, whatever machine they run on."""

import dataclasses
import os

import pytest
from support.suite import budget, calibration, durations
from support.suite.durations import Row

BUDGET = budget.Budget(
    calibration=0.1,
    rows={
        "test": {"rl/test_b.py::test_b": 10.0, "unit/test_c.py::test_c": 40.0, f"unit: {budget.SHORT}": 2.0},
        "test-all": {f"rl/test_a.py::test_a[{row}]": 10.0 for row in range(9)},
    },
    history=[{"test": 50, "test-all": 90, "why": "the first"}, {"test": 52, "test-all": 142, "why": "a new loss"}],
)


def rows(slow: float = 1.0, **seconds: float) -> list[Row]:
    """What BUDGET allows, with these in place of some, on a machine that is so many times as slow."""
    cpu = {"b": 10.0, "c": 40.0, "short": 1.0, "new": 0.0, "full": 10.0} | seconds
    found = [
        Row(1.0, cpu["b"], "test", "tests/rl/test_b.py::test_b"),
        Row(1.0, cpu["c"], "test", "tests/unit/test_c.py::test_c"),
        *(Row(1.0, cpu["short"] / 2, "test", f"tests/unit/test_d.py::test_d[{row}]") for row in range(4)),
        Row(1.0, cpu["full"], "test-all", "tests/rl/test_a.py::test_a[0]"),
        *(Row(1.0, 10.0, "test-all", f"tests/rl/test_a.py::test_a[{row}]") for row in range(1, 9)),
        *([Row(1.0, cpu["new"], "test", "tests/new/test_e.py::test_e")] if cpu["new"] else []),
    ]
    return [dataclasses.replace(row, cpu=row.cpu * slow) for row in found]


@pytest.mark.parametrize("slow", [0.6, 1.0, 1.7])
def test_growth_of_more_than_five_percent_fails_on_a_machine_of_any_speed(slow):
    def check(**seconds: float) -> list[str]:
        return budget.check(rows(slow, **seconds), [9.0, 0.1 * slow, 0.0], BUDGET)

    assert check() == check(c=59.0) == check(b=14.9) == check(short=1.4) == check(new=2.5) == []
    assert check(c=61.0) == [
        "make test: 73 CPU seconds of 52: +21.0 unit/test_c.py::test_c",
        "make test-all: 163 CPU seconds of 142: +21.0 unit/test_c.py::test_c",
    ]
    assert check(full=18.0) == ["make test-all: 150 CPU seconds of 142: +8.0 rl/test_a.py::test_a[0]"]
    assert check(new=3.0) == ["make test: 55 CPU seconds of 52: +3.0 new/test_e.py::test_e (new)"]
    assert check(short=4.0)[0].startswith("make test: 58 CPU seconds of 52: +2.0 unit/test_d.py::test_d[")


def test_what_leaves_makes_room():
    found = [row for row in rows(full=18.0) if not row.name.endswith("[1]")]
    assert budget.check(found, [0.1], BUDGET) == []
    assert budget.check(rows(b=2.0, full=18.0), [0.1], BUDGET) == []  # as where another row pays for what is shared


def test_what_makes_all_rows_slower_fails():
    assert budget.check(rows(1.9), [0.1], BUDGET) == []
    assert budget.check(rows(2.5), [0.1], BUDGET) == ["rows take 2.50 times what they took, the fixed work 1.00 times"]


def test_a_run_of_make_test_is_compared_with_its_own_budget():
    (line,) = budget.check([row for row in rows(new=5.0) if row.verb == "test"], [0.1], BUDGET)
    assert line == "make test: 57 CPU seconds of 52: +5.0 new/test_e.py::test_e (new)"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rows": BUDGET.rows | {"test": {**BUDGET.rows["test"], "rl/test_b.py::test_b": 11.0}}},
            "the rows of test add",
        ),
        ({"history": [*BUDGET.history[:1], {**BUDGET.history[1], "why": " "}]}, "history entry 1 says no why"),
    ],
)
def test_nobody_raises_it_without_a_reason(changes, says):
    line, *_ = budget.check(rows(), [0.1], dataclasses.replace(BUDGET, **changes))
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
    assert first.rows == {
        "test": {**BUDGET.rows["test"], "unit/test_c.py::test_c['\"\\n é]": 7.0},
        "test-all": BUDGET.rows["test-all"],
    }
    assert first.calibration == 0.2 and first.history == [{"test": 59, "test-all": 149, "why": 'it "is"\nso'}]
    assert budget.main(["--write", "again"], file, path) == 0
    assert [entry["why"] for entry in budget.Budget.parse(path.read_text()).history] == ['it "is"\nso', "again"]
    capsys.readouterr()
    assert budget.main([], file, path) == 0
    file.write_text(file.read_text().replace("\t40.0\t", "\t90.0\t"))
    assert budget.main([], file, path) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("make test-all: 149 CPU seconds, budget 149 (this machine is 1.00 times as slow")
    assert told[-1] == "BUDGET: make test-all: 199 CPU seconds of 149: +50.0 unit/test_c.py::test_c"


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
        "@pytest.mark.slow\ndef test_slow(): pass\n"
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
