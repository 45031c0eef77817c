"""Rewarded completions -> samples: what lands on which token, what is masked, and the order of the optimizer steps.

The models are functions of token and place, so that every number tells where it came from.
"""

import itertools
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from oracles.rl import formulas

from isoloss.engine.batching.packing import StepSamples, pack
from isoloss.engine.config.schema import BatchConfig, LossConfig, ModelConfig, TrainConfig
from isoloss.engine.rl import advantages
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.rl.experience import RolloutBatch, minibatches, on_the_host, with_advantages, with_logprobs
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Trajectory
from isoloss.parallel.ops.prefix_tree import PrefixTree

LONGEST, BUFFER = 6, 3
# (prompt length, (completion length, reward) of each): uneven, with failed rewards, an empty completion, a group with
# one valid completion and one with none. Completions of LONGEST tokens were cut.
BATCH = [
    (3, [(4, 1.0), (LONGEST, 0.0), (1, 0.5), (2, math.nan)]),
    (1, [(2, 0.0), (5, 1.0), (0, 1.0), (3, 2.0)]),
    (5, [(3, 1.0), (2, math.inf), (LONGEST, math.nan), (0, 0.0)]),
    (2, [(LONGEST, 1.0), (5, 0.25), (4, 0.25), (6, 3.0)]),
    (2, [(2, math.nan), (1, math.nan), (3, math.nan), (1, math.nan)]),
]


def make_groups(batch=BATCH):
    """Tokens are unique over the batch; the backend's log-probability of token k is -k / 1000."""
    unique = itertools.count(1)
    groups = []
    for number, (prompt_length, completions) in enumerate(batch):
        prompt = Prompt(f"train.jsonl:{number}", tuple(itertools.islice(unique, prompt_length)), "?")
        trajectories = []
        for length, reward in completions:
            tokens = tuple(itertools.islice(unique, length))
            finish = "length" if length == LONGEST else "stop"
            logprobs = tuple(-token / 1000 for token in tokens)
            completion = Completion(f"{number}", tokens, logprobs, (0,) * length, finish)
            trajectories.append(Trajectory.of_one_turn(prompt, completion, "", reward))
        groups.append(Group(number, prompt, tuple(trajectories)))
    return groups


class Model:
    """A number for every target: `of_token(its id)`; counts how often it was asked."""

    def __init__(self, of_token):
        self.of_token, self.asked, self.routed = of_token, 0, []

    def values(self, samples):
        self.asked += 1
        self.routed = [sample.routes is not None for sample in samples]
        return [self.of_token(sample.tokens_T.double()) * sample.mask_T for sample in samples]

    def logprobs(self, samples, temperature):
        assert temperature == 1
        return self.values(samples)


def policy_of(tokens):
    return -tokens / 1000 - 0.1 * torch.sin(tokens)


def reference_of(tokens):
    return -tokens / 1000 - 0.3 * torch.cos(tokens)


def values_of(tokens):
    return torch.sin(3 * tokens)


class OneRank:
    """What a `Scatter` does where rank 0 is alone."""

    here = True

    def make(self, call):
        return call()

    def hold(self, samples):
        return samples


def models(policy=policy_of, reference=reference_of, critic=values_of) -> Any:
    of_models = {"policy": policy, "reference": reference, "critic": critic}
    return SimpleNamespace(scatter=OneRank(), **{name: of and Model(of) for name, of in of_models.items()})


def config_of(batch=BATCH, seed=0, loss=None, **algorithm):
    return RLConfig(
        ModelConfig("somewhere"),
        batch=BatchConfig(global_size=len(batch)),
        loss=loss or LossConfig(),
        rollout=RolloutConfig(num_generations=len(batch[0][1]), max_new_tokens=LONGEST),
        algorithm=AlgorithmConfig(**algorithm),
        train=TrainConfig(seed=seed),
    )


def prepared(batch=BATCH, step=0, asked=None, **options):
    config = config_of(batch, **options)
    asked = SimpleNamespace(**vars(asked or models()))
    if not config.algorithm.uses_reference:
        asked.reference = None
    if not config.algorithm.uses_critic:
        asked.critic = None
    return prepare(make_groups(batch), asked, config, step, {"reward_mean": 0.5})


