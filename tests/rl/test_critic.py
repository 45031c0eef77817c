"""PPO's critic learns, by its own learning rate: from a hand-made return to weights that move."""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from support.models.plain_policy import PlainPolicy, write_random
from support.runs import rl_runs
from support.runs.runs import metrics_of
from support.runs.training import Arrays, weights

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.step.engine import Engine
from isoloss.recipes import launch

STEPS, CRITIC_LR, POLICY_LR, LAMBDA = 10, 3e-3, 1e-5, 0.9
HEAD = "output_layer.weight"
# How far AdamW with betas of 0.9 and 0.95 moves a weight, in learning rates, whose first gradient is that of step 2.
ADAM_SECOND = (0.1 / (1 - 0.9**2)) / (0.05 / (1 - 0.95**2)) ** 0.5


@dataclass(frozen=True)
class Run:
    """rows: of metrics.jsonl. critic, policy: the weights before each step, and in the end. completions: (prompt,
    tokens, reward) of each that the batch holds. initial: what both started from."""

    rows: list[dict]
    critic: list[Arrays]
    policy: list[Arrays]
    completions: list[tuple[list[int], list[int], float]]
    initial: PlainPolicy


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    """One generated batch, and ten optimizer steps on it."""
    inputs = rl_runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    write_random(inputs / "model")
    critic, policy, completions = [], [], []
    train_step, groups = Engine.train_step, Rollout.collect

    def noting(*args, **options):
        found = groups(*args, **options)
        for trajectory in (t for group in found for t in group.trajectories):
            tokens = list(trajectory.completion.tokens)
            completions.append((list(trajectory.prompt.tokens), tokens, sum(tokens) % 4 / 4))  # rl_runs' quarters
        return found

    def stepping(engine, *rest):
        kept = critic if engine.arch.critic else policy
        kept.append(weights(engine))
        found = train_step(engine, *rest)
        if len(kept) == STEPS:
            kept.append(weights(engine))
        return found

    argv = [
        *rl_runs.overrides_of(inputs, inputs / "run"),
        "model.from_scratch=false",
        f"train.steps={STEPS}",
        f"optim.lr={POLICY_LR}",
        "optim.clip=0",
        "optim.weight_decay=0",
        "algorithm.advantage=gae",
        f"algorithm.gae_lambda={LAMBDA}",
        f"algorithm.critic_lr={CRITIC_LR}",
        "algorithm.value_clip=null",
        f"algorithm.epochs={STEPS}",
    ]
    with mock.patch.object(Engine, "train_step", stepping), mock.patch.object(Rollout, "collect", noting):
        assert launch.main("grpo", argv) == 0
    config = launch.compose_config("grpo", RLConfig, argv)[0]
    yield Run(metrics_of(config), critic, policy, completions, PlainPolicy(inputs / "model"))


def returns_of(length: int, reward: float) -> np.ndarray:
    """What is to come before each token, where every value was 0: the reward at the end, discounted by lambda."""
    return reward * LAMBDA ** np.arange(length - 1, -1, -1.0)


def test_the_first_value_loss_is_that_of_values_of_0(run):
    returns_N = np.concatenate([returns_of(len(tokens), reward) for _, tokens, reward in run.completions])
    assert len({reward for _, _, reward in run.completions}) > 1
    assert run.rows[0]["value_loss"] == pytest.approx((returns_N**2).mean() / 2, rel=1e-6)


def test_the_second_value_loss_is_that_of_the_head_after_one_step(run):
    """Values by transformers: the head has moved, the layers below it not yet, as a head of 0 gives them nothing."""
    head_D = torch.from_numpy(run.critic[1][HEAD][0])
    errors = []
    with torch.no_grad():
        for prompt, tokens, reward in run.completions:
            hidden_TD = run.initial.model.base_model(torch.tensor([prompt + tokens])).last_hidden_state[0]
            values_T = hidden_TD[len(prompt) - 1 : -1] @ head_D
            errors += (values_T.numpy() - returns_of(len(tokens), reward)).tolist()
    assert run.rows[1]["value_loss"] == pytest.approx(np.square(errors).mean() / 2, rel=1e-4)


def test_the_value_loss_falls(run):
    losses = [row["value_loss"] for row in run.rows]
    assert losses[-1] < losses[0] / 3 and losses[4] < losses[0]
    assert all(row["critic_grad_norm"] > 1e-4 for row in run.rows)


def test_critic_and_policy_move_by_learning_rates_of_their_own(run):
    """AdamW's first step moves a weight by the learning rate, whatever its gradient (far above epsilon)."""
    head = np.abs(run.critic[1][HEAD] - run.critic[0][HEAD])
    assert not run.critic[0][HEAD].any() and head == pytest.approx(CRITIC_LR, rel=1e-3)
    body = "decoder.layers.0.mlp.linear_fc2.weight"
    of_policy = np.median(np.abs(run.policy[1][body] - run.policy[0][body]))
    of_critic = np.median(np.abs(run.critic[2][body] - run.critic[1][body]))
    assert of_policy == pytest.approx(POLICY_LR, rel=0.02)
    assert of_critic == pytest.approx(CRITIC_LR * ADAM_SECOND, rel=0.1)
    assert [(row["lr"], row["critic_lr"]) for row in run.rows] == [(POLICY_LR, CRITIC_LR)] * STEPS


def test_it_starts_from_the_policys_weights(run):
    for name in run.critic[0].keys() - {HEAD}:
        assert np.array_equal(run.critic[0][name], run.policy[0][name]), name
