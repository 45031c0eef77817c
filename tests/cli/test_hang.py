"""A rank that stops moving is found and named, with its line, and the run ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks.te_pool import environment
from support.runs import warm
from support.runs.waiting import LONG

from isoloss.engine.instruments.watchdog import Frame, Position, Watchdog, position_of, report, unfinished

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
COLLECTIVE = r"(all_reduce|all_gather|barrier|all_gather_object|monitored_barrier)"
WHAT = {
    "sleep": r"rank 1: at .*tests/cli/hangs\.py:\d+ in sleep",
    "hold_the_interpreter": r"rank 1: at .*tests/cli/hangs\.py:\d+ in hold_the_interpreter",
    "stop": r"rank 1 does not answer \(its process \d+ is stopped\)",
    "meet_alone": rf"rank \d: waiting for the others in {COLLECTIVE} of .*:\d+ in \w+",
}


@pytest.mark.parametrize("kind", ["sleep", *(pytest.param(k, marks=pytest.mark.full) for k in WHAT if k != "sleep")])
def test_the_rank_that_keeps_the_others_waiting_is_named(kind, arguments, tmp_path):
    argv = [*arguments, "train.steps=9", "train.timeout=4", f"output_dir={tmp_path}/out"]
    ended = warm.run(
        [*TORCHRUN, "-m", "cli.hangs", kind, "1", *argv],
        capture_output=True, text=True, env=environment(), check=False, timeout=LONG,
    )  # fmt: skip
    assert ended.returncode == 1
    (told,) = re.findall(r"^isoloss: error: .*$", ended.stderr, re.MULTILINE)
    lines = [told, *re.findall(r"^isoloss: rank.*$", ended.stderr, re.MULTILINE)]
    assert told.startswith("isoloss: error: nothing has moved for train.timeout=4 seconds: rank"), ended.stderr
    assert re.search(WHAT[kind], told) and "start again with checkpoint.resume=true" in told
    assert len(lines) == 2 and re.search(
        rf"rank [01]: waiting for the others in {COLLECTIVE} of [\w/]+\.py:\d+ in", lines[1]
    ), lines
    assert {path.name for path in (tmp_path / "out" / "stacks").iterdir()} >= {"rank_0.txt", "rank_1.txt"}


PROCESS = """
import sys, time
from pathlib import Path
from isoloss.engine.instruments import watchdog

def begun():
    dog = watchdog.Watchdog(Path(sys.argv[1]), 2.0, 0, 1)
    dog.begin()
    return dog

def beating(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watchdog.beat()
        time.sleep(0.05)

def stuck():
    time.sleep(60)

watchdog.SECONDS_FOR_OTHERS = 1.0
dog = begun()
beating(3)
with watchdog.patient():
    time.sleep(4)
beating(1)
dog.end()
print("moved", Path(sys.argv[1]).exists(), flush=True)
begun()
beating(0.5)
stuck()
"""


def test_a_process_that_moves_lives_and_one_that_does_not_ends(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "stacks")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=LONG)
    assert ended.stdout == "moved False\n" and ended.returncode == 1
    assert "train.timeout=2 seconds: rank 0: at <string>:" in ended.stderr and "in stuck; the stacks" in ended.stderr
    assert position_of((tmp_path / "stacks" / "rank_0.txt").read_text()).frame.name == "stuck"


def test_stacks_of_a_rank_that_went_on_are_forgotten(tmp_path):
    """The timer goes off up to a tenth of train.timeout early."""
    watchdog = Watchdog(tmp_path / "stacks", 1000.0, 0, 1)
    watchdog.begin()
    file = tmp_path / "stacks" / "rank_0.txt"
    head = file.read_text()
    watchdog._file.write("\nTimeout (0:00:04)!\nThread ...")
    watchdog._file.flush()
    with watchdog.patient():
        pass
    assert file.read_text() == head
    watchdog.end()
    assert not file.exists()


DUMP = """{"pid": 7, "host": "here", "main": "0x00000000000000aa"}
Timeout (0:00:04)!
Thread 0x00000000000000bb (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 11 in broadcast
  File "/code/engine/checkpoint/saver.py", line 5 in _write

Thread 0x00000000000000aa (most recent call first):
"""
IN_ALL_REDUCE = """  File "/site/torch/distributed/distributed_c10d.py", line 3049 in all_reduce
  File "/site/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/site/somebody.py", line 3 in sums
  File "/code/app.py", line 9 in <module>
"""


def test_where_a_rank_is_by_its_stacks():
    assert position_of(DUMP + IN_ALL_REDUCE) == Position("all_reduce", Frame("/code/app.py", 9, "<module>"))
    at_work = '  File "/code/reward.py", line 3 in score\n' + IN_ALL_REDUCE.splitlines()[-1] + "\n"
    assert position_of(DUMP + at_work) == Position(None, Frame("/code/reward.py", 3, "score"))
    # Backward of a device runs in a thread of its own; a checkpoint's thread may wait meanwhile.
    backward = '  File "/site/torch/autograd/graph.py", line 8 in _engine_run_backward\n'
    assert position_of(DUMP + backward).collective is None
    device = f"{DUMP}{backward}\nThread 0x00000000000000cc (most recent call first):\n{IN_ALL_REDUCE}"
    assert position_of(device).collective == "all_reduce"
    assert position_of(DUMP.partition("Timeout")[0]) is None and position_of("") is None


def test_who_keeps_whom_waiting():
    waiting, other = Position("all_reduce", Frame("/a.py", 1, "f")), Position("barrier", Frame("/b.py", 2, "g"))
    at_work = Position(None, Frame("/c.py", 3, "h"))
    told = report({0: waiting, 1: other, 2: waiting, 3: at_work}, {4: ""}, 60.0, Path("out/stacks"))
    assert "for train.timeout=60 seconds: rank 4 does not answer; the stacks of all ranks are in out/stacks;" in told[0]
    assert told[1:] == [
        "isoloss: rank 3: at /c.py:3 in h",
        "isoloss: rank 1: waiting for the others in barrier of /b.py:2 in g",
        "isoloss: ranks 0, 2: waiting for the others in all_reduce of /a.py:1 in f",
    ]


def test_what_a_device_has_not_finished():
    """By a trace of torch 2.13's flight recorder, with NCCL's name in place of gloo's."""
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "input_sizes": [[3]], "state": "started"}
    entry["process_group"] = ["0", "default_pg"]
    entries = [entry | {"state": "completed", "collective_seq_id": 6}, entry, entry | {"profiling_name": "gloo:x"}]
    (line,) = unfinished({"entries": entries})
    assert line.endswith("has not finished nccl:all_reduce number 7 of [[3]] in default_pg")
    assert list(unfinished({})) == []
