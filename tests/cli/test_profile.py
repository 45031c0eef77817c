"""train.profile: a trace of one step, and a table of its phases that adds up."""

import gzip
import json
from pathlib import Path

import pytest
from support.runs.rl_runs import write_inputs
from torch.profiler import profile

from isoloss.recipes import launch


def phases(folder: Path, rank: int = 0) -> dict[str, tuple[int, float]]:
    """Calls and seconds of each phase of the table."""
    lines = (folder / f"rank{rank}.txt").read_text().split("\n\n")[0].splitlines()[1:]
    return {line[:28].strip(): (int(line[28:35]), float(line[35:46])) for line in lines}


def events_of(trace: Path, name: str) -> list[float]:
    """Seconds of each event of that name."""
    with gzip.open(trace) as file:
        return [event["dur"] / 1e6 for event in json.load(file)["traceEvents"] if event.get("name") == name]


def test_a_disk_that_refuses_it_does_not_end_the_run(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "export_chrome_trace", lambda *_: Path("/dev/full").write_text("trace"))
    keys = [f"data.train={inputs}/rows.jsonl", "data.eval=[]", "train.steps=2", "train.profile=1:profile"]
    assert launch.main("sft", [*keys, "checkpoint.export_hf=false"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "profile" in line]
    assert told == ["isoloss: the profile of step 1 could not be written: [Errno 28] No space left on device"]


def test_a_step_of_sft(inputs, tmp_path, monkeypatch):
    """The last of three, and no other."""
    monkeypatch.chdir(tmp_path)
    rows = [f"data.train={inputs}/rows.jsonl", f"data.eval={inputs}/rows.jsonl", "batch.global_size=3"]
    few = ["train.steps=3", "batch.max_tokens=16", "train.profile=3:profile/here"]
    assert launch.main("sft", [*rows, *few]) == 0
    folder = tmp_path / "profile/here"
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json.gz", "rank0.txt"]
    found = phases(folder)
    assert {name: calls for name, (calls, _) in found.items()} == {
        "step": 1, "forward and backward": 1, "forward": 3, "loss": 3, "optimizer": 1, "reduce gradients": 1
    }  # fmt: skip
    seconds = {name: seconds for name, (_, seconds) in found.items()}
    assert 0 < seconds["forward"] + seconds["loss"] < seconds["forward and backward"]
    assert seconds["forward and backward"] + seconds["optimizer"] <= seconds["step"] + 2e-4  # rounded
    forwards = events_of(folder / "rank0.json.gz", "forward")
    assert len(forwards) == 3 and sum(forwards) == pytest.approx(seconds["forward"], abs=1e-4)
    products = ("aten::mm", "mkldnn::_linear_pointwise")  # by the processor, parallel/ops/matmul.py
    assert sum(len(events_of(folder / "rank0.json.gz", name)) for name in products) > 3


def test_a_step_of_grpo(tmp_path, monkeypatch):
    """Where a batch is generated, rewarded and learned from."""
    monkeypatch.chdir(tmp_path)
    inputs = write_inputs(tmp_path)
    keys = [
        f"model.path={inputs}/model", "model.from_scratch=true", f"data.train={inputs}/prompts.jsonl",
        f"reward.function=[{inputs}/rewards.py:coin]", "data.max_length=64", "rollout.max_new_tokens=8",
        "rollout.num_generations=4", "batch.global_size=2", "train.steps=2", "train.profile=1:profile",
    ]  # fmt: skip
    assert launch.main("grpo", keys) == 0
    found = phases(tmp_path / "profile")
    rl = {"sync weights", "generate", "rewards", "log-probabilities"}
    assert found.keys() == rl | {"step", "forward and backward", "forward", "loss", "optimizer", "reduce gradients"}
    assert sum(found[name][1] for name in rl) < found["step"][1] and found["generate"][1] > 0
