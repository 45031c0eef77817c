"""The recipe end to end, and what a step does where its loss is not finite or has nothing to learn from."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.runs import training as world
from support.runs.runs import rows_of
from support.runs.training import config_of, samples, size

from isoloss.engine.instruments import startup
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss
from isoloss.parallel.runtime import device
from isoloss.recipes import launch
from isoloss.tools.convert import __main__ as convert
from isoloss.tools.prove.parity import freeze

METRICS = {"step", "loss", "grad_norm", "lr", "valid_tokens", "total_tokens", "computed_tokens", "sequences",
           "micro_batches", "seconds", "tokens_per_second", "mfu", "applied", "weight_sum"}  # fmt: skip


# ---- end to end -----------------------------------------------------------------------------------------------------


def test_tiny_preset(inputs, tmp_path, monkeypatch, capsys):
    """The preset that `make sft` runs, cut to two steps and few rows: everything that a run promises to leave."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    few = ["batch.global_size=4", "train.steps=2", f"data.train={inputs}/rows.jsonl", f"data.eval={inputs}/rows.jsonl"]
    assert launch.main("sft", few) == 0
    said, errors = (text.splitlines() for text in capsys.readouterr())
    last = said[-1]
    assert any(line.startswith("data: 12 of 12 rows of data.eval are in data.train as well: ") for line in said)
    evaluations = [line for line in errors if line.startswith("evaluation after step ")]
    assert [line.split(": loss ")[0].rpartition(" ")[2] for line in evaluations] == ["0", "2"]
    out = Path("runs/sft-tiny")
    for place in ("hf", "checkpoints/step_00000002", "metrics.jsonl", "tensorboard"):
        assert f"{out}/{place}" in last and (out / place).exists()

    steps = rows_of(f"{out}/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row.keys() >= METRICS
        assert row["applied"] == 1 and row["sequences"] == 4 and math.isfinite(row["loss"])
        assert row["weight_sum"] == pytest.approx(1, abs=1e-6)
        assert 0 < row["valid_tokens"] < row["total_tokens"]
    assert [row["step"] for row in rows_of(f"{out}/eval.jsonl")] == [0, 2]
    assert list((out / "tensorboard").glob("events.*"))

    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["train"]["steps"] == 2 and config["optim"]["lr"] == 4e-3 and config["loss"]["norm_length"] is None
    run = json.loads((out / "run.json").read_text())
    assert run["layout"] == "1" and run["world_size"] == 1 and run["versions"]["megatron-core"]
    assert run["optimizer"] == "torch.optim.AdamW, fused"

    tokens = AutoTokenizer.from_pretrained(out / "hf")("Yes.", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(out / "hf", local_files_only=True)
    assert model(tokens).logits.isfinite().all()

    # A second run does not touch the first one's folder.
    assert launch.main("sft", [*few, "train.steps=1"]) == 0
    assert "runs/sft-tiny-2/metrics.jsonl" in capsys.readouterr().out
    assert rows_of(f"{out}/metrics.jsonl") == steps


def test_resolved_configuration_can_be_asked_for(arguments, capsys):
    assert launch.main("sft", [*arguments, "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 2
    assert list(Path.cwd().iterdir()) == []


def test_a_run_is_a_model_and_a_checkpoint(arguments, capsys):
    """Wherever one is asked for: its newest checkpoint, or what it wrote for transformers, with the same weights."""
    assert launch.main("sft", [*arguments, "checkpoint.every=1"]) == 0
    newest, losses = "out/checkpoints/step_00000002", {}
    for path, means in (("out", newest), ("out/checkpoints", newest), ("out/hf", "out/hf")):
        capsys.readouterr()
        again = [f"model.path={path}", f"model.tokenizer={path}", "model.from_scratch=false", "train.steps=1"]
        again += [f"output_dir={path}/again", "checkpoint.export_hf=false"]
        assert launch.main("sft", [*arguments, *again]) == 0
        assert f"model: {means}, " in capsys.readouterr().out
        losses[path] = rows_of(f"{path}/again/metrics.jsonl")[0]["loss"]
    assert len({*losses.values()}) == 1 and losses["out"] != rows_of("out/metrics.jsonl")[0]["loss"]  # the same batch
    for command, option, means in (("mcore-to-hf", "--checkpoint", newest), ("hf-to-mcore", "--hf", "out/hf")):
        assert convert.main([command, option, "out", "--out", "converted", "--dry-run"]) == 0
        assert capsys.readouterr().out.startswith(f"{means}: ")


def test_planned_and_measured_memory_are_told_after_the_first_step(arguments, monkeypatch, capsys):
    """Both steps measure far less than a tenth over the plan: it is told once. The next run measures too much."""
    for measured, told in (
        (1, "measured 0.0 GiB in the first step"),
        (1 << 40, "measured 1024.0 GiB: more than planned"),
    ):
        monkeypatch.setattr(device, "peak_bytes", lambda measured=measured: measured)
        assert launch.main("sft", [*arguments, f"output_dir={measured}"]) == 0
        (line,) = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("device memory of rank 0: ")
        ]
        assert told in line


@pytest.mark.parametrize("overlong", ("drop", "truncate"))
def test_the_token_budget_decides_neither_rows_nor_loss(overlong, arguments, inputs, capsys):
    """Every row is longer than a budget of 16, and runs alone; all four of a step fit one of a million."""
    found = []
    for budget in (16, 10**6):
        limits = [f"batch.max_tokens={budget}", "data.max_length=34", f"data.overlong={overlong}"]
        argv = [*arguments, *limits, "train.precision=fp64", f"data.eval={inputs}/rows.jsonl", f"output_dir={budget}"]
        assert launch.main("sft", argv) == 0
        opening = [line for line in capsys.readouterr().out.splitlines() if "batch.max_tokens" in line]
        found.append((rows_of(f"{budget}/metrics.jsonl"), rows_of(f"{budget}/eval.jsonl"), opening))
    (small, small_eval, told), (large, large_eval, silent) = found
    assert {row["micro_batches"] for row in small} == {4} and {row["micro_batches"] for row in large} == {1}
    for a, b in zip([*small, *small_eval], [*large, *large_eval], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        for name in ("valid_tokens", "total_tokens", "sequences"):
            assert a.get(name) == b.get(name), name
    assert small[0]["total_tokens"] > 4 * 16
    rows = 2 * small_eval[0]["sequences"]  # the same file for training and evaluation
    assert len(told) == 1 and f"{rows} rows exceed batch.max_tokens=16" in told[0]
    assert silent == []


def test_rows_of_one_prompt_are_a_group(inputs, arguments, monkeypatch):
    """Three answers to one question weigh as much as the one to another; a text is a prompt of its own."""
    from transformers import AutoTokenizer

    answers = {"One?": ("1", "1 and 1", "It is one."), "Two?": ("2",)}
    rows = [{"prompt": prompt, "completion": answer} for prompt, of_it in answers.items() for answer in of_it]
    rows += [{"text": "one is one and two is two."}, {"text": "one is not two."}]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [*arguments, "data.train=own.jsonl", "batch.global_size=6"]
    tokenizer, found = AutoTokenizer.from_pretrained(inputs / "model"), {}
    train_step = Engine.train_step

    def recorded(self, step_samples, loss, *rest):
        for sample, logprobs in zip(step_samples, self.logprobs(step_samples)):
            text = tokenizer.decode(sample.tokens_T)
            prompt = next((question for question in answers if question in text), text)
            found.setdefault(prompt, []).extend((-logprobs[sample.mask_T]).tolist())
        return train_step(self, step_samples, loss, *rest)

    monkeypatch.setattr(Engine, "train_step", recorded)
    more = ["loss.aggregation=prompt-mean-token-mean", "train.precision=fp64", "train.steps=1"]
    assert launch.main("sft", [*argv, *more]) == 0
    assert len(found) == 4
    of_prompts = [sum(terms) / len(terms) for terms in found.values()]
    assert rows_of("out/metrics.jsonl")[0]["loss"] == pytest.approx(sum(of_prompts) / 4, rel=1e-12)


# ---- bad steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch):
    """poison({2, 3}) makes the loss of these optimizer steps a NaN; returns a list that will hold, for every step,
    whether the weights changed in it."""

    def install(bad: set[int]) -> list[bool]:
        changed: list[bool] = []
        train_step = Engine.train_step

        def poisoned(self, step_samples, loss, *rest):
            before = world.weights(self)
            loss = Loss.of(world.nan_loss) if len(changed) + 1 in bad else loss
            result = train_step(self, step_samples, loss, *rest)
            changed.append(not world.same(before, world.weights(self)))
            return result

        monkeypatch.setattr(Engine, "train_step", poisoned)
        return changed

    return install


@pytest.mark.parametrize("bad", ({1}, {2, 3}, {5}), ids=str)
def test_a_step_with_a_nan_is_not_applied(bad, arguments, poison):
    changed = poison(bad)
    argv = [*arguments, "train.steps=5", "checkpoint.every=1", "optim.schedule=constant"]
    assert launch.main("sft", argv) == 0
    assert changed == [step not in bad for step in range(1, 6)]
    steps = rows_of("out/metrics.jsonl")
    assert [row["applied"] for row in steps] == [int(step not in bad) for step in range(1, 6)]
    assert {row["step"] for row in steps if row["loss"] == "nan"} == bad


def test_the_run_ends_after_max_bad_steps(arguments, poison, capsys):
    changed = poison({2, 4, 5})
    argv = [*arguments, "train.steps=9", "train.max_bad_steps=2"]
    assert launch.main("sft", argv) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("isoloss: ")]
    assert len(told) == 1 and "train.max_bad_steps=2" in told[0] and "step 5" in told[0]
    assert changed == [True, False, True, False, False]
    assert [row["applied"] for row in rows_of("out/metrics.jsonl")] == [1, 0, 1, 0, 0]


LAYOUTS = ("1", "dp2", "ulysses2", "ulysses2+ring2", "tp2+pp2")


@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spoil", ("masks", "loss"))
def test_a_spoiled_step_leaves_no_trace(pool, inputs, layout, spoil, distributed_optimizer):
    config = config_of(inputs, layout, distributed_optimizer=distributed_optimizer)
    frozen = freeze(samples())
    (_, second), (_, norm), _ = pool.run(size(layout), world.steps, config, frozen, 2)[0]
    for found in pool.run(size(layout), world.spoiled_step, config, frozen, spoil):
        assert not found["applied"] and found["unchanged"] and found["moved"]
        if spoil == "masks":
            assert (found["loss"], found["grad_norm"], found["valid_tokens"]) == (0, 0, 0)
        else:
            assert math.isnan(found["loss"]) and math.isnan(found["grad_norm"])
        # The step after it is the one that would have come in its place.
        assert found["next"] == (second, norm, True)


# ---- the Engine's verbs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_calls_before_a_step_equal_one(pool, inputs, layout):
    config, frozen = config_of(inputs, layout, "fp64"), freeze(samples())
    one, two = (
        pool.run(size(layout), world.gradients, config, frozen, calls)
        for calls in ([range(8)], [(5, 0, 3), (1, 2, 4, 6, 7)])
    )
    assert two[0][0] == pytest.approx(one[0][0], rel=1e-12)
    expected, found = (world.merged([gradients for _, gradients in run]) for run in (one, two))
    assert expected.keys() == found.keys() and len(expected) > 30
    for name in expected:
        scale = np.abs(expected[name]).max()
        assert scale > 0
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12 * scale, err_msg=name)


def test_calls_that_would_train_on_a_wrong_gradient_are_refused(pool, inputs):
    """A gradient that comes after the reduction is never summed over dp; two means add up to a sum of means."""
    (answers,) = pool.run(1, world.misused_calls, config_of(inputs, "1"), freeze(samples()))
    assert [answers.pop(name) for name in ("first", "second", "after zero_grad")] == ["", "", ""]
    for name, answer in answers.items():
        assert answer and "\n" not in answer, name
        assert ("optim_step" in answer) if name.startswith("after") else ("token-mean" in answer and "sum" in answer), (
            name
        )


@pytest.mark.parametrize("layout", ("1", "dp2", "dp2+tp2", "dp2+pp2", "dp2+pp2+vpp2", "ulysses2+dp2"))
@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
def test_overlapped_reduction_changes_nothing(pool, inputs, layout, distributed_optimizer):
    plain = config_of(inputs, layout, distributed_optimizer=distributed_optimizer)
    overlapped = config_of(inputs, layout, distributed_optimizer=distributed_optimizer, overlap_grad_reduce=True)
    one, two = (pool.run(size(layout), world.steps, c, freeze(samples()), 3) for c in (plain, overlapped))
    assert one[0][:2] == two[0][:2]
    assert world.same(world.merged([weights for *_, weights in one]), world.merged([weights for *_, weights in two]))


@pytest.mark.parametrize("layout", ("dp2", "dp2+pp2+vpp2"))
def test_steps_in_several_calls_reduce_in_the_end_whatever_is_configured(pool, inputs, layout):
    """In the middle of steps that do overlap, and the same gradients as without."""
    plain, overlapped = (config_of(inputs, layout, overlap_grad_reduce=each) for each in (False, True))
    calls = [range(3), range(3, 8)]
    one, two = (pool.run(size(layout), world.between_steps, c, freeze(samples()), calls) for c in (plain, overlapped))
    for (norms, gradients), (other_norms, others) in zip(one, two):
        assert norms == other_norms and world.same(gradients, others)


def test_a_step_that_fails_while_gradients_are_reduced_leaves_the_next_one_alone(pool, inputs):
    config = config_of(inputs, "dp2", overlap_grad_reduce=True)
    for before, after in pool.run(2, world.failed_reduction, config, freeze(samples())):
        assert before == after


@pytest.mark.parametrize("asked", (False, True))
def test_deterministic_algorithms_are_torchs_where_they_are_asked_for(asked, arguments, monkeypatch):
    """Runs on a CPU repeat anyway, so this looks at what torch was told when the steps run."""
    found, train_step = [], Engine.train_step

    def recorded(self, *step_arguments):
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        cublas, megatron = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), self.chunks[0].config.deterministic_mode
        found.append((torch.are_deterministic_algorithms_enabled(), strict, cublas, megatron))
        return train_step(self, *step_arguments)

    monkeypatch.setattr(Engine, "train_step", recorded)
    for name in startup.DETERMINISTIC:
        monkeypatch.setenv(name, "")  # so that it is taken back after the test
        monkeypatch.delenv(name)
    try:
        more = [f"train.deterministic={str(asked).lower()}"] if asked else []  # off by default
        assert launch.main("sft", [*arguments, *more]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [(True, True, ":4096:8", True) if asked else (False, True, None, False)] * 2
