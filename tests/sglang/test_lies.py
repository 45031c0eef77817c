"""Answers that are late, damaged or lies: each is asked for again, counted, or told; none becomes a sample."""

import pytest
from doubles.sglang_server import LIES
from support.servers.servers import VOCAB, buckets, policy, requests, worst

from isoloss.engine.rl.backends.servers.response_check import damage
from isoloss.engine.rl.trajectory import Completion, Sampling
from isoloss.parallel import UserError

PARITY = 1e-5
BROKEN = ("500", "reset", "truncate", "break off", "not JSON", "a list")
NOTHING = {
    "servers_lost": 0,
    "servers_returned": 0,
    "requests_retried": 0,
    "completions_lost": 0,
    "syncs_retried": 0,
}


def check(rollout, model, version: int, number: int = 4) -> None:
    completions = rollout.generate(requests(number), Sampling(8))
    for request, completion in zip(requests(number), completions):
        assert completion is not None and completion.finish == "length"
        assert len(completion.tokens) == 8 and set(completion.versions) == {version}
        assert worst(model, request, completion) <= PARITY


def test_no_lie_becomes_a_sample(backend, both, first, second):
    """By either server, in the middle of other answers, which are whole. What it costs is one more request."""
    rollout, model = backend(servers=both), policy(2)
    rollout.update_weights(buckets(model), 4)
    rollout.take_counts()
    for index, kind in enumerate((*BROKEN, *LIES)):
        (first, second)[index % 2].inject(kind)
        before = first.calls("/generate") + second.calls("/generate")
        check(rollout, model, 4)
        calls = first.calls("/generate") + second.calls("/generate") - before
        assert (kind, calls, rollout.take_counts()) == (kind, 4 + 1, {**NOTHING, "requests_retried": 1})


def test_a_late_answer_is_an_answer(backend, first):
    rollout, model = backend(servers=(first.server.url,)), policy(2)
    rollout.update_weights(buckets(model), 4)
    first.inject("late", count=2)
    check(rollout, model, 4)
    assert rollout.take_counts() == NOTHING


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("negative token", f"token -1, which is not in the vocabulary of {VOCAB}"),
        ("nan", "the log-probability nan, which no token that was drawn has"),
        ("more tokens", "16 tokens where at most 8 were asked for"),
        ("stale", "tokens of weights of version 3, not 4"),
        ("a list", "an answer that is no JSON object: '[]'"),
        ("fewer logprobs", "7 log-probabilities of 8 tokens"),
        ("abort", "an abort that nobody here asked for"),
    ],
)
def test_a_server_that_goes_on_lying_is_told(backend, first, kind, says):
    rollout = backend(servers=(first.server.url,), timeout=1.0)
    rollout.update_weights(buckets(policy(2)), 4)
    first.inject(kind, count=1000)
    with pytest.raises(UserError) as ended:
        rollout.generate(requests(1), Sampling(8))
    told = str(ended.value)
    assert says in told and first.server.url in told and "request row:0 was tried for rollout.timeout=1" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"finish": "abort", "tokens": (5,)}, None),
        ({"finish": "abort", "tokens": ()}, None),
        ({"finish": "stop", "tokens": (5, 9)}, None),
        ({"finish": "stop", "tokens": (5, 6)}, None),  # an end of the server's own: the caller goes on there
        ({"finish": "stop", "tokens": ()}, "no token"),
        ({"tokens": (5, 9, 6, 7)}, "tokens after one that ends a completion"),
        ({"tokens": (5, 6, 7)}, "3 of 4 tokens, and says that these are all"),
        ({"tokens": (5, 6, 7, 20)}, "token 20, which is not in the vocabulary of 20"),
        ({"logprob": 1e-5}, None),  # a rounding
        ({"logprob": 0.01}, "the log-probability 0.01"),
        ({"logprob": float("-inf")}, "the log-probability -inf"),
        ({"version": 2}, None),  # of an update in the middle
        ({"version": 0}, "version 0, not 1 or 2"),
        ({"finish": "length ", "tokens": (5,)}, "finish 'length '"),
    ],
)
def test_what_an_answer_may_be(changes, says):
    given = {"finish": "length", "tokens": (5, 6, 7, 9), "logprob": -0.5, "version": 1, **changes}
    count = len(given["tokens"])
    versions = [1] * (count - 1) + [given["version"]] if count else []
    answer = Completion("a", given["tokens"], (given["logprob"],) * count, versions, given["finish"])
    found = damage(answer, 4, Sampling(8, stop_token_ids=(9,)), 20, {1, 2})
    assert found is None if says is None else found is not None and says in found
