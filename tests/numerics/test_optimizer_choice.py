"""Which optimizer runs is what the configuration says, whatever is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.families import write_folder

from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.engine.step.model_source import resolve
from isoloss.parallel import UserError

FUSED_ADAM = """
class FusedAdam:
    def __init__(self, *args, **kwargs):
        raise AssertionError("apex's optimizer was chosen because it is there")

FusedSGD = FusedAdam
"""
TRAIN = """
import sys
import torch
from pathlib import Path
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, negative_log_likelihood

if __name__ == "__main__":
    engine = Engine(Config(ModelConfig(sys.argv[1])))
    tokens = torch.arange(1, 40)
    engine.train_step([Sample(tokens, tokens > 3)], Loss.of(negative_log_likelihood), 1e-2)
    engine.save(Path(sys.argv[2]))
    engine.load(Path(sys.argv[2]))
    (part,) = engine.optimizer.chained_optimizers
    (step,) = {int(state["step"]) for state in part.optimizer.state.values()}
    print(type(part.optimizer).__module__, type(part.optimizer).__name__, part.optimizer.param_groups[0]["fused"], step)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder("qwen3", tmp_path_factory.mktemp("qwen3"))


def apex(site: Path, *submodules: str) -> None:
    """A package of that name in the folder `site`."""
    for name in ("", *submodules):
        (site / "apex" / name).mkdir(parents=True)
        (site / "apex" / name / "__init__.py").write_text(FUSED_ADAM if name == "optimizers" else "")


def test_torchs_adamw_runs_also_where_another_one_is_installed(folder, tmp_path):
    apex(tmp_path / "site", "optimizers")
    (tmp_path / "train.py").write_text(TRAIN)
    ran = subprocess.run(
        [sys.executable, tmp_path / "train.py", folder, tmp_path / "checkpoint"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-4:] == ["torch.optim.adamw", "AdamW", "True", "1"]


def test_a_stranger_of_the_name_apex_is_refused(folder, tmp_path, monkeypatch):
    apex(tmp_path / "stranger", "interfaces")
    monkeypatch.syspath_prepend(tmp_path / "stranger")
    with pytest.raises(UserError, match=r"apex in .*stranger/apex is not NVIDIA's .*pip uninstall apex"):
        resolve(Config(ModelConfig(str(folder))))
    apex(tmp_path / "nvidia", "optimizers")
    monkeypatch.syspath_prepend(tmp_path / "nvidia")
    resolve(Config(ModelConfig(str(folder))))
