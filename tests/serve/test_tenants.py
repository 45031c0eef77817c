"""Training clients of a server on the engine, and what the ranks and the supervisor do around them."""

import asyncio
import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Client, Listener

import numpy as np
import pytest
import torch

from isoloss.engine.rl.trajectory import Completion
from isoloss.engine.step.engine import Engine
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch
from isoloss.tools.serve import __main__ as supervisor
from isoloss.tools.serve import commands
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front.link import Link
from isoloss.tools.serve.ranks import __main__ as ranks_main
from isoloss.tools.serve.ranks.inbox import Inbox
from isoloss.tools.serve.ranks.tenants import Tenants
from isoloss.tools.serve.wire import Datum

TARGETS = ("attention", "mlp")
ADAM = (1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)


@pytest.fixture
def engine() -> Engine:
    config, *_ = launch.compose_config("serve", ServeConfig, ["preset=tiny"])
    return Engine(config.of_engine())


def data() -> list[Datum]:
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 2000, 20) for _ in range(3)]
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": draw.random(19).astype(np.float32)}) for row in rows]


def losses(model: str, *, forward_only: bool = False) -> commands.ForwardBackward:
    return commands.ForwardBackward(model, data(), "cross_entropy", {}, forward_only)


def test_a_loss_is_the_sum_of_weighted_log_probabilities(engine):
    tenants = Tenants(engine, 4)
    tenants.run(commands.CreateModel("a", 4, 1, TARGETS))
    found = tenants.run(losses("a", forward_only=True))
    expected = -sum(
        float((datum.inputs["weights"] * row).sum()) for datum, row in zip(data(), found.logprobs, strict=True)
    )
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert [row.shape for row in found.logprobs] == [(19,)] * 3


def test_a_version_stays_what_it_was_and_another_client_changes_nothing(engine):
    tenants = Tenants(engine, 4)
    alone = []
    for model, others in (("a", ()), ("b", ("c", "d"))):
        for name in (model, *others):
            tenants.run(commands.CreateModel(name, 4, 1 if name == model else 9, TARGETS))
        numbers = []
        for _ in range(3):
            for name in (*others, model):
                result = tenants.run(losses(name))
            numbers.append(result.loss)
            for name in (model, *others):
                tenants.run(commands.OptimStep(name, *ADAM))
        alone.append(numbers)
    assert alone[0] == alone[1]
    tenants.run(commands.Snapshot("a", "version"))
    first = sampled(tenants, "version")
    (scores,) = tenants.sampler("version").scores([commands.Score("", "version", (5, 6, 7), 2)])
    tenants.run(losses("a"))
    tenants.run(commands.OptimStep("a", *ADAM))
    assert sampled(tenants, "base") != first
    assert sampled(tenants, "version") == first
    tenants.run(commands.Snapshot("a", "version"))  # of one in flight, which moves
    assert sampled(tenants, "version") != first
    tenants.run(commands.DropVersion("", "version"))
    assert list(tenants._copies._taken) == []
    assert np.isnan(scores.logprobs[0])
    assert scores.top_ids.shape == scores.top_logprobs.shape == (3, 2)
    assert scores.top_ids[0].tolist() == [0, 0]
    assert scores.top_logprobs[0].tolist() == [-99999.0] * 2  # as the SDK reads none
    assert (scores.top_logprobs[1:, 0] >= scores.logprobs[1:]).all()


def sampled(tenants: Tenants, version: str) -> list:
    """Return tokens and log-probabilities of completions."""
    request = asked("x/0", "x/1")
    here, there = Pipe()
    tenants.sampler(version).sample(Inbox(here), (7, commands.Sample("", version, request)))
    number, completions = there.recv()
    there.close()
    assert number == 7
    return [(tokens.tolist(), logprobs.tolist()) for tokens, logprobs, _ in completions]


def asked(*ids: str) -> commands.SampleRequest:
    return commands.SampleRequest(ids, (5, 6, 7), 4, 1.0, 1.0, -1, (), (), 3)


