"""GRPO and DAPO end to end, on a task so small that the reward rises within ten optimizer steps."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs.runs import rows_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.run.metric_groups import GROUPS
from isoloss.recipes import launch
from isoloss.tools import reward_curve

STEPS, NUM_PROMPTS, NUM_GENERATIONS, MINIBATCHES = 12, 32, 8, 2


@dataclass(frozen=True)
class Run:
    """What a run left. groups: the lines of rollouts.jsonl by prompt and draw, their ids without the last number."""

    recipe: str
    folder: Path
    task: Path
    metrics: list[dict]
    rollouts: list[dict]
    groups: dict[str, list[dict]]


@pytest.fixture(scope="module", params=("grpo", "dapo"))
def run(request, sorter, tmp_path_factory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    data = [f"model.path={sorter}/hf", f"data.train={sorter}/rl.jsonl", f"data.eval={sorter}/eval.jsonl"]
    argv = [*data, "preset=tiny", f"train.steps={STEPS}", f"output_dir={folder}"]
    assert launch.main(request.param, argv) == 0
    rollouts = rows_of(folder / "rollouts.jsonl")
    groups = defaultdict(list)
    for row in rollouts:
        groups[row["id"].rpartition("/")[0]].append(row)
    yield Run(request.param, folder, sorter, rows_of(folder / "metrics.jsonl"), rollouts, groups)


def test_the_reward_rises(run):
    rows = rows_of(run.folder / "eval.jsonl")
    assert (rows[0]["step"], rows[-1]["step"]) == (0, STEPS)
    assert rows[-1]["reward_mean"] >= rows[0]["reward_mean"] + 0.1


def test_what_a_step_tells_is_what_its_completions_say(run):
    """Statistics of all that was generated for its batch, worked out from rollouts.jsonl, and the preset's schedule."""
    assert [row["step"] for row in run.metrics] == [*range(1, STEPS + 1)]
    for row in run.metrics:
        first = row["step"] - (row["step"] - 1) % MINIBATCHES
        told = [line for line in run.rollouts if line["step"] == first]
        rewards = [line["reward"] for line in told]
        assert row["reward_mean"] == pytest.approx(statistics.fmean(rewards))
        assert row["reward_std"] == pytest.approx(statistics.pstdev(rewards))
        assert row["pass@1"] == pytest.approx(statistics.fmean(reward == 1 for reward in rewards))
        assert row["response_length_mean"] == pytest.approx(statistics.fmean(line["tokens"] for line in told))
        assert row["truncated_fraction"] == pytest.approx(statistics.fmean(line["finish"] == "length" for line in told))
        learned = sum(line["tokens"] for line in told if line["kept"] and not line["masked"])
        assert sum(run.metrics[first - 1 + k]["valid_tokens"] for k in range(MINIBATCHES)) == learned
        assert row["applied"] == 1 and row["sequences"] == NUM_PROMPTS * NUM_GENERATIONS / MINIBATCHES
        assert row["weight_sum"] == pytest.approx(1, abs=1e-6)
        assert row["lr"] == pytest.approx(2e-4 * min(row["step"] / 5, 1))  # the preset's warm-up
        assert row["loss"] == row["policy_loss"] and row["grad_norm"] > 1e-3
        assert 0 < row["entropy"] < math.log(2048)
        assert row["tokens_per_second"] == pytest.approx(row["total_tokens"] / row["seconds"])
        assert row["seconds"] > row["train_seconds"] > 0 and row["mfu"] > 0
        assert row["clip_fraction"] == 0 or row["step"] > first  # the policy has not moved yet
        assert (row["generate_seconds"] > 0) == (row["step"] == first)  # once a batch
        assert row["train_rollout_logprob_diff_max"] < 1e-2 and row["train_rollout_outliers"] == 0
        assert row["train_rollout_correlation"] > 0.9999
        assert row["train_rollout_logprob_diff"] < 1e-4  # fp32, of weights that are equal bit for bit


