"""The numbers of the loop, worked out again: probabilities by transformers, from the weights of that moment.

The temperature is not 1, a batch feeds two optimizer steps, and the policy moves fast. What the loop puts into its
samples, and what its metrics tell, then depends on the right weights, the right temperature and the right tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from oracles.rl import formulas
from support.models.plain_policy import PlainPolicy, write_random
from support.runs import rl_runs
from support.runs.runs import metrics_of

from isoloss.engine.rl import loop
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.experience import RolloutBatch
from isoloss.engine.rl.trajectory import Group, Trajectory
from isoloss.engine.step.engine import Engine
from isoloss.recipes import launch

TEMPERATURE, KL_COEF, STEPS, MINIBATCHES, PROMPTS, GENERATIONS = 0.6, 0.3, 6, 2, 3, 4
LONGEST, STOPS = 12, {2, *range(3, 2048, 8)}  # 2 is the tokenizer's own; generation_config.json names the others
REWARD = "def halves(completion_tokens):\n    return (0.0, 0.5, 1.0)[sum(completion_tokens) % 3]\n"
EVALUATIONS = (0, 3, 6)  # the second one in the middle of a batch
LR = 3e-3
# fp32 of the engine against fp64 of transformers, in nats; another temperature or older weights are off by 0.1.
CLOSE = 2e-4


def halves(trajectory: Trajectory) -> float:
    return (0.0, 0.5, 1.0)[sum(trajectory.completion.tokens) % 3]


def tokens_of(trajectory: Trajectory) -> tuple[int, ...]:
    return (*trajectory.prompt.tokens, *trajectory.completion.tokens)


@dataclass(frozen=True)
class Run:
    """What the loop did. policies: before each optimizer step, and in the end."""

    config: RLConfig
    policies: list[PlainPolicy]
    batches: list[tuple[list[Group], RolloutBatch]]
    steps: list[list[torch.Tensor]]  # the tokens of each sample of each optimizer step
    evaluations: list[list[Trajectory]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    inputs = rl_runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    write_random(inputs / "model")
    (inputs / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(STOPS - {2})}))
    (inputs / "rewards.py").write_text(REWARD)
    folders: list[Path] = []
    policies: list[PlainPolicy] = []
    batches: list[tuple[list[Group], RolloutBatch]] = []
    steps: list[list[torch.Tensor]] = []
    evaluations: list[list[Trajectory]] = []
    train_step, evaluate = Engine.train_step, loop.Rollout.evaluate

    def keep(engine: Engine) -> None:
        folders.append(tmp_path_factory.mktemp("weights"))
        engine.export_hf(folders[-1])
        policies.append(PlainPolicy(folders[-1]))

    def logging(log, step, groups, batch):
        batches.append((list(groups.kept), batch))

    def stepping(engine, samples, *rest):
        keep(engine)
        steps.append([sample.tokens_T for sample in samples])
        found = train_step(engine, samples, *rest)
        if len(steps) == STEPS:
            keep(engine)
        return found

    def evaluating(rollout, prompts):
        evaluations.append(evaluate(rollout, prompts))
        return evaluations[-1]

    argv = [
        *rl_runs.overrides_of(inputs, inputs / "run"),
        "model.from_scratch=false",
        f"batch.global_size={PROMPTS}",
        f"data.eval={inputs}/prompts.jsonl",
        f"optim.lr={LR}",
        "optim.schedule=linear",
        f"optim.min_lr={LR / 2}",
        f"train.steps={STEPS}",
        "train.eval_every=3",
        f"rollout.temperature={TEMPERATURE}",
        "rollout.eval_temperature=0",
        f"rollout.num_generations={GENERATIONS}",
        f"reward.function={inputs}/rewards.py:halves",
        f"algorithm.minibatches={MINIBATCHES}",
        f"algorithm.kl_coef={KL_COEF}",
        "algorithm.clip_high=0.3",
    ]
    with (
        mock.patch.object(loop.RolloutLog, "batch", logging),
        mock.patch.object(Engine, "train_step", stepping),
        mock.patch.object(loop.Rollout, "evaluate", evaluating),
    ):
        assert launch.main("grpo", argv) == 0
    config = launch.compose_config("grpo", RLConfig, argv)[0]
    yield Run(config, policies, batches, steps, evaluations)


def learned(run: Run, batch: int):
    """Of every completion of the batch: its trajectory, its sample, its tokens and where the completion begins."""
    groups, experience = run.batches[batch]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory, sample in zip(trajectories, experience.samples, strict=True):
        tokens_T, start = torch.tensor(tokens_of(trajectory)), len(trajectory.prompt.tokens)
        assert torch.equal(sample.tokens_T, tokens_T)
        assert sample.mask_T.tolist() == [False] * start + [True] * (len(tokens_T) - start)
        yield trajectory, sample, tokens_T, start


@pytest.mark.parametrize("batch", range(STEPS // MINIBATCHES))
def test_old_and_reference_probabilities_are_those_of_their_weights_at_the_temperature(run, batch):
    """Also that of the rollout: all three of a token, from weights that transformers loads."""
    present, initial = run.policies[batch * MINIBATCHES], run.policies[0]
    moved = 0.0
    with torch.no_grad():
        for trajectory, sample, tokens_T, start in learned(run, batch):
            of_policy = present.logprobs(tokens_T, start, TEMPERATURE)
            of_reference = initial.logprobs(tokens_T, start, TEMPERATURE)
            assert (sample.fields["train_logprobs"][start:] - of_policy).abs().max() < CLOSE
            assert (sample.fields["ref_logprobs"][start:] - of_reference).abs().max() < CLOSE
            assert (sample.fields["rollout_logprobs"][start:] - of_policy).abs().max() < CLOSE
            assert sample.fields["rollout_logprobs"][start:].tolist() == list(trajectory.completion.logprobs)
            moved = max(moved, float((of_policy - of_reference).abs().max()))
    assert moved == 0 if batch == 0 else moved > 0.1


@pytest.mark.parametrize("step", range(STEPS))
def test_the_metrics_of_a_step_are_the_formulas_of_its_weights(run, step):
    """The loss and its terms, the KL divergence, the entropy and the clipped share, token by token."""
    row = metrics_of(run.config)[step]
    present, old, initial = run.policies[step], run.policies[step - step % MINIBATCHES], run.policies[0]
    groups = run.batches[step // MINIBATCHES][0]
    start_of = {tokens_of(t): len(t.prompt.tokens) for group in groups for t in group.trajectories}
    advantage_of: dict[tuple[int, ...], float] = {}
    for group in groups:
        advantages_k = formulas.grpo([halves(trajectory) for trajectory in group.trajectories], 1e-6)
        advantage_of |= zip(map(tokens_of, group.trajectories), advantages_k)
    policy, kl, entropy, clipped = [], [], [], []
    with torch.no_grad():
        for tokens_T in run.steps[step]:
            tokens = tuple(tokens_T.tolist())
            start, advantage = start_of[tokens], advantage_of[tokens]
            logp_C, old_C, ref_C = (
                model.logprobs(tokens_T, start, TEMPERATURE).numpy() for model in (present, old, initial)
            )
            advantages_C = np.full(len(logp_C), advantage)
            policy += formulas.clip(logp_C, old_C, advantages_C, 0.2, 0.3, dual=3.0).tolist()
            kl += formulas.kl(logp_C, ref_C, "k3").tolist()
            entropy += present.entropies(tokens_T, start, TEMPERATURE).tolist()
            ratio_C = np.exp(logp_C - old_C)
            clipped += ((ratio_C > 1.3) & (advantage > 0) | (ratio_C < 0.8) & (advantage < 0)).tolist()
    assert row["valid_tokens"] == len(policy) and row["sequences"] == len(run.steps[step])
    assert row["policy_loss"] == pytest.approx(np.mean(policy), abs=CLOSE)
    assert row["kl"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-9)
    assert row["kl_loss"] == pytest.approx(np.mean(np.minimum(kl, 10)), rel=1e-3, abs=1e-9)
    assert row["loss"] == pytest.approx(np.mean(policy) + KL_COEF * np.mean(np.minimum(kl, 10)), abs=CLOSE)
    assert row["entropy"] == pytest.approx(np.mean(entropy), rel=1e-4)
    assert row["clip_fraction"] == pytest.approx(np.mean(clipped), abs=1.5 / len(clipped))
    assert row["applied"] == 1
    if step == 0:
        assert abs(row["kl"]) < 1e-9
    else:
        assert row["kl"] > 1e-3
    if step == 1:
        assert np.mean(clipped) > 0.01  # the policy has moved since it generated: the ratio has something to do


@pytest.mark.parametrize("batch", range(STEPS // MINIBATCHES))
def test_the_statistics_of_a_batch_are_those_of_its_completions(run, batch):
    groups = run.batches[batch][0]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([halves(trajectory) for trajectory in trajectories])
    assert len(set(rewards)) > 1 and 1 in rewards and len(rewards) == PROMPTS * GENERATIONS
    for number, group in enumerate(groups):  # an id seeds a completion: no two of a run have one
        place = f"{group.prompt.id}/{batch * PROMPTS + number}"
        assert [t.completion.id for t in group.trajectories] == [f"{place}/{k}" for k in range(GENERATIONS)]
    tokens = [trajectory.completion.tokens for trajectory in trajectories]
    cut = [of_one[-1] not in STOPS for of_one in tokens]
    assert any(cut) and not all(cut)
    for row in metrics_of(run.config)[batch * MINIBATCHES : (batch + 1) * MINIBATCHES]:
        assert row["reward_mean"] == pytest.approx(rewards.mean())
        assert row["reward_std"] == pytest.approx(rewards.std())
        assert row["pass@1"] == pytest.approx((rewards == 1).mean())
        assert row["response_length_mean"] == pytest.approx(np.mean([len(of_one) for of_one in tokens]))
        assert row["truncated_fraction"] == pytest.approx(np.mean(cut))
        assert row["reward_errors"] == 0 and row["groups_dropped"] == 0 and row["groups_drawn"] == PROMPTS
        assert row["groups_without_variance"] == sum(len({halves(t) for t in g.trajectories}) == 1 for g in groups)
        assert row["prompts_drawn"] == (batch + 1) * PROMPTS


def test_the_learning_rate_is_the_schedules(run):
    """Linear from LR down to half of it, which the step after the last one would have."""
    rates = [row["lr"] for row in metrics_of(run.config)]
    assert rates == pytest.approx([LR * (1 - 0.5 * step / STEPS) for step in range(STEPS)])


def test_an_evaluation_is_greedy_and_told_as_it_was(run):
    """rollout.eval_temperature=0: what transformers generates greedily from the weights of that moment."""
    rows = metrics_of(run.config, "eval")
    assert [row["step"] for row in rows] == [*EVALUATIONS]
    for row, trajectories in zip(rows, run.evaluations, strict=True):
        policy = run.policies[int(row["step"])]
        assert len(trajectories) == rl_runs.PROMPTS
        for trajectory in trajectories:
            assert trajectory.completion.tokens == greedy(policy, trajectory.prompt.tokens)
        rewards = np.array([halves(trajectory) for trajectory in trajectories])
        assert row["reward_mean"] == pytest.approx(rewards.mean())
        assert row["reward_std"] == pytest.approx(rewards.std())
        assert row["pass@1"] == pytest.approx((rewards == 1).mean())
        lengths = [len(trajectory.completion.tokens) for trajectory in trajectories]
        assert row["response_length_mean"] == pytest.approx(np.mean(lengths))


def greedy(policy: PlainPolicy, prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + LONGEST:
            tokens.append(int(policy.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in STOPS:
                break
    return tuple(tokens[len(prompt) :])
