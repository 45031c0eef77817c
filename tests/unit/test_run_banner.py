"""What a run tells and records of the machine and of the packages that it found there."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.decoders import decoder
from support.models.gated_delta import architecture

from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.health import watched
from isoloss.engine.run.folder import changed_settings, settings
from isoloss.engine.run.health import Health, Watched
from isoloss.engine.run.metrics import MetricsLog
from isoloss.engine.run.run import Run, RunResult
from isoloss.engine.sft.loop import summary
from isoloss.engine.step.engine import OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.models.mcore.kernels import Kernels
from isoloss.parallel import Layout
from isoloss.parallel.ops import flash_linear_attention
from isoloss.parallel.runtime.versions import version_of

SFT, GRPO = Config(ModelConfig("somewhere")), RLConfig(ModelConfig("somewhere"))


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
    arch = architecture() if has_layers else decoder(1, 26, (8, 8, 4), 16, 64)
    model = SimpleNamespace(arch=arch, stages=(1,), mesh=SimpleNamespace(layout=Layout()))
    engine = SimpleNamespace(model=model, source=SimpleNamespace(path="somewhere"))
    run: Any = SimpleNamespace(_config=config, _engine=engine, total_steps=1, output_dir="here", done=0)
    lines = Run.banner(run, "", (), "steps of 8")
    assert lines[-1].startswith("run: 1 step of 8, layout")
    run.total_steps = 2
    assert Run.banner(run, "", (), "steps of 8")[-1].startswith("run: 2 steps of 8, layout")
    slow = [line for line in lines if "Gated DeltaNet" in line]
    assert len(slow) == len(told) and all(reason in line for reason, line in zip(told, slow))


@pytest.mark.parametrize(
    ("config", "changed", "told"),
    [
        (SFT, {}, None),
        (SFT, {"optim": {"lr": 5e-4}}, "optim.lr is 0.0005, was 1e-05"),
        (SFT, {"optim": {"schedule": "linear", "betas": (0.8, 0.9)}},
         "optim.schedule is linear, was cosine; optim.betas is [0.8, 0.9], was [0.9, 0.95]"),
        (SFT, {"loss": {"aggregation": "sum"}, "train": {"steps": 9}, "checkpoint": {"every": 3}},
         "loss.aggregation is sum, was token-mean; train.steps is 9, was None"),
        (GRPO, {"algorithm": {"clip_high": 0.28}}, "algorithm.clip_high is 0.28, was 0.2"),
    ],
)  # fmt: skip
def test_a_resumed_run_that_learns_otherwise_tells_by_which_keys(config, changed, told):
    now = replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changed.items()})
    lines = changed_settings(now, json.loads(json.dumps(settings(config))))
    assert lines == ([f"changed since that checkpoint: {told}"] if told else [])
    assert changed_settings(now, {}) == []  # of a checkpoint that does not tell them


def test_a_step_that_learns_nothing_is_told_when_it_is_logged_and_in_the_end(tmp_path, one_rank, capsys):
    quiet = SimpleNamespace(after_step=lambda *_: None)
    with MetricsLog(tmp_path, enabled=True, total_steps=1) as log:
        run: Any = SimpleNamespace(
            done=0, _started=0.0, _stopped=False, _callbacks=SimpleNamespace(call=lambda *_: False), _group=None,
            metrics=log, _peak=1.0, _memory=quiet, _guard=SimpleNamespace(check=lambda *_: None),
            _stragglers=SimpleNamespace(after_step=lambda *_: ()), print=lambda lines: None,
            _health=Health(Watched(checks=(lambda row: f"{row['valid_tokens']} of {row['who']}",))),
        )  # fmt: skip
        metrics = StepMetrics(
            0.0, 0.0, 0.0, valid_tokens=0, total_tokens=9, computed_tokens=9, sequences=1, micro_batches=1
        )
        Run.log(run, (), metrics, OptimResult(0.0, 1e-3, False), texts={"who": "all"})
    assert "step 1: warning: 0 of all" in capsys.readouterr().err.splitlines()
    assert run._health.summary() == ["warning: 1 of 1 steps learned nothing: 1 without a target"]
    with MetricsLog(tmp_path, enabled=True, total_steps=2, start_step=1) as log:
        assert [(row["step"], row["valid_tokens"], row["applied"]) for row in log.earlier()] == [(1, 0, 0)]
        assert Health(watched(GRPO), log.earlier()).summary() == run._health.summary()  # though rewards are not told


@pytest.mark.parametrize(
    ("last", "says"),
    [(3.0, "better by 0.500"), (3.5, "better by 0.000"), (6.233, "worse than a unigram model by 2.733")],
)
def test_the_summary_compares_with_a_unigram_model(last, says):
    ended = RunResult(Path("out"), Path("out/c"), {"loss": 7.5}, {"loss": last}, ("warning: 2 of 3",))
    first, *others, end = summary(ended, 3.5)
    assert first.endswith(f"unigram baseline 3.500; {says}") and others == ["warning: 2 of 3"]
    assert end.startswith("done: ")


def test_a_checkout_that_nobody_installed_has_no_version():
    """A run from one ended when it wrote run.json."""
    assert version_of("torch") == str(torch.__version__)
    assert version_of("a package that nobody installed") is None
