"""What a run tells and records of the machine and of the packages that it found there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.gated_delta import architecture

from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.engine.run.run import Run
from isoloss.models.mcore.kernels import Kernels
from isoloss.parallel import Layout
from isoloss.parallel.ops import flash_linear_attention
from isoloss.parallel.runtime.versions import version_of


@pytest.mark.parametrize(
    ("precision", "wanted", "has_layers", "on_gpu", "why", "told"),
    [
        ("bf16", True, True, True, "Triton is old", ["Triton is old"]),
        ("bf16", True, True, True, None, []),
        ("bf16", True, True, False, "Triton is old", []),
        ("bf16", True, False, True, "Triton is old", []),
        ("bf16", False, True, True, "Triton is old", []),
        ("fp32", True, True, True, "Triton is old", []),
    ],
)
def test_the_first_lines_tell_what_is_slow_for_lack_of_a_package(
    monkeypatch, one_rank, precision, wanted, has_layers, on_gpu, why, told
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(flash_linear_attention, "why_not", lambda: why)
    config = Config(ModelConfig("somewhere"), kernels=Kernels(delta_rule=wanted))
    config = replace(config, train=replace(config.train, precision=precision))
    arch = architecture() if has_layers else replace(architecture(), delta=None)
    model = SimpleNamespace(arch=arch, stages=(1,), mesh=SimpleNamespace(layout=Layout()))
    engine = SimpleNamespace(model=model, source=SimpleNamespace(path="somewhere"))
    run: Any = SimpleNamespace(_config=config, _engine=engine, total_steps=1, output_dir="here", done=0)
    lines = Run.banner(run, "", (), "steps")
    slow = [line for line in lines if "Gated DeltaNet" in line]
    assert len(slow) == len(told) and all(reason in line for reason, line in zip(told, slow))


def test_a_checkout_that_nobody_installed_has_no_version():
    """A run from one ended when it wrote run.json."""
    assert version_of("torch") == str(torch.__version__)
    assert version_of("a package that nobody installed") is None
