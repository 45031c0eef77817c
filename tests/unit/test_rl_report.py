"""What a run tells of its completions, worked out by hand on a batch made by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl import report
from isoloss.engine.rl.experience import RolloutBatch
from isoloss.engine.rl.group_sampling import SampledGroups
from isoloss.engine.rl.health import FIRST_ERROR
from isoloss.engine.rl.report import RolloutLog, batch_stats, completion_stats, copy_of_the_model, rollout_stats
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Trajectory
from isoloss.engine.run.metrics import MetricsLog

# (source, tokens, how it ended, reward). Of ten one has an infinite reward, one none, and one no tokens.
ROWS = [
    ("easy", 3, "stop", 1.0),
    ("easy", 5, "stop", 2.0),
    ("easy", 8, "length", 0.0),
    ("easy", 2, "stop", math.nan),
    ("hard", 8, "length", 0.5),
    ("hard", 8, "length", 0.5),
    ("hard", 4, "abort", 0.5),
    ("hard", 0, "stop", 1.0),
    ("hard", 6, "stop", -1.5),
    ("hard", 1, "stop", math.inf),
]


def trajectory(number: int, source: str, length: int, finish, reward: float, parts=None) -> Trajectory:
    prompt = Prompt(f"train.jsonl:{number}", (1, 2), f"question {number}", f"answer {number}", source)
    tokens = tuple(range(10, 10 + length))
    completion = Completion(f"train.jsonl:{number}/0/0", tokens, (-0.25,) * length, (3,) * length, finish)
    return Trajectory.of_one_turn(prompt, completion, f"text {number}", reward, parts or {})


BATCH = [trajectory(number, *row) for number, row in enumerate(ROWS)]


def test_statistics_by_hand():
    """Seven valid rewards: 1, 2, 0, 0.5, 0.5, 0.5, -1.5."""
    assert completion_stats(BATCH) == pytest.approx(
        {
            "reward_mean": 3 / 7,
            # Their squares add up to 8: the mean square less the square of the mean.
            "reward_std": math.sqrt(8 / 7 - (3 / 7) ** 2),
            "pass@1": 2 / 7,
            "reward_errors": 3,
            "reward_timeouts": 0,
            "response_length_mean": 4.5,
            "truncated_fraction": 0.3,
        }
    )


def test_statistics_of_sources_and_parts():
    """easy: valid are 1, 2 and 0; hard: 0.5 three times and -1.5. A part counts where the whole is valid."""
    parts = [{"a": 2.0, "b": -1.0}, {"a": 4.0, "b": -2.0}, {"a": 0.0, "b": 0.0}, {"a": 100.0, "b": math.nan}]
    told = [trajectory(n, *row, parts[n] if n < 4 else {}) for n, row in enumerate(ROWS)]
    found = rollout_stats(told)
    assert found["easy/reward_mean"] == 1 and found["easy/reward_std"] == pytest.approx(math.sqrt(2 / 3))
    assert found["easy/pass@1"] == pytest.approx(2 / 3) and found["easy/truncated_fraction"] == 0.25
    assert found["hard/reward_mean"] == 0 and found["hard/reward_std"] == pytest.approx(math.sqrt(3) / 2)
    assert found["hard/pass@1"] == 0 and found["hard/truncated_fraction"] == pytest.approx(2 / 6)
    assert found["hard/reward_errors"] == 2 and found["hard/response_length_mean"] == 4.5
    assert (found["reward/a"], found["reward/b"]) == (2.0, -1.0)
    assert not any("/" in key for key in rollout_stats(BATCH[:4]))  # one source, no parts


def test_nothing_that_is_valid_and_nothing_at_all():
    none = dict.fromkeys(completion_stats(BATCH), 0.0)
    assert completion_stats([]) == none
    assert completion_stats([BATCH[3]]) == none | {"reward_errors": 1, "response_length_mean": 2}


def group(draw: int, *rewards: float) -> Group:
    found = tuple(trajectory(draw, "s", 4, "stop", reward) for reward in rewards)
    return Group(draw, found[0].prompt, found)


KEPT = (group(0, 0.0, 1.0), group(2, 1.0, 3.0), group(5, math.nan, 1.0))
DROPPED = (group(1, 1.0, 1.0), group(3, 0.0, 0.0), group(4, math.nan, math.nan))


def test_what_was_dropped_is_counted_and_part_of_the_statistics():
    found = batch_stats(SampledGroups(KEPT, DROPPED, rounds=4, counts={"prompts_drawn": 46}))
    counts = ("groups_drawn", "groups_dropped", "groups_without_variance", "draw_rounds", "prompts_drawn")
    assert [found[key] for key in counts] == [6, 3, 4, 4, 46]
    assert found["reward_mean"] == pytest.approx(8 / 9) and found["reward_errors"] == 3
    assert found["pass@1"] == pytest.approx(6 / 9)


@pytest.fixture
def logged(tmp_path):
    """What is written of a batch: lines of rollouts.jsonl."""

    def log(groups: SampledGroups, samples: list[Sample], step: int = 3, start_step: int = 2) -> list[dict]:
        batch = RolloutBatch(tuple(samples), (tuple(range(len(samples))),))
        with MetricsLog(tmp_path, enabled=True, total_steps=9, start_step=start_step) as metrics:
            RolloutLog(metrics).batch(step, groups, batch)
        return [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]

    return log


def test_a_line_tells_the_completion_and_what_was_learned_from_it(logged):
    advantages = [(1.5, True), (-0.5, True), (0.25, True), (-2.0, True), (0.0, False), (0.75, True)]
    mask_T = torch.arange(6) >= 2
    samples = [
        Sample(torch.arange(6), mask_T & learned, 0, {"advantages": mask_T * advantage})
        for advantage, learned in advantages
    ]
    lines = logged(SampledGroups(KEPT, DROPPED, rounds=2, counts={}), samples)
    assert [(line["advantage"], line["masked"], line["kept"]) for line in lines[:6]] == [
        (advantage, not learned, True) for advantage, learned in advantages
    ]
    assert [(line["kept"], line.keys() >= {"advantage"}) for line in lines[6:]] == [(False, False)] * 6
    rewards = [t.reward for g in (*KEPT, *DROPPED) for t in g.trajectories]
    assert [line["reward"] for line in lines] == [None if math.isnan(reward) else reward for reward in rewards]
    assert lines[2] == {
        "step": 3, "id": "train.jsonl:2/0/0", "prompt": "question 2", "completion": "text 2", "answer": "answer 2",
        "reward": 1.0, "finish": "stop", "tokens": 4, "logprob": -1.0, "weight_versions": [3], "kept": True,
        "masked": False, "advantage": 0.25,
    }  # fmt: skip


def test_the_first_failure_of_a_batch_is_kept_for_warnings(tmp_path):
    failed = [replace(trajectory(n, "s", 4, "stop", math.nan), error=f"f: KeyError in r.py:{n}") for n in (7, 8)]
    broken = Group(0, failed[0].prompt, (trajectory(6, "s", 4, "stop", 1.0), *failed))
    sample = Sample(torch.arange(6), torch.arange(6) >= 2, 0, {"advantages": torch.zeros(6)})
    with MetricsLog(tmp_path, enabled=True, total_steps=9) as metrics:
        log = RolloutLog(metrics)
        log.batch(1, SampledGroups([KEPT[0]], [broken]), RolloutBatch((sample, sample)))
        assert log.told == {FIRST_ERROR: "train.jsonl:7/0/0: f: KeyError in r.py:7"}
        log.batch(2, SampledGroups([KEPT[0]], []), RolloutBatch((sample, sample)))
        assert log.told == {}


def test_a_resumed_run_takes_out_what_comes_again(tmp_path):
    """The lines of the steps that are done stay, and so does the evaluation before the last of them."""
    (tmp_path / "rollouts.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)))
    (tmp_path / "eval_rollouts.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (0, 1, 2, 3)))
    with MetricsLog(tmp_path, enabled=True, total_steps=9, start_step=2) as metrics:
        RolloutLog(metrics)
    kept = {name: (tmp_path / name).read_text().split() for name in ("rollouts.jsonl", "eval_rollouts.jsonl")}
    assert [len(lines) // 2 for lines in kept.values()] == [2, 2]


@pytest.mark.parametrize(
    ("backend", "device", "says"),
    [("transformers", "cuda", "3.0 GiB"), ("transformers", "cpu", None), ("sglang", "cuda", None)],
)
def test_a_copy_of_the_model_on_every_gpu_is_told(backend, device, says, monkeypatch):
    monkeypatch.setattr(report, "num_parameters", lambda arch: arch)
    config: Any = SimpleNamespace(rollout=SimpleNamespace(backend=backend))
    engine: Any = SimpleNamespace(
        arch=3 << 29, device=torch.device(device), model=SimpleNamespace(dtype=torch.bfloat16)
    )
    found = copy_of_the_model(config, engine)
    assert (found == []) if says is None else (says in found[0] and "rollout.backend=sglang" in found[0])