def test_samples_of_one_version_join_those_that_run():
    here, there = Pipe()
    inbox, begun = Inbox(here), {}

    def begin(request: commands.SampleRequest) -> list[Future[Completion]]:
        if request.ids == ("bad",):
            raise UserError("the prompt is too long")
        begun.update({id: Future() for id in request.ids})
        return [begun[id] for id in request.ids]

    def send(number: int, command: commands.Command) -> None:
        there.send((number, command))

    def completed(id: str) -> None:
        begun[id].set_result(Completion(id, (5,), (-0.5,), (0,), "stop"))

    send(1, commands.Sample("", "v", asked("a", "b")))
    send(2, commands.Sample("", "v", asked("c")))
    (first,) = inbox.next() or ()
    while len(inbox._waiting) < 1:
        pass
    goal = inbox.begin(first, begin)
    assert sorted(begun) == ["a", "b", "c"]
    send(3, commands.Sample("", "v", asked("d")))  # while it runs
    send(4, commands.Sample("", "v", asked("bad")))
    assert there.recv()[0] == 4  # refused, and the others go on
    send(5, commands.Cancel(""))
    send(3, commands.Cancel(""))
    send(6, commands.Sample("", "v", asked("a")))  # the random numbers of another one that runs
    send(7, commands.Sample("", "v", asked("e")))  # after it
    send(8, commands.Score("", "v", (5,), 0))
    send(9, commands.Score("", "v", (6,), 0))
    while len(inbox._waiting) < 4:
        pass
    assert begun["d"].cancelled()
    assert sorted(begun) == ["a", "b", "c", "d"]
    for id in "bca":
        assert not goal.done()
        completed(id)
    assert goal.done()
    assert [there.recv()[0] for _ in range(2)] == [2, 1]
    assert [number for number, _ in inbox.next() or ()] == [6]
    assert [number for number, _ in inbox.next() or ()] == [7]
    assert [number for number, _ in inbox.next() or ()] == [8, 9]
    there.close()
    assert inbox.next() is None


def test_weights_without_the_optimizer_begin_their_moments_anew(engine, tmp_path):
    tenants = Tenants(engine, 4)
    tenants.run(commands.CreateModel("a", 4, 1, TARGETS))
    for _ in range(2):
        tenants.run(losses("a"))
        tenants.run(commands.OptimStep("a", *ADAM))
    tenants.run(commands.SaveWeights("a", str(tmp_path / "saved")))
    steps = {}
    for name, optimizer in (("with", True), ("without", False)):
        tenants.run(commands.CreateModel(name, 4, 5, TARGETS))
        tenants.run(commands.LoadWeights(name, str(tmp_path / "saved"), optimizer))
    for name in ("a", "with", "without"):
        before = [tensor.clone() for tensor in tenants._models[name].trained.tensors()]
        tenants.run(losses(name))
        tenants.run(commands.OptimStep(name, *ADAM))
        after = tenants._models[name].trained.tensors()
        steps[name] = torch.cat([(b - a).flatten() for a, b in zip(before, after)])
    assert torch.equal(steps["a"], steps["with"])
    moved = steps["without"].abs()
    # AdamW's first step moves a number by the learning rate, whatever its gradient.
    assert torch.allclose(moved[moved > 1e-6], torch.tensor(1e-2), rtol=1e-3)


def test_a_call_that_is_not_finite_ends_the_step_of_its_own_client_alone(engine):
    tenants = Tenants(engine, 4)
    for name in "ab":
        tenants.run(commands.CreateModel(name, 4, 1, TARGETS))
    huge = [Datum(datum.tokens, {**datum.inputs, "weights": np.full(19, 3e38, np.float32)}) for datum in data()]
    tenants.run(losses("a"))
    tenants.run(commands.ForwardBackward("b", huge, "cross_entropy", {}, False))
    applied = {name: tenants.run(commands.OptimStep(name, *ADAM))["applied"] for name in "ab"}
    assert applied == {"a": 1.0, "b": 0.0}


def test_a_field_that_a_loss_reads_must_be_there(engine):
    tenants = Tenants(engine, 4)
    tenants.run(commands.CreateModel("a", 4, 1, TARGETS))
    with pytest.raises(UserError, match=r"datum 0 has no 'logprobs'"):
        tenants.run(commands.ForwardBackward("a", data(), "ppo", {}, False))