def test_an_id_leads_from_the_row_to_its_completions(run):
    rows = (run.task / "rl.jsonl").read_text().splitlines()
    assert len({row["id"] for row in run.rollouts}) == len(run.rollouts)
    for row in run.rollouts:
        place, _draw, k = row["id"].split("/")
        file, _, line = place.partition(":")
        problem = json.loads(rows[int(line) - 1])
        assert file == "rl.jsonl" and 0 <= int(k) < NUM_GENERATIONS
        assert (row["prompt"], row["answer"]) == (problem["prompt"], problem["answer"])
        assert row["reward"] == (row["completion"] == problem["answer"] and row["finish"] == "stop")
    assert {len(group) for group in run.groups.values()} == {NUM_GENERATIONS}
    # No draw is missing: what was generated is told, dropped or not.
    assert sorted(int(id.rpartition("/")[2]) for id in run.groups) == [*range(len(run.groups))]


def test_the_better_completion_has_the_larger_advantage(run):
    compared = 0
    for group in run.groups.values():
        learned = [row for row in group if row["kept"] and not row["masked"]]
        right, wrong = ([row["advantage"] for row in learned if row["reward"] == reward] for reward in (1, 0))
        if right and wrong:
            compared += 1
            assert min(right) > max(wrong) and min(right) > 0
    assert compared > NUM_PROMPTS


def test_groups_without_variance_are_dropped_and_counted(run):
    dropped = [group for group in run.groups.values() if not group[0]["kept"]]
    batches = run.metrics[::MINIBATCHES]  # the optimizer steps of a batch tell the same of it
    assert sum(row["groups_dropped"] for row in batches) == len(dropped)
    assert sum(row["groups_drawn"] for row in batches) == len(run.groups) == batches[-1]["prompts_drawn"]
    assert len(run.groups) - len(dropped) == NUM_PROMPTS * len(batches)
    if run.recipe == "grpo":
        assert not dropped
        return
    assert dropped and max(row["draw_rounds"] for row in batches) > 1
    for group in run.groups.values():
        varied = len({row["reward"] for row in group}) > 1
        assert {row["kept"] for row in group} == {varied}


def test_tensorboard_shows_the_completions(run):
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    names = events.Tags()["scalars"]
    assert {"reward/reward_mean", "eval/reward_mean"} <= set(names)
    assert {name.partition("/")[0] for name in names} <= {*GROUPS, "eval"}, "every metric has a group"
    first = events.Tensors("rollouts/text_summary")[0]
    shown = first.tensor_proto.string_val[0].decode()
    assert first.step == 1 and run.rollouts[0]["id"] in shown and "| advantage |" in shown


def test_transformers_loads_what_was_learned(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "hf", local_files_only=True)
    messages = run.rollouts[0]["prompt"]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    completion = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(completion, skip_special_tokens=True)
    assert len(text) == 3 and set(text) <= set("abcdef")


def test_the_curve_is_drawn(run, tmp_path, capsys):
    out = tmp_path / "curve.png"
    assert reward_curve.main([str(run.folder), "--out", str(out), "--labels", "run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    rewards = [row["reward_mean"] for row in rows_of(run.folder / "eval.jsonl")]
    assert f"run: held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" in last
    drawn = sum(row["groups_dropped"] for row in run.metrics[::MINIBATCHES])
    assert (f"dropped and redrew {drawn} of {len(run.groups)} groups" in last) == (run.recipe == "dapo")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_dapo_without_more_flags_is_dapo():
    algorithm = ("dynamic_sampling", "mask_truncated", "overlong_penalty", "clip_low", "clip_high", "kl_coef")
    for overrides in (["model.path=a model", "data.train=prompts.jsonl"], []):
        config = launch.compose_config("dapo", RLConfig, overrides)[0]
        assert [getattr(config.algorithm, key) for key in algorithm] == [True, True, 1.0, 0.2, 0.28, 0.0]
        assert config.algorithm.overlong_buffer > 0 and config.loss.aggregation == "token-mean"
    plain = launch.compose_config("grpo", RLConfig, ["model.path=a model"])[0]
    assert plain == RLConfig(ModelConfig("a model"))
