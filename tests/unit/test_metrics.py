"""metrics.jsonl, eval.jsonl, TensorBoard, progress on stderr, and MFU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.decoders import decoder
from support.runs.terminal import terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from isoloss.engine.batching.balance import CostModel
from isoloss.engine.run import metrics
from isoloss.engine.run.metrics import MetricsLog, mfu, peak_flops
from isoloss.engine.run.tensorboard import EventFile, has_earlier_names


def rows(path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def events(output_dir: Path) -> list[list[Event]]:
    """The events of each TensorBoard file, files in the order of the steps they hold."""
    files = [list(EventFileLoader(str(path)).Load()) for path in (output_dir / "tensorboard").iterdir()]
    return sorted(files, key=lambda file: max(event.step for event in file))


def scalars(file: list[Event]) -> list[tuple[str, int, float]]:
    return [(value.tag, event.step, value.tensor.float_val[0]) for event in file for value in event.summary.value]


def test_a_row_per_step_flushed_and_the_same_scalars_in_tensorboard(tmp_path):
    with MetricsLog(tmp_path / "new" / "run", enabled=True, total_steps=2) as log:
        log.log_eval(0, {"loss": 4.0})
        log.log(1, {"loss": torch.tensor(2.5), "valid_tokens": torch.tensor(7), "lr": np.float32(0.5)})
        assert len(rows(tmp_path / "new/run/metrics.jsonl")) == 1  # before the log is closed
        log.log(2, {"loss": 1.5, "valid_tokens": np.int64(2**53 + 1), "lr": 0.25})
    assert (tmp_path / "new/run/metrics.jsonl").read_text().splitlines()[1] == (
        '{"step": 2, "loss": 1.5, "valid_tokens": 9007199254740993, "lr": 0.25}'
    )
    assert rows(tmp_path / "new/run/metrics.jsonl")[0] == {"step": 1, "loss": 2.5, "valid_tokens": 7, "lr": 0.5}
    assert rows(tmp_path / "new/run/eval.jsonl") == [{"step": 0, "loss": 4.0}]
    (file,) = events(tmp_path / "new/run")
    assert scalars(file) == [
        ("eval/loss", 0, 4.0),
        ("loss/loss", 1, 2.5),
        ("data/valid_tokens", 1, 7.0),
        ("optim/lr", 1, 0.5),
        ("loss/loss", 2, 1.5),
        ("data/valid_tokens", 2, float(2**53)),
        ("optim/lr", 2, 0.25),
    ]


def test_what_is_not_finite_is_a_string_and_the_file_strict_json(tmp_path):
    with MetricsLog(tmp_path, enabled=True, total_steps=1) as log:
        log.log(1, {"loss": float("nan"), "grad_norm": torch.tensor(float("inf")), "reward_mean": -np.inf})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": "nan", "grad_norm": "inf", "reward_mean": "-inf"}]


def test_resume_replaces_the_rows_of_steps_it_does_again(tmp_path):
    with MetricsLog(tmp_path, enabled=True, total_steps=6) as log:
        for step in range(1, 6):
            log.log(step, {"loss": float(step)})
            log.log_eval(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the crash
    with MetricsLog(tmp_path, enabled=True, total_steps=6, start_step=3) as log:
        assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
        log.log_eval(3, {"loss": 31.0})  # a run begins with an evaluation
        log.log(4, {"loss": 40.0})
        log.log_eval(4, {"loss": 41.0})
    assert [row["loss"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 40.0]
    assert [row["loss"] for row in rows(tmp_path / "eval.jsonl")] == [1.0, 2.0, 31.0, 41.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "tensorboard"]
    # At a START event TensorBoard forgets what it has read of that step and of later ones.
    starts = [event.step for file in events(tmp_path) for event in file if event.session_log.status == SessionLog.START]
    assert sorted(starts) == [0, 4]


def test_restart_without_a_checkpoint_begins_anew(tmp_path):
    for loss in (1.0, 2.0):
        with MetricsLog(tmp_path, enabled=True, total_steps=2, start_step=0) as log:
            log.log_eval(0, {"loss": loss})
            log.log(1, {"loss": loss})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    assert rows(tmp_path / "eval.jsonl") == [{"step": 0, "loss": 2.0}]


def test_other_ranks_write_nothing(tmp_path, capsys):
    with MetricsLog(tmp_path / "run", enabled=False, total_steps=1) as log:
        log.log(1, {"loss": 1.0})
        log.log_eval(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_is_closed_when_the_block_raises(tmp_path):
    with pytest.raises(KeyError), MetricsLog(tmp_path, enabled=True, total_steps=3) as log:
        log.log(1, {"loss": 1.0})
        raise KeyError
    assert scalars(events(tmp_path)[0]) == [("loss/loss", 1, 1.0)]
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.log(2, {"loss": 1.0})


def test_plain_lines_are_few_and_include_the_first_and_the_last(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    with MetricsLog(tmp_path, enabled=True, total_steps=10, start_step=4) as log:
        for step in range(5, 11):
            now[0] += 4.0
            log.log(step, {"loss": step / 4, "tokens_per_second": 12345.6})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 5/10  loss 1.2500  12,346 tokens/s  ETA 0:00:20",
        "step 8/10  loss 2.0000 (+0.5000)  12,346 tokens/s  ETA 0:00:08",
        "step 10/10  loss 2.5000 (+0.7500)  12,346 tokens/s  ETA 0:00:00",
    ]


def test_a_resumed_run_continues_curves_under_the_names_of_earlier_releases(tmp_path):
    """An event file of an earlier release is hidden: its steps and evaluations stand under the names of this one."""
    with MetricsLog(tmp_path, enabled=True, total_steps=3) as log:
        log.log_eval(0, {"loss": 9.0})
        for step in (1, 2, 3):
            log.log(step, {"loss": float(step), "lr": 0.5})
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.unlink()
    old = EventFile(tmp_path / "tensorboard", 0)
    old.scalars(0, {"eval/loss": 9.0})
    old.text(1, "rollouts", "text")
    old.scalars(1, {"train/loss": 1.0})
    old.file.close()
    old.file.path.rename(tmp_path / "tensorboard" / "events.out.tfevents.1700000000.host.1.0")  # files go by time
    for _ in range(2):  # the second time the newest file has the names of this release
        with MetricsLog(tmp_path, enabled=True, total_steps=3, start_step=2) as log:
            log.log(3, {"loss": 30.0, "lr": 0.5})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [tag for tag in accumulator.Tags()["scalars"] if accumulator.Scalars(tag)]
    assert sorted(shown) == ["eval/loss", "loss/loss", "optim/lr"]
    assert [(event.step, event.value) for event in accumulator.Scalars("loss/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert not has_earlier_names(tmp_path / "tensorboard")


def test_the_end_of_progress_draws_the_last_step(tmp_path, monkeypatch):
    with terminal(monkeypatch, 80) as screen, MetricsLog(tmp_path, enabled=True, total_steps=2) as log:
        log.log(1, {"loss": 2.0})
        log.log(2, {"loss": 1.0})  # sooner than a screen is drawn again
        log.end_progress()
        assert screen.read()[0].startswith("step 2/2")


RL_ROW = {
    "loss": 1e-9, "reward_mean": 0.3125, "groups_drawn": 16, "groups_without_variance": 3, "pass@1": 0.25,
    "truncated_fraction": 0.125, "response_length_mean": 1234.5, "tokens_per_second": 5000.0,
}  # fmt: skip


def test_a_line_of_reinforcement_learning_tells_rewards_and_not_the_loss(tmp_path, capsys):
    evaluated = {key: value for key, value in RL_ROW.items() if key.startswith(("reward", "pass", "trunc", "resp"))}
    with MetricsLog(tmp_path, enabled=True, total_steps=1) as log:
        log.log_eval(0, evaluated)
        log.log(1, RL_ROW)
        log.log_eval(1, {"loss": 2.5, "valid_tokens": 3})
    assert capsys.readouterr().err.splitlines() == [
        "evaluation after step 0: reward 0.312  pass@1 0.250  truncated 12%  length 1,234",
        "step 1/1  reward 0.312  pass@1 0.250  no variance 3/16  truncated 12%  length 1,234  5,000 tokens/s  "
        "ETA 0:00:00",
        "evaluation after step 1: loss 2.5000",
    ]


def test_flops_of_whole_sequences_and_of_what_goes_on_from_a_prompt():
    model = CostModel(linear=10.0, quadratic=2.0)
    assert model.cost_of_spans([(0, 1), (0, 3)]) == 12 + 48
    assert model.cost_of_spans([(0, 3), (3, 5), (3, 4)]) == 48 + (100 - 48) + (72 - 48)
    assert model.cost_of_spans([]) == 0.0
    # The rule of thumb, 6 FLOPs per parameter and token, holds for short sequences of a wide model.
    wide = CostModel.of(decoder(32, 4096, (32, 32, 128), 11008, 32000))
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert 3 * wide.cost_of_spans([(0, 128)] * 4) == pytest.approx(6 * parameters * 512, rel=0.01)


def test_mfu_is_work_over_capacity():
    """Backward does twice what forward did."""
    assert mfu(forward_flops=8e15, seconds=2.0, peak_flops_per_device=3e15, num_devices=8) == 0.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
    ],
)
def test_peak_of_known_devices(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda:0") == peak


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA L4", "NVIDIA GeForce RTX 4090"])
def test_peak_of_other_devices_is_measured(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(metrics, "_measured_peak", lambda device, size, dtype: (device, size, dtype))
    assert peak_flops("cuda:1") == ("cuda:1", 8192, torch.bfloat16)


def test_peak_of_the_cpu_is_measured_once_and_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    peak = peak_flops("cpu")
    assert 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu")) == peak
    assert torch.equal(torch.get_rng_state(), state)
