"""Rewards are given to whole groups while others are generated."""

import threading

import pytest
from support.runs.waiting import until
from support.servers.fake_servers import Rewards

from isoloss.engine.rl.reward.scoring import Scoring
from isoloss.engine.rl.trajectory import Completion, Prompt
from isoloss.parallel import UserError

PROMPT = Prompt("train.jsonl:0", (1, 2), "?")


def completion(id: str, tokens: int) -> Completion:
    return Completion(id, range(tokens), [-1.0] * tokens, [0] * tokens, "stop")


@pytest.fixture
def scoring():
    made = []

    def make(rewards) -> Scoring:
        made.append(Scoring(rewards))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert each._thread is None or not each._thread.is_alive()


def test_a_group_is_scored_as_soon_as_its_last_completion_is_there(scoring):
    rewards = Rewards()
    asked = scoring(rewards)
    first, second = asked.expect(PROMPT, ["a", "b"]), asked.expect(PROMPT, ["c", "d"])
    asked.add(completion("c", 3))
    asked.add(completion("b", 2))
    asked.add(completion("d", 4))
    until(lambda: second.scored is not None, "the second group had its rewards")
    assert first.scored is None and not first.whole and rewards.calls == [2]
    asked.add(completion("d", 4))  # told of twice
    asked.add(completion("a", 1))
    found = asked.take([first, second])
    assert [[t.reward for t in group] for group in found] == [[1, 2], [3, 4]]
    assert [[t.completion.id for t in group] for group in found] == [["a", "b"], ["c", "d"]]
    assert rewards.calls == [2, 2] and (second.place, first.place) == (0, 1)


def test_a_function_of_the_whole_batch_waits_for_all_of_it(scoring):
    rewards = Rewards(whole_batch=True)
    asked = scoring(rewards)
    groups = [asked.expect(PROMPT, [name]) for name in "abc"]
    for name, tokens in zip("cab", (3, 1, 2)):
        asked.add(completion(name, tokens))
    assert all(group.whole for group in groups) and rewards.calls == []
    assert [t.reward for (t,) in asked.take(groups)] == [1, 2, 3] and rewards.calls == [3]


def test_a_failure_reaches_who_waits(scoring):
    class Failing(Rewards):
        def score(self, prompts, completions):
            raise UserError("reward.function=[x]: no")

    asked = scoring(Failing())
    group = asked.expect(PROMPT, ["a"])
    asked.add(completion("a", 1))
    with pytest.raises(UserError, match=r"reward\.function"):
        asked.take([group])


def test_rewards_run_while_others_are_generated(scoring):
    """A completion that is late does not keep the rewards of another group waiting, nor the other way round."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Rewards):
        def score(self, prompts, completions):
            begun.set()
            assert go_on.wait(20)
            return super().score(prompts, completions)

    asked = scoring(Slow())
    groups = [asked.expect(PROMPT, [name]) for name in "ab"]
    asked.add(completion("a", 1))
    assert begun.wait(20)
    asked.add(completion("b", 2))  # while the first is being scored
    go_on.set()
    assert [t.reward for (t,) in asked.take(groups)] == [1, 2]
