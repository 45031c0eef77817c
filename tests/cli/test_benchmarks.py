"""The scripts of benchmarks/ run, and call the product as it is today.

Sizes are so small that the figures mean nothing.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from isoloss.parallel import mesh

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
}


@pytest.fixture
def script(monkeypatch):
    """script(name, *arguments) -> the module of a benchmark, imported into this process, that finds these arguments."""

    def load(name: str, *arguments: object) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))  # they import each other
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # other tests run in this process
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield load
    if dist.is_initialized():  # a process of its own would end here
        mesh.destroy()
        dist.destroy_process_group()


def test_balance(script, monkeypatch, capsys):
    module = script("token_balance", "--repeats", 1)
    monkeypatch.setattr(module, "SIZES", ((64, 4),))
    module.main()
    assert "total tokens need at least" in capsys.readouterr().out


def test_sft_step(script, monkeypatch, capsys, tmp_path):
    """Its own loop by hand and the engine compute the same step, or it prints no ratio."""
    module = script("sft_step", "--passes", 1, "--sequences", 2, "--padded", "--out", tmp_path / "figures.json")
    monkeypatch.setattr(module, "M27", module.M27 | SMALL)
    module.main()
    assert json.loads((tmp_path / "figures.json").read_text())["rows"].keys() == {"limit", "isoloss", "padded"}


def test_lora_step(script, monkeypatch, tmp_path):
    """PEFT and the engine compute the same step of an adapter, or it prints no ratio."""
    module = script("lora_step", "--passes", 1, "--sequences", 2, "--out", tmp_path / "figures.json")
    small = module.M27 | SMALL
    monkeypatch.setattr(module, "M27", small)
    monkeypatch.setattr(sys.modules["sft_step"], "M27", small)  # its sides read it there
    module.main()
    assert json.loads((tmp_path / "figures.json").read_text())["rows"].keys() == {"full", "lora", "peft"}


@pytest.mark.parametrize("model", ["full", "linear"])
def test_shared_prefixes(script, monkeypatch, tmp_path, model):
    """Both steps have the same loss, or it stops."""
    out = tmp_path / "figures.json"
    linear = ["--linear"] if model == "linear" else []
    module = script("shared_prefixes", "--passes", 1, "--max-tokens", 2048, "--out", out, *linear)
    monkeypatch.setattr(module, "M27", module.M27 | SMALL)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2}
    monkeypatch.setattr(module, "LINEAR", module.LINEAR | SMALL | heads)
    monkeypatch.setattr(module, "BATCHES", [module.Batch(2, 4, 40, 8), module.Batch(1, 1, 0, 0)])
    module.main()
    shared, nothing = json.loads(out.read_text())["rows"]
    assert shared["tokens"][1] < shared["tokens"][0] and shared["flops"] > 1
    assert nothing["tokens"][0] == nothing["tokens"][1] and nothing["flops"] == 1


@pytest.fixture
def rl_step(script, monkeypatch, tmp_path):
    """rl_step(*arguments) -> the figures of its only row, of a small model."""

    def run(*arguments: object) -> dict:
        out = tmp_path / "figures.json"
        module = script("rl_step", "--passes", 1, "--out", out, *arguments)
        monkeypatch.setattr(module, "M27", module.M27 | SMALL)
        monkeypatch.setattr(module, "ROWS", [module.Row(2, 4, 12, 6, target=1.0, trl_batch=4)])
        module.main()
        (row,) = json.loads(out.read_text())["rows"]
        return row

    return run


@pytest.mark.slow
def test_rl_step(rl_step, capsys, tmp_path):
    """isoloss alone, where there is no TRL: a line says so. The script itself refuses completions of another length."""
    row = rl_step("--trl", tmp_path / "none", "--profile", tmp_path, "--picture", tmp_path / "rl_step.png")
    assert row["sides"].keys() == {"isoloss transformers", "isoloss megatron"}
    for side in row["sides"].values():
        assert side["phases"].keys() == {"sync", "generate", "logprobs", "train", "rest"}
        assert 0 < side["phases"]["train"] < side["least"] and side["peak_mib"] > 0
    assert "isoloss is measured alone" in capsys.readouterr().out
    assert (tmp_path / "rl_step.png").stat().st_size > 10_000
    profiles = {path.name for path in tmp_path.glob("2x4-12-6-isoloss-megatron-train*")}
    assert profiles == {"2x4-12-6-isoloss-megatron-train.txt", "2x4-12-6-isoloss-megatron-train-python.txt"}


@pytest.mark.full
@pytest.mark.skipif(not (BENCHMARKS.parent / ".trl-venv/.ready").exists(), reason="make bench-rl makes TRL's place")
def test_rl_step_beside_trl(rl_step):
    """The sides agree on the gradient, or no ratio is printed."""
    row = rl_step("--backends", "megatron")
    assert row["sides"].keys() == {"trl", "isoloss megatron"}
    assert abs(row["gradient_norm_off"]["isoloss megatron"]) < 1e-6
    assert row["sides"]["trl"]["phases"].keys() == {"generate", "train"}


def test_generation(script, monkeypatch, tmp_path):
    """All sides choose the same tokens at temperature 0, or it stops."""
    out = tmp_path / "figures.json"
    module = script("generation", "--passes", 1, "--out", out)
    small = module.M27 | SMALL
    monkeypatch.setattr(module, "M27", small)
    monkeypatch.setattr(sys.modules[module.write_model.__module__], "M27", small)
    monkeypatch.setattr(module, "ROWS", [(2, 3, 9, 5)])
    module.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["cpu_seconds"].keys() == {"megatron", "transformers", "generate", "generate static", "products"}
    assert all(seconds > 0 for seconds in row["cpu_seconds"].values())


def test_loss_head(script, one_rank):
    module = script("loss_head")
    assert module.measure_memory(64, 96, 16, 0.25)["labeled"] == 16
    assert module.measure_speed(32, 96, 16, 1)["speed_over_dense"] > 0


def test_logprob_memory(script, tmp_path):
    module = script("logprob_memory")
    module.write_model(tmp_path, 32, 1)
    found = module.measure(str(tmp_path), 2048, 1024)
    assert (found["micro_batches"], found["kept_bytes"]) == (2, 2048 * 8)


@pytest.mark.slow
def test_rollout_memory(script, tmp_path):
    """Each form in a process of its own: this one has free memory from other tests, and would not grow."""
    out = tmp_path / "figures.json"
    script("rollout_memory", "--completions", 16, "--tokens", 20_000, "--ranks", 2, "--out", out).main()
    found = json.loads(out.read_text())
    assert 0 < found["arrays"]["held"] < found["tuples"]["held"]
    assert found["arrays"]["held"] < found["arrays"]["peak"]
    (given,), (sent,) = found["every rank"]["others"], found["rank 0"]["others"]
    assert sent["held"] < given["held"] / 4 and sent["peak"] < given["peak"]


def test_context_scaling(script, tmp_path):
    module = script("context_scaling")
    (tmp_path / "config.json").write_text(
        json.dumps(module.MODEL | {"num_hidden_layers": 1, "max_position_embeddings": 4096})
    )
    row = module.measure(str(tmp_path), "1", 2048)
    assert row["sent_per_layer"] == [row["formula"]] == [0]


def test_linear_attention(script, monkeypatch, tmp_path):
    """The engine and transformers compute the same, or it prints no ratio."""
    out = tmp_path / "figures.json"
    sizes = ("--sequences", 2, "--long", 130, "--max-tokens", 2048, "--row", 128)
    module = script("linear_attention", "--passes", 1, *sizes, "--out", out)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    monkeypatch.setattr(module, "MODEL", module.MODEL | SMALL | heads | {"full_attention_interval": 2})
    monkeypatch.setattr(module, "ATTENTION", {"linear": 2, "full": 1})
    # This process, unlike a fresh one, may have freed as much memory as the row needs.
    measured = lambda folder, tokens: max(1, module.measure_memory(folder, tokens))
    monkeypatch.setattr(module, "in_a_process", measured)
    module.main()
    figures = json.loads(out.read_text())
    assert figures["rows"].keys() == {"log-normal", "log-normal, all labeled", "long"}
    assert figures["peak_bytes"].keys() == {"linear", "full"}


@pytest.mark.slow
def test_device_step(script, capsys, tmp_path):
    """Also beside figures of before: the same, of the same tree."""
    module = script("device_step", "--only", "tiny", "--documents", 2, "--out", tmp_path / "figures.json")
    module.SHAPES["tiny"] = module.SHAPES["8b"] | SMALL
    module.CASES = (("tiny", "tiny", 2, 0),)
    module.main()
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"].values()
    assert row["waits"] == 0 and row["waits_once"] == 3 and row["launches"] > 50
    assert "tiny x2" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
def test_gpu(script, monkeypatch, tmp_path):
    """On a CPU: a step of dense layers and of experts, a plan of each, and a step without each kernel."""
    module = script("gpu", "--device", "cpu", "--only", "step", "plan", "--out", tmp_path / "figures.json")
    module.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["rows"]) == 4 and figures["left_out"] == []
    assert not [row for row in figures["rows"].values() if "failed" in row]
    steps, plans = ([row for name, row in figures["rows"].items() if name.startswith(of)] for of in ("step", "plan"))
    for row in steps:
        assert row["kernels_ms"] >= sum(each["ms"] for each in row["kernels"]) > 0
        assert row["launches"] > 100 and row["micro_batches"] == module.MICRO_BATCHES
    assert len(plans) == 2 and all(row["planned_gib"] > 0 for row in plans)
    on_cpu = module.tasks(["kernels", "rl"], "cpu")
    without = module.run_task(on_cpu["kernels without all"])
    assert without["loss"] == pytest.approx(steps[0]["loss"], rel=1e-3)
    assert module.run_task(on_cpu["rl grpo"])["train_seconds"] > 0


def test_gpu_without_one(script, capsys, tmp_path):
    module = script("gpu", "--out", tmp_path / "figures.json")
    module.main()
    assert "nothing was measured" in capsys.readouterr().out and not (tmp_path / "figures.json").exists()


@pytest.mark.full
@pytest.mark.slow
def test_convert(script, monkeypatch, tmp_path, capsys):
    module = script("convert", "--layers", 2, "--repeats", 1, "--folder", tmp_path, "--warm")
    monkeypatch.setattr(module, "CONFIG", module.CONFIG | SMALL)
    module.main()
    assert "mcore-to-hf, 1 layers" in capsys.readouterr().out


def test_the_control_of_rl_trains_for_as_long(script, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"seconds": 3.0}\n{"seconds": 1.0}\n')
    module = script("rl_controls")
    assert module.EVALUATIONS == 5
    assert [module.steps_between_evaluations(tmp_path, seconds) for seconds in (0.5, 20.0, 100.0)] == [1, 2, 10]


@pytest.mark.full
@pytest.mark.slow
def test_rl_controls(script, monkeypatch, tmp_path):
    """One seed, with a start and both controls, of one or two steps each."""
    module = script("rl_controls", "--seeds", 0, "--out", tmp_path / "out", "train.steps=2", "batch.global_size=4")
    monkeypatch.setattr(module, "EVALUATIONS", 1)
    monkeypatch.setattr(module, "steps_between_evaluations", lambda start, seconds: 1)  # whatever this machine's pace
    real: Callable = module.run
    monkeypatch.setattr(
        module,
        "run",
        lambda recipe, *rest: real(recipe, *rest, *(["train.steps=1"] if recipe == "sft" else [])),
    )
    with contextlib.redirect_stdout(None):
        assert module.main() == 1  # nothing is learned in two steps
    figures = json.loads((tmp_path / "out" / "rl_controls.json").read_text())
    assert figures["curves"]["0"].keys() == {"grpo", "sft continued", "shuffled"}


@pytest.mark.slow
@pytest.mark.full
def test_rl_pipeline(script, monkeypatch, tmp_path):
    """Who waits for whom, on a stand-in for a server."""
    out = tmp_path / "figures.json"
    module = script("rl_pipeline", "--steps", 3, "--staleness", 0, 1, "--over-sample", 1.25, "--out", out)
    monkeypatch.setattr(module, "TRAIN_SECONDS", 0.1)
    monkeypatch.setattr(module, "SECONDS_PER_TOKEN", 0.002)
    monkeypatch.setattr(module, "MEDIAN_TOKENS", 4)
    module.main()
    cases = json.loads(out.read_text())["cases"]
    names = "staleness 0, over-sampling 1", "staleness 1, over-sampling 1", "staleness 1, over-sampling 1.25"
    assert tuple(cases) == names
    assert all(0 < each["trainer_idle"] < 1 and 0 < each["room_used"] < 1 for each in cases.values())
    assert [cases[name]["staleness_max"] for name in names] == [0, 1, 1]