def prepare(groups, models, config, step, stats):
    samples = with_logprobs(groups, models, config)
    samples = with_advantages(samples, groups, config)
    return RolloutBatch(tuple(samples), minibatches([sample.group for sample in samples], step, config), stats)


def trajectories_of(groups):
    return [trajectory for group in groups for trajectory in group.trajectories]


# -------------------------------------------------------------------------------------------------------------- tokens


def test_only_the_policy_is_told_the_routes_of_the_rollout():
    """The reference says what it would do itself, and the critic has experts of its own."""

    def routed(trajectory: Trajectory) -> Trajectory:
        length = len(trajectory.prompt.tokens) + len(trajectory.turns[0].completion.tokens)
        routes = np.full((length, 2, 3), length, dtype=np.int16)
        (turn,) = trajectory.turns
        return replace(trajectory, turns=(replace(turn, completion=replace(turn.completion, routes=routes)),))

    groups = [replace(group, trajectories=tuple(map(routed, group.trajectories))) for group in make_groups()]
    asked = models()
    samples = with_logprobs(groups, asked, config_of(kl_coef=0.1, kl_in="reward", advantage="gae"))
    assert asked.policy.routed == [True] * len(samples)
    assert asked.reference.routed == asked.critic.routed == [False] * len(samples)
    for sample in samples:
        assert sample.routes is not None and (sample.routes == len(sample)).all()


def test_a_batch_in_waves_is_the_batch():
    """The same samples, with their own groups, whatever part of the batch the models were asked about at a time."""
    groups, config, asked = make_groups(BATCH), config_of(BATCH, minibatches=2, kl_coef=0.1), models(critic=None)
    parts = [*groups[:1]], [*groups[1:3]], [*groups[3:]]
    samples = [sample for part in parts for sample in with_logprobs(part, asked, config)]
    wanted = with_advantages(with_logprobs(groups, asked, config), groups, config)
    for found, sample in zip(with_advantages(samples, groups, config), wanted, strict=True):
        assert found.group == sample.group and found.id == sample.id and torch.equal(found.tokens_T, sample.tokens_T)
        assert found.fields.keys() == sample.fields.keys()
        assert all(torch.equal(found.fields[name], values_T) for name, values_T in sample.fields.items())


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_tokens_masks_and_groups(mask_truncated):
    rollout_batch = prepared(mask_truncated=mask_truncated)
    expected = [(p, n, r, g) for g, (p, completions) in enumerate(BATCH) for n, r in completions]
    assert len(rollout_batch.samples) == len(expected)
    for sample, trajectory, (prompt_length, length, reward, group) in zip(
        rollout_batch.samples, trajectories_of(make_groups()), expected
    ):
        assert sample.tokens_T.tolist() == [*trajectory.prompt.tokens, *trajectory.completion.tokens]
        assert sample.tokens_T.dtype == torch.int64 and sample.group == group
        taught = math.isfinite(reward) and not (mask_truncated and length == LONGEST)
        assert sample.mask_T.tolist() == [False] * prompt_length + [taught] * length


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_fields_are_of_their_own_token(advantage):
    """Up to the packed row: what stands beside a target is that target's."""
    rollout_batch = prepared(advantage=advantage, kl_coef=0.1, minibatches=2)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    mesh: Any = SimpleNamespace(ulysses=one, ring=one, row_multiple=8, document_multiple=1, cp_kernel="isoloss")
    samples, numbers = rollout_batch.samples, range(len(rollout_batch.samples))
    step = StepSamples(samples, {index: s.mask_T.double()[None] for index, s in enumerate(samples)}, 1, numbers)
    tree = PrefixTree.apart([len(sample) for sample in samples])
    row = pack(step, range(len(samples)), tree, mesh, torch.device("cpu"))
    of_target = {
        "rollout_logprobs": lambda tokens: -tokens / 1000,
        "train_logprobs": policy_of,
        "ref_logprobs": reference_of,
    } | ({"old_values": values_of} if advantage == "gae" else {})
    more = {"advantages", "returns"} if advantage == "gae" else {"advantages"}
    assert row.fields.keys() == of_target.keys() | more
    targets_N = row.targets_N.double()
    assert len(targets_N) == sum(int(sample.mask_T.sum()) for sample in samples)
    for name, function in of_target.items():
        assert torch.equal(row.fields[name], function(targets_N)), name


