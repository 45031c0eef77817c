"""Turns -> samples: every token that was made is a target once, behind the tokens that the model had read."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.rl.experience import samples_of, with_advantages
from isoloss.engine.rl.paths import parents, paths_of
from isoloss.engine.rl.trajectory import Completion, Finish, Group, Prompt, Trajectory, Turn

PROMPT = Prompt("train.jsonl:1", (1, 2), "?")


def turn(prompt, output, reward=0.0, excluded=None, finish: Finish = "stop", logprob=None):
    logprobs = [logprob(prompt, output[:k], output[k]) if logprob else -output[k] / 10 for k in range(len(output))]
    completion = Completion("p/0/0/x", output, logprobs, [0] * len(output), finish)
    return Turn(tuple(prompt), completion, reward, excluded)


def trajectory(turns, reward=1.0, id="p/0/0"):
    return Trajectory(id, PROMPT, tuple(turns), "", reward)


def of_context(prompt, before, token):
    """A log-probability that no other context has."""
    return hash((tuple(prompt) + tuple(before), token)) % 1000 / 1000 - 1


def made_up(rng):
    """Turns of a program that forks, compacts its history, has sub-agents, re-renders replies and asks again."""
    turns, histories = [], [[rng.randrange(9) for _ in range(5)]]
    for _ in range(rng.randrange(1, 10)):
        history, kind = list(rng.choice(histories)), rng.random()
        if kind < 0.15:
            history = history[:3] + [rng.randrange(9) for _ in range(2)]
        elif kind < 0.3:
            history = [rng.randrange(9) for _ in range(4)]
        elif kind < 0.4 and turns:
            history[-1] = (history[-1] + 1) % 9
        tries = 1 + (rng.random() < 0.15)
        for attempt in range(tries):
            output = [rng.randrange(9) for _ in range(rng.randrange(1, 5))]
            excluded = "unread" if attempt < tries - 1 else None
            turns.append(turn(history, output, excluded=excluded, logprob=of_context))
        histories.append(history + output + [rng.randrange(9) for _ in range(rng.randrange(3))])
        if rng.random() < 0.7:
            histories = histories[-1:]
    return turns


def test_every_token_is_a_target_once_behind_its_context():
    cut = 0
    for seed in range(1000):
        turns = made_up(random.Random(seed))
        paths = paths_of(trajectory(turns))
        found = []
        for path in paths:
            tokens = path.tokens_T.tolist()
            for t in np.flatnonzero(path.turn_T >= 0):
                number, start = path.turn_T[t], len(turns[path.turn_T[t]].prompt_tokens)
                assert tokens[:t] == [*turns[number].prompt_tokens, *turns[number].completion.tokens[: t - start]], seed
                assert path.logprobs_T[t] == of_context(tokens[:t], [], tokens[t]), seed
                found.append((number, t - start))
        wanted = [
            (n, k) for n, each in enumerate(turns) if not each.excluded for k in range(len(each.completion.tokens))
        ]
        assert sorted(found) == wanted, seed
        cut += len(paths) > 1
    assert cut > 300


def test_parents():
    first, again = turn([1, 2], [3]), turn([1, 2], [3])
    assert parents([first, turn([1, 2, 3, 4], [5]), turn([1, 2, 4], [5]), turn([1, 2, 3, 4, 5], [6])]) == [-1, 0, -1, 1]
    assert parents([first, again, turn([1, 2, 3], [4])]) == [-1, -1, 1]  # of two alike the newest
    assert parents([first]) == [-1]


def test_one_turn_after_another_is_one_sample():
    found = samples_of(trajectory([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 7, 8], [5])]), 3, AlgorithmConfig(), 9)
    (sample,) = found
    assert sample.tokens_T.tolist() == [1, 2, 3, 4, 7, 8, 5]
    assert sample.mask_T.tolist() == [False, False, True, True, False, False, True]
    assert sample.fields["rollout_logprobs"].tolist() == [0, 0, -0.3, -0.4, 0, 0, -0.5]
    assert (sample.group, sample.sequence, sample.id) == (3, None, "p/0/0")


def test_branches_are_samples_of_one_sequence():
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 7], [5]), turn([1, 2, 3, 8], [6])]
    first, second = samples_of(trajectory(turns), 0, AlgorithmConfig(), 9)
    assert first.mask_T.tolist() == [False, False, True, False, True]
    assert second.mask_T.tolist() == [False] * 4 + [True]
    assert first.sequence == second.sequence == 9


def test_masked_replies():
    turns = [turn([1, 2], [3], finish="length"), turn([1, 2, 3, 7], [5])]
    (sample,) = samples_of(trajectory(turns), 0, AlgorithmConfig(mask_truncated=True), 0)
    assert sample.mask_T.tolist() == [False] * 4 + [True]
    (sample,) = samples_of(trajectory(turns, float("nan")), 0, AlgorithmConfig(), 0)
    assert not sample.mask_T.any()
    (sample,) = samples_of(trajectory([], float("nan")), 0, AlgorithmConfig(), 0)  # lost before its first turn
    assert sample.tokens_T.tolist() == [1, 2] and not sample.mask_T.any()


# A trajectory of three turns, whole (each prompt begins with the turn before), or in two or three samples: where its
# history is rewritten. Values are functions of the token, so what a target gets must be the same.
def three_turns(kind, rewards):
    one, two, three = [11, 12], [13], [14, 15]
    second = [1, 2, *one, 7] if kind != "turns" else [1, 2, 7]
    third = [*second, *two, 8] if kind == "whole" else [1, 2, 8]
    prompts = ([1, 2], second, third)
    return [turn(p, o, r) for p, o, r in zip(prompts, (one, two, three), rewards)]


def with_numbers(sample, scales):
    """Return the sample with fields that are functions of the token."""
    added = {name: sample.tokens_T.double() * scale * sample.mask_T for name, scale in scales.items()}
    return replace(sample, fields={**sample.fields, **added})


def prepared(kind, algorithm, rewards=(0.0, 0.0, 0.0)):
    """Return fields by token of the trajectory of three turns, whose group has two others."""
    config = RLConfig(ModelConfig("x"), algorithm=algorithm)
    others = [trajectory([turn([1, 2], [21, 22])], 0.5, "p/0/1"), trajectory([turn([1, 2], [23])], 0.0, "p/0/2")]
    group = Group(0, PROMPT, (trajectory(three_turns(kind, rewards), 2.0), *others))
    samples = [s for k, t in enumerate(group.trajectories) for s in samples_of(t, 0, algorithm, k)]
    more = {"ref_logprobs": 0.01, "train_logprobs": 0.03, "old_values": 0.1}
    samples = [with_numbers(sample, more) for sample in samples]
    found = {}
    for sample in with_advantages(samples, [group], config):
        for t in sample.mask_T.nonzero().flatten().tolist():
            assert int(sample.tokens_T[t]) not in found
            found[int(sample.tokens_T[t])] = {name: float(values[t]) for name, values in sample.fields.items()}
    return found


ALGORITHMS = [
    *({"advantage": name} for name in ("grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae")),
    {"advantage": "rloo", "credit": "turn"},
    {"advantage": "grpo", "kl_coef": 0.1, "kl_in": "reward"},
    {"advantage": "gae", "kl_coef": 0.1, "kl_in": "reward", "gamma": 0.9, "gae_lambda": 0.8},
    {"advantage": "reinforce++", "gamma": 0.9, "overlong_buffer": 1022},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: "-".join(map(str, each.values())))
def test_fields_do_not_depend_on_the_cut(algorithm):
    rewards = (0.5, 0.25, 0.0)
    whole = prepared("whole", AlgorithmConfig(**algorithm), rewards)
    assert len(whole) == 8
    for kind in ("branches", "turns"):
        cut = prepared(kind, AlgorithmConfig(**algorithm), rewards)
        assert cut.keys() == whole.keys()
        for token, fields in whole.items():
            assert cut[token] == pytest.approx(fields, abs=1e-12), (kind, token)


@pytest.mark.parametrize("kind", ["whole", "branches", "turns"])
def test_credit_by_turn_by_hand(kind):
    """R = 2.0 with 0.5 at the first and 0.25 at the second turn; the others of the group have 0.5 and 0: mean 0.25."""
    found = prepared(kind, AlgorithmConfig(advantage="rloo", credit="turn"), (0.5, 0.25, 0.0))
    by_token = {token: round(fields["advantages"], 12) for token, fields in found.items()}
    assert by_token == {11: 1.75, 12: 1.75, 13: 1.25, 14: 1.0, 15: 1.0, 21: -0.5, 22: -0.5, 23: -1.25}


@pytest.mark.parametrize("kind", ["whole", "branches", "turns"])
def test_returns_stand_at_the_last_target_of_their_turn(kind):
    algorithm = AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=1.0)
    found = prepared(kind, algorithm, (0.5, 0.25, 0.0))
    # With lambda 1 a return is the discounted sum of the rewards from the token on, by hand.
    wanted = {15: 1.25, 14: 0.625, 13: 0.25 + 0.3125, 12: 0.5 + 0.28125, 11: 0.390625}
    assert {token: found[token]["returns"] for token in wanted} == pytest.approx(wanted, abs=1e-12)


def test_returns_follow_the_order_of_the_turns():
    """The second turn is a branch that ends; the third goes on from the first, so its sample, made later, holds a
    target of turn 2 and the first one targets of turns 0 and 1; a fourth turn goes on in the first sample."""
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 7], [5]), turn([1, 2, 3, 8], [6]), turn([1, 2, 3, 7, 5, 9], [4])]
    group = Group(0, PROMPT, (trajectory(turns),))
    algorithm = AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=1.0)
    samples = samples_of(group.trajectories[0], 0, algorithm, 0)
    samples = [with_numbers(sample, {"old_values": 0.0}) for sample in samples]
    found = with_advantages(samples, [group], RLConfig(ModelConfig("x"), algorithm=algorithm))
    returns = {int(s.tokens_T[t]): float(s.fields["returns"][t]) for s in found for t in s.mask_T.nonzero().flatten()}
    assert returns == {3: 0.125, 5: 0.25, 6: 0.5, 4: 1.0}


def test_group_statistics_go_by_trajectory():
    """Three samples of one trajectory weigh as one in the group's mean."""
    found = prepared("turns", AlgorithmConfig(advantage="dr-grpo"))
    assert found[11]["advantages"] == pytest.approx(2.0 - 2.5 / 3) and found[23]["advantages"] == pytest.approx(
        -2.5 / 3
    )


def test_groups_with_fewer_than_two_rewards_have_faulted():
    good, lost = trajectory([turn([1, 2], [3])]), Trajectory("p/0/1", PROMPT, (), "", float("nan"), error="lost")
    faulted = [
        Group(0, PROMPT, each).faulted for each in ((good, good, lost), (good, lost, lost), (lost, lost), (good,))
    ]
    assert faulted == [False, True, True, False]


def test_credit_needs_the_baseline_of_the_others():
    with pytest.raises(ValueError, match=r"algorithm\.credit='turn' needs the baseline of algorithm\.advantage=rloo"):
        AlgorithmConfig(credit="turn")


def test_torch_and_lengths():
    whole = trajectory(
        [turn([1, 2], [3, 4]), turn([1, 2], [5], excluded="unread"), turn([1, 2, 3, 4], [6], finish="length")]
    )
    assert whole.length == 3 and whole.truncated and whole.valid
    shown = whole.outline()
    assert shown.length == 3 and shown.text == "" and torch.tensor(whole.length) == 3
    with pytest.raises(RuntimeError, match="on rank 0"):
        shown.turns[0].prompt_tokens[0]