def test_several_targets_of_a_position_are_one_sum_of_their_log_probabilities(engine):
    tenants = Tenants(engine, 4)
    tenants.run(commands.CreateModel("a", 4, 1, (*TARGETS, "lm_head")))
    draw, single = np.random.default_rng(1), data()
    targets = draw.integers(0, 2000, (19, 3))
    weights = draw.random((19, 3)).astype(np.float32)
    several = Datum(single[0].tokens, {"target_tokens": targets, "weights": weights})
    found = tenants.run(commands.ForwardBackward("a", [several], "cross_entropy", {}, False))
    gradients, losses_K = [grads(tenants)], []
    for k in range(3):
        one = Datum(several.tokens, {"target_tokens": targets[:, k], "weights": weights[:, k]})
        result = tenants.run(commands.ForwardBackward("a", [one], "cross_entropy", {}, False))
        assert np.allclose(found.logprobs[0][:, k], result.logprobs[0], atol=1e-5)
        losses_K.append(result.loss)
        gradients.append(grads(tenants))
    assert found.loss == pytest.approx(sum(losses_K), rel=1e-5)
    assert torch.allclose(gradients[0], gradients[-1] - gradients[0], atol=1e-4)  # the three parts add up
    with pytest.raises(UserError, match=r"several targets a position .* need loss_fn=cross_entropy"):
        tenants.run(commands.ForwardBackward("a", [several], "ppo", {}, False))


def grads(tenants: Tenants) -> torch.Tensor:
    """Return the accumulated gradients of the training client a."""
    held = [tensor.main_grad for tensor in tenants._models["a"].trained.tensors()]  # pyright: ignore
    return torch.cat([grad.flatten().double() for grad in held])


def test_the_front_gets_outcomes_under_the_numbers_of_its_commands(tmp_path):
    ended: list = []
    link = Link(str(tmp_path / "s"), lambda: ended.append("the ranks have ended"))

    def ranks() -> None:
        with Client(str(tmp_path / "s"), "AF_UNIX") as connection:
            connection.send((-1, {"vocab_size": 3}))
            first, second, third = (connection.recv() for _ in range(3))
            connection.send((second[0], second[1].model_id))
            connection.send((first[0], first[1].model_id))
            ended.append((third[0], connection.recv()))

    thread = threading.Thread(target=ranks)
    thread.start()

    async def talk():
        facts = await link.connect()
        calls = [asyncio.create_task(link.call(commands.DropModel(name))) for name in "ab"]
        await asyncio.sleep(0)
        sampling = asyncio.create_task(link.call(commands.DropModel("c")))
        await asyncio.sleep(0)
        found = facts, [await call for call in calls]
        sampling.cancel()
        return found

    assert asyncio.run(talk()) == ({"vocab_size": 3}, ["a", "b"])
    thread.join()
    (number, cancel), *_ = ended
    assert cancel == (number, commands.Cancel(""))


def test_ranks_answer_every_command_until_the_front_ends(tmp_path):
    address, found = str(tmp_path / "s"), {}
    sent = [
        commands.CreateModel("a", 2, 1, TARGETS),
        commands.ForwardBackward("a", data(), "ppo", {}, False),
        *(commands.Sample("", "base", asked(id)) for id in ("x", "y")),
        *(commands.Score("", "base", (5, 6, k), 0) for k in (7, 8)),
    ]

    def front() -> None:
        with Listener(address, "AF_UNIX") as listener, listener.accept() as connection:
            found.update([connection.recv()])
            for each in enumerate(sent):
                connection.send(each)
            found.update(connection.recv() for _ in sent)

    thread = threading.Thread(target=front)
    thread.start()
    assert ranks_main.main([address, "preset=tiny"]) == 0
    thread.join()
    facts, model, refused, x, y, one, other = (found[number] for number in range(-1, len(sent)))
    assert facts["arch"] == "qwen3"
    assert model is None
    assert refused == commands.Failed("datum 0 has no 'logprobs', which the loss reads; it has target_tokens, weights")
    assert [[len(tokens) for tokens, *_ in each] for each in (x, y)] == [[4], [4]]
    assert one.logprobs[1] == other.logprobs[1]
    assert one.logprobs[2] != other.logprobs[2]


@pytest.mark.parametrize(("ends", "status", "starts"), [([2], 2, 1), ([1, 1, 1], 1, 3), ([1, 2], 2, 2)])
def test_a_server_is_started_again_and_given_up_in_the_end(monkeypatch, ends, status, starts):
    left = [*ends]
    monkeypatch.setattr(supervisor, "run", lambda config, words: left.pop(0))
    config, *_ = launch.compose_config("serve", ServeConfig, ["preset=tiny"])
    assert supervisor.supervise(config, []) == status
    assert len(ends) - len(left) == starts


def test_a_key_of_runs_is_refused_and_the_name_is_that_of_the_folder():
    with pytest.raises(UserError, match=r"optim.lr=1.0 is a key of runs"):
        launch.compose_config("serve", ServeConfig, ["preset=tiny", "optim.lr=1"])
    config, *_ = launch.compose_config("serve", ServeConfig, ["preset=tiny", "serve.name=''"])
    assert config.name == "tiny"
