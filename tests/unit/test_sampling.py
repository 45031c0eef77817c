"""Drawing groups: exactly what is missing, and every group that was drawn is told of."""

import itertools
import math
from dataclasses import replace

import pytest

from isoloss.engine.config.schema import BatchConfig, ModelConfig
from isoloss.engine.rl import group_sampling
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.rl.prompt_ledger import Ledger
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Trajectory
from isoloss.parallel import UserError

VARIED, SOLVED, FAILED, BROKEN = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (math.nan, math.nan)


def config(wanted, waves=1, **algorithm):
    servers = {"backend": "sglang", "servers": ("http://a:1",), "waves": waves} if waves > 1 else {}
    return RLConfig(
        ModelConfig("somewhere"),
        batch=BatchConfig(global_size=wanted),
        algorithm=AlgorithmConfig(**algorithm),
        rollout=RolloutConfig(**servers),
    )


def group(number, rewards):
    prompt = Prompt(f"train.jsonl:{number}", (1, 2), "?")
    completion = Completion("x", (3,), (-0.5,), (0,), "stop")
    return Group(number, prompt, tuple(Trajectory.of_one_turn(prompt, completion, "", reward) for reward in rewards))


class Stream:
    """Groups with these rewards, over and over. asked: (first draw, count) of every call. drawn: before the first."""

    version = 0

    def __init__(self, *rewards, drawn=0):
        self.rewards, self.asked, self.prefetched, self.ledger = rewards, [], [], Ledger(drawn=drawn, trained=drawn)

    def collect(self, count, prefetch=0):
        self.asked.append((self.ledger.drawn, count))
        self.prefetched.append(prefetch)
        self.ledger.draw(count)
        return [group(number, self.rewards[number % len(self.rewards)]) for number in self.ledger.in_flight]

    def token_ages(self, groups):
        return {"staleness_max": 0}


def sample_groups(stream, config):
    """All of them, of which `waves` has been told."""
    sampled = group_sampling.sample_groups(stream, config)
    stream.waves = [numbers(wave) for wave in sampled.waves]
    assert [*itertools.chain(*stream.waves)] == numbers(sampled.kept) and all(stream.waves)
    return sampled


def numbers(groups):
    return [one.draw for one in groups]


def test_without_dynamic_sampling_one_round_and_all_is_kept():
    stream = Stream(VARIED, SOLVED, FAILED, BROKEN, drawn=40)
    draws = sample_groups(stream, config(6))
    assert stream.asked == [(40, 6)]
    assert numbers(draws.kept) == [40, 41, 42, 43, 44, 45]
    assert (draws.dropped, draws.rounds, stream.ledger.drawn) == ([], 1, 46)


def test_a_round_draws_what_is_missing():
    stream = Stream(VARIED, SOLVED, VARIED, FAILED, BROKEN, drawn=5)
    draws = sample_groups(stream, config(7, dynamic_sampling=True))
    # Kept: 5 7 10 | 12 15 | 17 | - | - | 20.
    assert stream.asked == [(5, 7), (12, 4), (16, 2), (18, 1), (19, 1), (20, 1)]
    assert numbers(draws.kept) == [5, 7, 10, 12, 15, 17, 20]
    assert numbers(draws.dropped) == [6, 8, 9, 11, 13, 14, 16, 18, 19]
    assert (draws.rounds, stream.ledger.drawn) == (6, 21)
    assert sorted(numbers(draws.kept) + numbers(draws.dropped)) == [*range(5, 21)]
    assert sum(count for _, count in stream.asked) == stream.ledger.drawn - 5


def test_waves_follow_the_order_of_the_prompts():
    """Those of the first round; each call says how many come after it, so that they can be begun."""
    stream = Stream(VARIED)
    sample_groups(stream, config(7, waves=3))
    assert stream.waves == [[0, 1], [2, 3], [4, 5, 6]] and stream.prefetched == [5, 3, 0]
    stream = Stream(VARIED)
    sample_groups(stream, config(2, waves=3))
    assert stream.waves == [[0], [1]]
    stream = Stream(SOLVED, SOLVED, VARIED, SOLVED, VARIED)
    sample_groups(stream, config(4, waves=2, dynamic_sampling=True))
    assert stream.asked == [(0, 2), (2, 2), (4, 3), (7, 2), (9, 1)] and stream.waves == [[2], [4], [7], [9]]


