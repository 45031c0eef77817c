"""Rollouts ahead of the trainer: how old their tokens are, and that no prompt is lost or taken twice."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.servers.fake_servers import ENGINE, FakeServers, Rewards, length

from isoloss.engine.config.schema import BatchConfig, ModelConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.rl.group_sampling import sample_groups
from isoloss.engine.rl.prompts import PromptSet
from isoloss.engine.rl.rollout import MAX_ATTEMPTS, Rollout
from isoloss.engine.rl.trajectory import Group, Prompt
from isoloss.parallel import UserError

PROMPTS = [Prompt(f"train.jsonl:{n}", (1, 2, n), "?") for n in range(7)]
BATCH, GENERATIONS, LONGEST = 3, 2, 24


def config(staleness: int, over_sample: float = 1.0, waves: int = 1, **algorithm) -> RLConfig:
    rollout = RolloutConfig(
        backend="sglang", servers=("http://a:1",), num_generations=GENERATIONS, max_new_tokens=LONGEST,
        max_staleness=staleness, over_sample=over_sample, waves=waves,
    )  # fmt: skip
    return RLConfig(
        ModelConfig("somewhere"),
        batch=BatchConfig(global_size=BATCH),
        rollout=rollout,
        algorithm=AlgorithmConfig(importance="token", **algorithm),
    )


class Trainer:
    """Takes batch after batch, and can be killed and started again with what it saved last."""

    def __init__(self, config: RLConfig, folder: Path, rewards: Rewards | None = None):
        self.config, self.folder, self.rewards = config, folder, rewards or Rewards()
        self.batches: list[list[Group]] = []
        self.counts: list[dict] = []
        self.rollout: Rollout | None = None
        self.start()

    def start(self) -> None:
        self.backend = FakeServers(BATCH * GENERATIONS)
        self.rollout = Rollout(ENGINE, self.backend, self.rewards, self.config, PromptSet(tuple(PROMPTS)), ())
        if (self.folder / "state").exists():
            done, state = torch.load(self.folder / "state", weights_only=True)
            self.rollout.restore(state)
            del self.batches[done:], self.counts[done:]

    def step(self) -> None:
        self.rollout.sync_weights(len(self.batches))
        groups = sample_groups(self.rollout, self.config)
        self.waves = [len(wave) for wave in groups.waves]
        self.batches.append([*groups.kept, *groups.dropped])
        self.counts.append(dict(groups.counts))

    def save(self) -> None:
        torch.save((len(self.batches), self.rollout.state()), self.folder / "state")

    def kill(self) -> None:
        self.backend.abort()
        self.rollout.close()
        self.backend.close()


@pytest.fixture
def trainer(one_rank, tmp_path) -> Iterator:
    made: list[Trainer] = []

    def make(*args, **options) -> Trainer:
        made.append(Trainer(*args, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def check(trainer: Trainer) -> None:
    """Every draw was taken once, in order but for over-sampling, or is in flight; its completions are whole and of its
    own prompt; no token is too old."""
    draws = [group.draw for batch in trainer.batches for group in sorted(batch, key=lambda group: group.draw)]
    if trainer.config.rollout.over_sample == 1:
        assert draws == list(range(len(draws)))
    ledger = trainer.rollout.ledger
    assert sorted([*draws, *ledger.in_flight]) == list(range(ledger.drawn))
    for number, batch in enumerate(trainer.batches):
        if not trainer.config.algorithm.dynamic_sampling:  # whose rounds come one after the other
            assert [group.draw for group in batch] == sorted(group.draw for group in batch)
        for group in batch:
            assert group.prompt in PROMPTS
            for k, trajectory in enumerate(group.trajectories):
                completion = trajectory.completion
                assert completion.id == f"{group.prompt.id}/{group.draw}/{k}"
                tokens = length(completion.id, LONGEST)
                assert list(completion.tokens) == list(range(tokens)) and trajectory.reward == tokens
                versions = list(completion.versions)
                assert versions == sorted(versions) and versions[-1] <= number
                assert versions[0] >= number - trainer.config.rollout.max_staleness
    for number, counts in enumerate(trainer.counts):
        ages = [number - v for g in kept(trainer, number) for t in g.trajectories for v in t.completion.versions]
        assert counts["staleness_max"] == max(ages) and counts["staleness_mean"] == pytest.approx(sum(ages) / len(ages))


def kept(trainer: Trainer, number: int) -> list[Group]:
    batch = trainer.batches[number]
    return [group for group in batch if group.varied] if trainer.config.algorithm.dynamic_sampling else batch


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batches_are_taken_in_order_and_tokens_are_young_enough(trainer, staleness):
    run = trainer(config(staleness))
    for _ in range(12):
        run.step()
        assert run.counts[-1]["prompts_in_flight"] == staleness * BATCH
        assert run.counts[-1]["prompts_drawn"] == (len(run.batches) + staleness) * BATCH
        assert run.counts[-1]["prompts_trained"] == len(run.batches) * BATCH
    check(run)
    oldest = max(counts["staleness_max"] for counts in run.counts)
    assert oldest == staleness
    mixed = [t for batch in run.batches for g in batch for t in g.trajectories if len(set(t.completion.versions)) > 1]
    assert bool(mixed) == (staleness > 0)  # partial completions that went on with other weights


@pytest.mark.parametrize(("staleness", "over_sample"), [(1, 1.2), (1, 1.5), (2, 1.34), (3, 1.5)])
def test_those_that_finish_first_are_taken_and_the_others_next_time(trainer, staleness, over_sample):
    """A group that was left over is in the next batch, and its tokens are no older than allowed."""
    run = trainer(config(staleness, over_sample))
    more = math.ceil(over_sample * BATCH) - BATCH
    for _ in range(25):
        left = list(run.rollout.ledger.left_over)
        run.step()
        taken = {group.draw for group in run.batches[-1]}
        assert len(taken) == BATCH and taken >= {*left}
        assert run.counts[-1]["prompts_in_flight"] == (staleness - 1) * BATCH + more
        assert run.counts[-1]["prompts_left_over"] == more * len(run.batches)
    check(run)
    draws = [group.draw for batch in run.batches for group in batch]
    assert draws != sorted(draws)  # somebody was overtaken


def test_the_length_bias_of_the_first(trainer):
    """By hand: of every batch those that were left over, and those that were not, as they are when they finish."""
    run = trainer(config(1, 1.34))
    first, competing = [], []
    for _ in range(15):
        left = list(run.rollout.ledger.left_over)
        run.step()
        for group in run.batches[-1]:
            lengths = [len(t.completion.tokens) for t in group.trajectories]
            competing += lengths
            first += [] if group.draw in left else lengths
    counts = run.counts[-1]
    assert counts["response_length_first"] == pytest.approx(sum(first) / len(first))
    assert counts["response_length_competing"] == pytest.approx(sum(competing) / len(competing))
    assert counts["response_length_first"] < counts["response_length_competing"]  # the long ones are left over


@pytest.mark.parametrize("staleness", [0, 1])
def test_waves(trainer, staleness):
    run = trainer(config(staleness, waves=2))
    for _ in range(6):
        begun = len(run.backend.begun)
        run.step()
        assert run.waves == [1, 2]
        assert len(run.backend.begun) == begun + 1  # the second wave was under way while the first was looked at
    check(run)


@pytest.mark.parametrize(
    ("dynamic", "over_sample", "waves"), [(False, 1.0, 1), (True, 1.0, 2), (False, 1.5, 1), (True, 1.34, 1)]
)
def test_killed_and_resumed_again_and_again(trainer, dynamic, over_sample, waves):
    """Twenty-five times, at any time after a save or long after: no prompt is lost, none is taken twice."""
    chance = random.Random(3)
    run = trainer(config(2, over_sample, waves, dynamic_sampling=dynamic))
    kills = 0
    while kills < 25 or len(run.batches) < 20:
        for _ in range(chance.randint(0, 3)):
            run.step()
            if chance.random() < 0.6:
                run.save()
        if kills < 25:
            run.kill()
            run.start()
            kills += 1
    check(run)
    assert bool(run.counts[-1]["prompts_dropped_no_variance"]) == dynamic


def test_partial_completions_are_part_of_the_checkpoint(trainer):
    run = trainer(config(1))
    run.step()
    run.save()
    _, state = torch.load(run.folder / "state", weights_only=True)
    assert state["ledger"]["in_flight"] == [3, 4, 5]
    ids = {each[0] for each in state["completions"]}
    complete = {id for id, *_, finish, _ in state["completions"] if finish == "stop"}
    assert all(int(id.split("/")[1]) in (3, 4, 5) for id in ids) and complete and ids - complete
    run.kill()
    run.start()
    run.step()
    assert not complete & {id for ids in run.backend.begun for id in ids}
    of_before = [0 in t.completion.versions for group in run.batches[1] for t in group.trajectories]
    assert sum(of_before) == len(ids)
    check(run)


def test_lost_servers_cost_no_completion(trainer):
    run = trainer(config(1))
    for _ in range(3):
        run.step()
        run.backend.fails = 2
    run.step()
    check(run)
    assert run.backend.healed >= 2


def test_servers_that_are_lost_again_and_again_end_the_run(trainer):
    run = trainer(config(1))
    run.backend.fails = 10**6
    with pytest.raises(UserError, match=f"were lost with their servers {MAX_ATTEMPTS} times"):
        for _ in range(20):
            run.step()


def test_an_evaluation_stops_what_is_under_way_and_lets_it_go_on(trainer):
    run = trainer(config(1))
    run.step()
    before = len(run.backend.begun)
    found = run.rollout.evaluate(PROMPTS[:2])
    assert [t.completion.id for t in found] == ["train.jsonl:0/eval/0", "train.jsonl:1/eval/0"]
    evaluated, goes_on = run.backend.begun[before:]
    assert all("/eval/" in id for id in evaluated) and goes_on and not any("/eval/" in id for id in goes_on)
    run.step()
    check(run)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_function_of_the_whole_batch_is_called_once_a_batch(trainer, staleness):
    rewards = Rewards(whole_batch=True)
    run = trainer(config(staleness), rewards=rewards)
    for _ in range(4):
        run.step()
    assert rewards.calls == [BATCH * GENERATIONS] * 4
    check(run)