def test_fields_are_0_on_the_prompt_and_where_nothing_is_learned():
    for sample in prepared(advantage="gae", kl_coef=0.1, kl_in="reward", mask_truncated=True).samples:
        for name, values_T in sample.fields.items():
            assert values_T.shape == sample.tokens_T.shape and values_T.dtype == torch.float64
            if name != "rollout_logprobs":  # known of every completion
                assert not values_T[~sample.mask_T].any(), name


@pytest.mark.parametrize(
    ("algorithm", "asked"),
    [
        ({}, (0, 0, 0)),  # the first optimizer step computes the old log-probabilities itself
        ({"minibatches": 2}, (1, 0, 0)),
        ({"epochs": 2}, (1, 0, 0)),
        ({"epochs": 2, "old_logprobs": "rollout"}, (0, 0, 0)),
        ({"kl_coef": 0.1}, (0, 1, 0)),
        ({"kl_coef": 0.1, "kl_in": "reward"}, (1, 1, 0)),
        ({"advantage": "gae", "epochs": 2}, (1, 0, 1)),
    ],
)
def test_models_are_asked_once_and_only_for_what_is_needed(algorithm, asked):
    three = models()
    rollout_batch = prepared(asked=three, **algorithm)
    assert (three.policy.asked, three.reference.asked, three.critic.asked) == asked
    names = {"train_logprobs": asked[0], "ref_logprobs": asked[1], "old_values": asked[2]}
    for sample in rollout_batch.samples:
        assert sample.fields.keys() - {"rollout_logprobs", "advantages", "returns"} == {
            k for k, n in names.items() if n
        }


# ---------------------------------------------------------------------------------------------------------- advantages


def reference_advantages(groups, algorithm):
    """{name: [of each sample's targets]}, completion by completion from the papers' formulas."""
    rewards, kl, values, learned, group_of = [], [], [], [], []
    for group in groups:
        for trajectory in group.trajectories:
            tokens = torch.tensor(trajectory.completion.tokens, dtype=torch.float64)
            cut = algorithm.mask_truncated and trajectory.completion.finish == "length"
            valid = math.isfinite(trajectory.reward) and len(tokens) > 0
            count = len(tokens) if valid and not cut else 0
            learned.append(count)
            values.append(values_of(tokens).numpy()[:count])
            # Of all tokens of what is compared, also where it was cut and teaches nothing.
            estimated = formulas.kl(policy_of(tokens), reference_of(tokens), algorithm.kl_estimator)
            kl.append(estimated * algorithm.kl_coef * (algorithm.kl_in == "reward"))
            punishment = formulas.overlong(len(tokens), LONGEST, BUFFER) if algorithm.overlong_buffer else 0.0
            rewards.append(trajectory.reward + algorithm.overlong_penalty * punishment if valid else None)
            group_of.append(group.draw)

    def of_groups(formula):
        found = np.zeros(len(rewards))
        for group in set(group_of):
            at = [i for i, g in enumerate(group_of) if g == group and rewards[i] is not None]
            if at:
                found[at] = formula([rewards[i] - sum(kl[i]) for i in at])
        return [np.full(count, a) for count, a in zip(learned, found)]

    def reward_at_the_end(index):
        rewards_T = -kl[index][: learned[index]]
        if learned[index]:
            rewards_T[-1] += rewards[index]
        return rewards_T

    if algorithm.advantage == "reinforce++":  # with gamma < 1, every later token's reward is discounted
        found = [
            [sum(algorithm.gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))]
            for r in map(reward_at_the_end, range(len(rewards)))
        ]
        return {"advantages": formulas.whiten(found, 1e-8)}
    if algorithm.advantage == "gae":
        both = [
            formulas.gae(reward_at_the_end(i), values[i], algorithm.gamma, algorithm.gae_lambda)
            for i in range(len(rewards))
        ]
        return {"advantages": formulas.whiten([a for a, _ in both], 1e-8), "returns": [r for _, r in both]}
    formula = {
        "grpo": lambda rewards_k: formulas.grpo(rewards_k, advantages.EPSILON),
        "rloo": formulas.rloo,
    }.get(algorithm.advantage, formulas.dr_grpo)
    found = of_groups(formula)
    return {"advantages": formulas.whiten(found, 1e-8) if algorithm.advantage == "reinforce++-baseline" else found}