def test_the_ledger_knows_why_a_group_was_dropped():
    stream = Stream(VARIED, SOLVED, BROKEN, FAILED, FAILED)
    groups = stream.collect
    broken = lambda group: replace(group, trajectories=tuple(replace(t, error="no") for t in group.trajectories))
    stream.collect = lambda count, prefetch=0: [broken(g) if g.draw % 5 == 2 else g for g in groups(count)]
    draws = sample_groups(stream, config(2, dynamic_sampling=True))
    assert numbers(draws.kept) == [0, 5]
    names = ("prompts_drawn", "prompts_trained", "prompts_in_flight", "prompts_dropped_no_variance")
    assert [draws.counts[name] for name in names] == [6, 2, 0, 3]
    assert draws.counts["prompts_dropped_reward_failed"] == 1


def test_enough_at_once_and_in_the_last_round():
    stream = Stream(VARIED)
    draws = sample_groups(stream, config(3, dynamic_sampling=True, max_draws=1))
    assert (stream.asked, draws.rounds, len(draws.kept)) == ([(0, 3)], 1, 3)
    stream = Stream(SOLVED, VARIED)
    draws = sample_groups(stream, config(2, dynamic_sampling=True, max_draws=3))  # 0 1 | 2 | 3
    assert (stream.asked, draws.rounds, numbers(draws.kept)) == ([(0, 2), (2, 1), (3, 1)], 3, [1, 3])


def test_one_valid_completion_has_no_variance():
    draws = sample_groups(Stream((1.0, math.nan), VARIED), config(1, dynamic_sampling=True))
    assert numbers(draws.kept) == [1] and numbers(draws.dropped) == [0]
    draws = sample_groups(Stream((1.0, math.nan, 0.0)), config(1, dynamic_sampling=True))
    assert numbers(draws.kept) == [0]


def test_shortage_is_an_error_that_tells_what_was_found():
    stream = Stream(SOLVED, FAILED, VARIED, SOLVED)
    with pytest.raises(UserError) as error:
        sample_groups(stream, config(8, dynamic_sampling=True, max_draws=2))
    assert stream.asked == [(0, 8), (8, 6)]  # kept 2, 6 and 10
    assert str(error.value) == (
        "dynamic sampling: after algorithm.max_draws=2 rounds only 3 of batch.global_size=8 groups have rewards that "
        "differ (11 dropped, 7 of them all right); raise max_draws or rollout.num_generations, choose prompts of "
        "medium difficulty, or set algorithm.on_shortage=smaller"
    )


def test_shortage_as_a_smaller_batch():
    stream = Stream(SOLVED, FAILED, VARIED, SOLVED)
    draws = sample_groups(stream, config(8, dynamic_sampling=True, max_draws=2, on_shortage="smaller"))
    assert numbers(draws.kept) == [2, 6, 10] and len(draws.dropped) == 11
    assert (draws.rounds, stream.ledger.drawn) == (2, 14)


@pytest.mark.parametrize("on_shortage", ["error", "smaller"])
def test_no_group_at_all_is_an_error_either_way(on_shortage):
    options = config(2, dynamic_sampling=True, max_draws=3, on_shortage=on_shortage)
    with pytest.raises(UserError, match=r"only 0 of batch.global_size=2 .*\(6 dropped, 0 of them all right\)") as error:
        sample_groups(Stream(FAILED), options)
    assert "smaller" not in str(error.value)  # would not help


def test_the_cursor_goes_on():
    options = config(3, dynamic_sampling=True)
    stream = Stream(VARIED, SOLVED)
    first = sample_groups(stream, options)
    second = sample_groups(stream, options)
    drawn = [*first.kept, *first.dropped, *second.kept, *second.dropped]
    assert sorted(numbers(drawn)) == [*range(stream.ledger.drawn)]
