"""Every metric that the product can write has a group in TensorBoard."""

import re
from pathlib import Path

import pytest

from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.backends.servers import fault_counts
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.rl.group_sampling import SampledGroups
from isoloss.engine.rl.losses import mean_metrics, policy_loss
from isoloss.engine.rl.report import batch_stats
from isoloss.engine.run.metric_groups import GROUPS, OTHER, eval_tag, tag
from isoloss.engine.run.metrics import metrics_row
from isoloss.engine.step.engine import OptimResult
from isoloss.engine.step.forward_backward import StepMetrics

ROOT = Path(__file__).parents[2]


def written() -> set[str]:
    """Keys, by the code that writes them and by the table of the documentation."""
    step = StepMetrics(0.0, 0.0, 0.0, valid_tokens=1, total_tokens=1, computed_tokens=1, sequences=1, micro_batches=1)
    keys = {*metrics_row(step, OptimResult(0.0, 0.0, True), 1.0, 0.0), *fault_counts.NAMES}
    loss = policy_loss(RLConfig(ModelConfig("somewhere"), algorithm=AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1)))
    keys |= {term.name for term in loss.terms} | {*loss.max_metrics, *loss.correlation_metrics}
    keys |= {*mean_metrics(AlgorithmConfig()), *batch_stats(SampledGroups())}
    metrics = (ROOT / "docs/rl.md").read_text().split("## Metrics")[1].split("### Warnings")[0]
    rows = [line.split("|")[1] for line in metrics.splitlines() if line.startswith("| `")]
    return keys | {key for row in rows for key in re.findall(r"`([a-z@0-9_]+)`", row)}


def test_every_key_that_is_written_has_a_group():
    keys = written()
    assert {"loss", "kl_loss", "servers_lost", "groups_without_variance", "staleness_max"} <= keys
    assert [key for key in sorted(keys) if tag(key).startswith(f"{OTHER}/")] == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward_mean", "reward/reward_mean"),
        ("gsm8k/truncated_fraction", "length/gsm8k/truncated_fraction"),
        ("reward/format_reward", "reward/format_reward"),
        ("reward/reward_mean", "reward/reward/reward_mean"),  # of a data source with that name
        ("mine", "other/mine"),
        ("source/mine", "other/source/mine"),
    ],
)
def test_names(key, name):
    assert tag(key) == name and eval_tag(key) == f"eval/{key}"


def test_no_key_has_two_groups():
    keys = [key for keys in GROUPS.values() for key in keys.split()]
    assert len(keys) == len(set(keys))