ESTIMATORS = ("grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae")
SHAPES = [
    {},
    {"kl_coef": 0.4, "kl_in": "reward", "kl_estimator": "k1"},
    {"kl_coef": 0.4, "kl_in": "reward", "kl_estimator": "k2", "mask_truncated": True},
    {"kl_coef": 0.4, "kl_in": "reward", "kl_estimator": "k3", "overlong_buffer": BUFFER, "overlong_penalty": 0.7},
    {"overlong_buffer": BUFFER, "mask_truncated": True, "gamma": 0.9, "gae_lambda": 0.8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_advantages_and_returns(advantage, shape):
    algorithm = AlgorithmConfig(advantage=advantage, **shape)
    wanted = reference_advantages(make_groups(), algorithm)
    rollout_batch = prepared(advantage=advantage, **shape)
    for index, sample in enumerate(rollout_batch.samples):
        for name, parts in wanted.items():
            got = sample.fields[name][sample.mask_T].tolist()
            assert got == pytest.approx([*parts[index]], rel=1e-9, abs=1e-9), (index, name)
            assert not sample.fields[name][~sample.mask_T].any()
        assert ("returns" in sample.fields) == (advantage == "gae")
    assert any(sample.fields["advantages"].any() for sample in rollout_batch.samples)


def test_kl_in_the_reward_by_hand():
    """REINFORCE++ takes off what is still to come; grouped estimators the sum."""
    groups = make_groups([(1, [(3, 1.0), (2, 0.0)])])
    shape = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    parts = []
    for trajectory in groups[0].trajectories:
        tokens = torch.tensor(trajectory.completion.tokens, dtype=torch.float64)
        parts.append(formulas.reinforce_pp(trajectory.reward, (policy_of(tokens) - reference_of(tokens)).numpy(), 0.5))
    one = [(1, [(3, 1.0), (2, 0.0)])]
    for sample, wanted in zip(prepared(one, advantage="reinforce++", **shape).samples, formulas.whiten(parts, 1e-8)):
        assert sample.fields["advantages"][sample.mask_T].tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    whole = [part[0] for part in parts]
    for sample, wanted in zip(prepared(one, advantage="dr-grpo", **shape).samples, formulas.dr_grpo(whole)):
        assert sample.fields["advantages"][sample.mask_T].tolist() == pytest.approx([wanted] * int(sample.mask_T.sum()))


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_invalid_completions_influence_nothing(advantage):
    """The batch without them gives the others the same fields, to the last bit but for the order of sums."""
    shape = {"advantage": advantage, "kl_coef": 0.2, "kl_in": "reward"}
    groups = make_groups()
    kept = [replace(g, trajectories=tuple(t for t in g.trajectories if t.valid)) for g in groups]
    config = config_of(**shape)
    three = models() if config.algorithm.uses_critic else models(critic=None)
    valid = [trajectory.valid for trajectory in trajectories_of(groups)]
    whole = prepare(groups, three, config, 0, {}).samples
    alone = prepare(kept, three, config, 0, {}).samples
    assert not all(valid) and len(alone) == sum(valid)
    for sample, other in zip([s for s, v in zip(whole, valid) if v], alone):
        assert sample.fields.keys() == other.fields.keys()
        for name, values_T in sample.fields.items():
            assert values_T.tolist() == pytest.approx(other.fields[name].tolist(), rel=1e-12, abs=1e-12)
    for sample in (s for s, v in zip(whole, valid) if not v):
        assert not sample.mask_T.any() and not sample.fields["advantages"].any()


def test_truncated_completions_are_masked_but_compared_with():
    """Overlong filtering leaves them in the mean of their group: their reward is known."""
    batch = [(2, [(3, 1.0), (LONGEST, 0.0)])]
    first, cut = prepared(batch, advantage="dr-grpo", mask_truncated=True).samples
    assert first.fields["advantages"][first.mask_T].tolist() == [0.5] * 3
    assert not cut.mask_T.any() and not cut.fields["advantages"].any()


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo", "rloo"])
def test_truncated_completions_pay_for_their_kl_too(advantage):
    """Equal rewards and an equal divergence, 3 x 0.2 and 6 x 0.1 nats, are equally good: nobody has an advantage."""
    batch = [(2, [(3, 1.0), (LONGEST, 1.0)])]  # tokens 3 to 5, and 6 to 11
    of_reference = lambda tokens: torch.where(tokens < 6, -0.2, -0.1).double()
    shape = {"kl_coef": 1.0, "kl_in": "reward", "kl_estimator": "k1", "mask_truncated": True}
    asked = models(torch.zeros_like, of_reference, None)
    stopped, cut = prepared(batch, asked=asked, advantage=advantage, **shape).samples
    assert stopped.fields["advantages"][stopped.mask_T].tolist() == pytest.approx([0.0] * 3, abs=1e-9)
    assert not cut.mask_T.any() and not any(cut.fields[name].any() for name in ("advantages", "ref_logprobs"))
    assert (asked.policy.asked, asked.reference.asked) == (1, 1)


# --------------------------------------------------------------------------------------------------------------- steps


def completions(count: int) -> list[int]:
    """The prompt of each, four a prompt."""
    return [index // 4 for index in range(count)]


@pytest.mark.parametrize(("count", "parts", "epochs"), [(20, 4, 3), (12, 1, 2), (8, 8, 1)])
def test_minibatches_are_a_partition_every_epoch(count, parts, epochs):
    config = config_of([(1, [(1, 1.0)] * 4)] * (count // 4), minibatches=parts, epochs=epochs)
    steps = minibatches(completions(count), 7, config)
    assert len(steps) == parts * epochs == config.steps_per_batch
    for epoch in range(epochs):
        of_epoch = steps[epoch * parts : (epoch + 1) * parts]
        assert {len(step) for step in of_epoch} == {count // parts}
        assert sorted(itertools.chain(*of_epoch)) == [*range(count)]
    assert len(set(steps)) == len(steps)  # no epoch repeats another's order


def test_the_order_depends_on_seed_step_and_epoch_alone():
    config = config_of(minibatches=4, epochs=3)
    steps = minibatches(completions(20), 7, config)
    np.random.seed(1)
    torch.manual_seed(1)
    assert minibatches(completions(20), 7, config) == steps
    assert minibatches(completions(20), 7, config_of(minibatches=4, epochs=1)) == steps[:4]
    halves = minibatches(completions(20), 7, config_of(minibatches=2, epochs=3))
    assert [sorted(half) for half in halves[:2]] == [sorted(steps[0] + steps[1]), sorted(steps[2] + steps[3])]
    assert minibatches(completions(20), 8, config) != steps
    assert minibatches(completions(20), 7, config_of(minibatches=4, epochs=3, seed=1)) != steps


def test_minibatches_of_whole_prompts():
    """Three prompts of four completions and, as dynamic sampling may leave it, two prompts for three parts."""
    config = config_of([(1, [(1, 1.0)] * 4)] * 3, minibatches=3, epochs=2, minibatch_by="prompt")
    steps = minibatches(completions(12), 7, config)
    assert len(steps) == 6 and all(steps[0:3]) and sorted(itertools.chain(*steps[:3])) == [*range(12)]
    for step in steps:
        assert step == tuple(range(step[0], step[0] + 4)) and step[0] % 4 == 0
    assert {len(step) for step in minibatches(completions(8), 7, config)} == {4}


def test_samples_of_a_trajectory_stay_in_one_minibatch():
    """Four trajectories of three, one, two and two samples, in four parts."""
    sequences = [0, 1, 0, 2, 3, 0, 2, 3]
    steps = minibatches([0] * 8, 7, config_of(minibatches=4, epochs=2), sequences)
    assert len(steps) == 8
    assert sorted(steps[:4]) == sorted(steps[4:]) == [(0, 2, 5), (1,), (3, 6), (4, 7)]


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(9, 5, [3, 3, 3]), (10, 4, [5, 5]), (11, 4, [11]), (12, 5, [3, 3, 3, 3]), (4, 4, [1] * 4), (3, 4, [1] * 3)],
)
def test_a_smaller_batch_is_cut_into_equal_parts_and_none_is_empty(count, parts, sizes):
    steps = minibatches(completions(count), 0, config_of(minibatches=parts))
    assert [len(step) for step in steps] == sizes
    assert sorted(itertools.chain(*steps)) == [*range(count)]


def test_next_gives_the_steps_in_turn():
    rollout_batch = prepared(minibatches=5, epochs=2)
    taken = []
    for steps in range(10):
        assert rollout_batch.done == steps and not rollout_batch.exhausted
        samples, rollout_batch = rollout_batch.next()
        taken.append([sample.tokens_T.tolist() for sample in samples])
    assert rollout_batch.exhausted
    wanted = [[rollout_batch.samples[i].tokens_T.tolist() for i in step] for step in rollout_batch.steps]
    assert taken == wanted and rollout_batch.steps == minibatches(
        completions(20), 0, config_of(minibatches=5, epochs=2)
    )


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_state_goes_through_a_file(advantage, tmp_path):
    rollout_batch = prepared(minibatches=2, epochs=2, advantage=advantage)
    _, left = rollout_batch.next()
    torch.save(left.state(), tmp_path / "state.pt")
    again = RolloutBatch.from_state(torch.load(tmp_path / "state.pt", weights_only=True), OneRank())
    assert (again.steps, again.done, again.stats) == (left.steps, 1, left.stats)
    while not left.exhausted:
        samples, left = left.next()
        others, again = again.next()
        for sample, other in zip(samples, others, strict=True):
            assert torch.equal(sample.tokens_T, other.tokens_T) and torch.equal(sample.mask_T, other.mask_T)
            assert sample.group == other.group and sample.fields.keys() == other.fields.keys()
            assert all(torch.equal(values_T, other.fields[name]) for name, values_T in sample.fields.items())
    assert again.exhausted and RolloutBatch.from_state(again.state(), OneRank()) == RolloutBatch()


def test_numbers_of_a_completion_are_compact_and_equal_their_tuples():
    tokens, logprobs = tuple(range(1000, 1300)), tuple(-math.pi / each for each in range(1, 301))
    made = Completion("a", tokens, logprobs, (3,) * 300, "stop")
    assert (made.tokens, made.logprobs, made.versions) == (tokens, logprobs, (3,) * 300)
    assert made == Completion("a", list(tokens), list(logprobs), [3] * 300, "stop")
    assert made != replace(made, tokens=tokens[::-1])
    assert len(pickle.dumps(made)) < 16 * 300 + 500 and pickle.loads(pickle.dumps(made)) == made
    assert np.asarray(made.logprobs).tolist() == list(logprobs) and np.asarray(made.tokens).dtype == np.int32
    assert made.tokens[2:4] == (1002, 1003) and made.tokens[-1] == 1299 and hash(made) == hash(replace(made))
    assert repr(Completion("a", (1,), (0.5,), (2,), "stop")) == (
        "Completion(id='a', tokens=(1,), logprobs=(0.5,), versions=(2,), finish='stop')"
    )
    empty = Completion("a", (), (), (), "abort")
    assert empty.tokens == () and np.asarray(empty.logprobs).shape == (0,)


def test_values_of_all_samples_come_from_a_device_in_one_copy():
    """A meta tensor has no values, so this counts copies; on a CPU nothing is copied."""
    here = [torch.arange(3.0), torch.arange(2.0)]
    assert on_the_host(here) is here and on_the_host([]) == []
    copies = []
    there = [torch.empty(3, device="meta"), torch.empty(2, device="meta")]
    with mock.patch.object(torch.Tensor, "cpu", lambda self: copies.append(len(self)) or torch.arange(5.0)):
        assert [each.tolist() for each in on_the_host(there)] == [[0, 1, 2], [3, 4]]
    assert copies == [5]
