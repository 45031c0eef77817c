"""A run says first what it runs on, and does not take the CPU where the driver has a GPU, unless told to."""

import json
from pathlib import Path

import pytest
import torch

from isoloss.parallel import UserError
from isoloss.parallel.runtime import device
from isoloss.recipes import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")


def nvidia_smi(tmp_path: Path, monkeypatch, script: str) -> None:
    """Put that shell script on PATH, in front of what may be there, under the name of the driver's command."""
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")


@pytest.fixture
def two_gpus(tmp_path, monkeypatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H100, 470.57.02'; echo 'NVIDIA H100, 470.57.02'")


def test_a_gpu_that_torch_does_not_see_is_not_passed_over(two_gpus, arguments, capsys):
    assert launch.main("sft", arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and list(Path.cwd().iterdir()) == []
    for part in ("train.device='auto'", "2 GPU(s)", "NVIDIA H100, driver 470.57.02", "train.device=cpu"):
        assert part in line
    assert f"torch {torch.__version__}" in line  # and why: this build's own words, or those of its driver


def test_neither_is_it_in_reinforcement_learning(two_gpus, capsys):
    assert launch.main("grpo", ["model.path=model", "data.train=[prompts.jsonl]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.device='auto'" in line and "2 GPU(s)" in line


def test_the_cpu_if_told_to(two_gpus, arguments, capsys):
    assert launch.main("sft", [*arguments, "train.device=cpu"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("device: CPU, ") and first.endswith(" 1 rank(s), fp32")
    assert first == f"device: {json.loads(Path('out/run.json').read_text())['device']}, fp32"


@pytest.mark.parametrize("script", ["echo 'No devices were found'; exit 6", "exit 0"])
def test_a_driver_without_a_gpu(tmp_path, monkeypatch, script):
    nvidia_smi(tmp_path, monkeypatch, script)
    device.check_fallback("auto")


def test_a_gpu_that_is_asked_for_and_not_there(arguments, capsys):
    assert launch.main("sft", [*arguments, "train.device=cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.device='cuda' and torch sees no GPU: " in line


def test_the_cpu_beside_a_gpu_that_torch_sees(monkeypatch):
    """Refused: what Megatron-Core needs without a GPU is not there, so the run would not be on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"train.device='cpu' .* CUDA_VISIBLE_DEVICES= as well"):
        device.check("cpu")


def test_reasons_are_told_in_one_line(monkeypatch):
    """Of the driver: torch's own text has several lines, and names of variables that hide GPUs are added."""

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match=r"too old .found version 11040.*CUDA_VISIBLE_DEVICES=3") as refusal:
        device.check("cuda")
    assert "\n" not in str(refusal.value)
