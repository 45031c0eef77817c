"""The page of the metrics explains every key that a run can write, and no other. test_blocks.py looks at real runs."""

from types import SimpleNamespace
from typing import Any

from support.suite.metrics_page import explained, unexplained

from isoloss.engine.config.schema import MoeConfig
from isoloss.engine.rl import report
from isoloss.engine.rl.backends.servers.fault_counts import NAMES
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.group_sampling import SampledGroups
from isoloss.engine.rl.losses import policy_loss, value_loss
from isoloss.engine.rl.prompt_ledger import Ledger
from isoloss.engine.run.metrics import metrics_row
from isoloss.engine.step import moe_balancing
from isoloss.engine.step.engine import OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.engine.step.losses import Loss
from isoloss.recipes.launch import RECIPES, compose_config

# Of every row, and of the parts of reinforcement learning that exist in a run only.
OF_RUNS = {"step", "generate_seconds", "sync_seconds", "staleness_mean", "staleness_max"}


def of_loss(loss: Loss) -> set[str]:
    names = {term.name for term in loss.terms}
    return names.union(loss.mean_metrics, loss.max_metrics, loss.correlation_metrics)


def writable() -> set[str]:
    config: Any = compose_config(
        "grpo", RECIPES["grpo"].config, ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1", "algorithm.veto=1e-4"]
    )[0]
    step = StepMetrics(0.0, 0.0, 1.0, 1, 1, 1, 1, 1, reruns=0, replayed=1.0)
    critic: Any = Critic.__new__(Critic)  # without a model: its metrics are asked for alone
    critic._engine = SimpleNamespace(train_step=lambda samples, loss: (step, OptimResult(1.0, 1.0, True)))
    critic._loss = value_loss(config.algorithm, config.loss)
    moe: Any = moe_balancing.configured(
        MoeConfig(aux_loss="sequence", aux_loss_coef=0.1, z_loss_coef=0.1), SimpleNamespace(critic=False)
    )
    return {
        *OF_RUNS,
        *metrics_row(step, OptimResult(1.0, 1.0, True), 1.0, 0.5),
        *of_loss(policy_loss(config)),
        *critic.train_step(()),
        *(loss.name for loss in moe.losses),
        *report.batch_stats(SampledGroups(counts={**Ledger().counts(), **Ledger().mean_lengths()})),
        *report.AGENT_STATS,
        *report.AGENT_COUNTS,
        *NAMES,
    }


def test_every_key_is_explained():
    assert len(writable()) > 50 and unexplained(writable()) == set()


def test_every_explained_key_can_be_written():
    assert explained() - writable() == {"reward/NAME", "SOURCE/reward_mean"} & explained()


def test_names_of_sources_and_functions():
    assert unexplained(["reward/brief", "gsm8k/reward_mean", "gsm8k/odd", "odd"]) == {"gsm8k/odd", "odd"}
