"""The runner of continuous integration: every job is run, what failed is named last, and a signal leaves nothing."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support.runs.waiting import until

RUN = Path(__file__).parents[2] / ".ci/run"
MAKE = """#!/bin/bash
echo "$@" >> "$HERE/jobs"
case "$1" in
  test-all) echo "12 passed, 1 skipped in 3.40s (0:00:03)"; echo a warning ;;
  grpo) mkdir -p runs/grpo-tiny && echo x > runs/grpo-tiny/reward_curve.png ;;
  dapo) mkdir -p "$logs/dapo" && echo x > "$logs/dapo/reward_curve.png" ;;
esac
[ "$1" = "$HANG" ] && sleep 600
[ "$1" != "$FAIL" ] || { echo "what is wrong with $1" >&2; exit 2; }
"""


@pytest.fixture
def start(tmp_path):
    """start(**environment) -> a run of CI in an empty folder with a `make` that does nothing."""
    for folder in (".ci", "bin", "runs"):
        (tmp_path / folder).mkdir()
    shutil.copy(RUN, tmp_path / ".ci/run")
    (tmp_path / "bin/make").write_text(MAKE)
    (tmp_path / "bin/make").chmod(0o755)

    def start(**environment: str) -> subprocess.Popen:
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        more = {"PATH": path, "HERE": str(tmp_path), "FAIL": "", "HANG": "", "TMPDIR": str(tmp_path)} | environment
        return subprocess.Popen([tmp_path / ".ci/run"], env=os.environ | more, stdout=subprocess.PIPE, text=True)

    return start


def test_every_job_runs_once_and_results_come_last(start, tmp_path):
    run = start()
    out, _ = run.communicate(timeout=60)
    jobs = [job.split()[0] for job in (tmp_path / "jobs").read_text().splitlines()]
    assert run.returncode == 0 and out.splitlines()[-1] == "all passed"
    assert jobs[0] == "environments" and len(set(jobs)) == len(jobs) == 14
    (result,) = [line for line in out.splitlines() if line.endswith("12 passed, 1 skipped in 3.40s (0:00:03)")][1:]
    assert "status 0  make test-all" in result


@pytest.mark.parametrize(("job", "others"), [("types", 13), ("test-all", 13), ("environments", 0)])
def test_a_failure_is_named_last_and_stops_no_other_job(start, tmp_path, job, others):
    run = start(FAIL=job)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and out.splitlines()[-1].startswith(f"FAILED: make {job}")
    assert out.count(f"what is wrong with {job}") == 1 and "all passed" not in out
    assert len((tmp_path / "jobs").read_text().splitlines()) == 1 + others


def test_a_run_that_is_ended_shows_what_was_under_way_and_leaves_no_process(start, tmp_path):
    run = start(HANG="test-all")
    jobs = tmp_path / "jobs"
    until(lambda: jobs.exists() and "dapo" in jobs.read_text(), "the other jobs ran")
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 143 and "12 passed, 1 skipped" in out[out.index("== stopped while this ran") :]
    assert psutil.wait_procs(children, timeout=10)[1] == []
