"""Training clients of a server on the engine, and what the ranks and the supervisor do around them."""

import asyncio
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Client

import numpy as np
import pytest
import torch

from isoloss.engine.step.engine import Engine
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch
from isoloss.tools.serve import __main__ as supervisor
from isoloss.tools.serve import commands, worker
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.link import Link
from isoloss.tools.serve.tenants import Tenants
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
    asked = [commands.SampleRequest(("x/0", "x/1"), (5, 6, 7), 4, 1.0, 1.0, (), 3, prompt_logprobs=True, top=2)]
    (first,) = tenants.run(commands.Sample("", "version", asked))
    tenants.run(losses("a"))
    tenants.run(commands.OptimStep("a", *ADAM))
    tenants.run(commands.Sample("", "base", asked))
    (again,) = tenants.run(commands.Sample("", "version", asked))
    for one, other in zip(first.completions, again.completions, strict=True):
        assert (one[0] == other[0]).all()
        assert (one[1] == other[1]).all()
    assert np.isnan(first.prompt_logprobs[0])
    top_ids, top_logprobs = first.top
    assert top_ids.shape == top_logprobs.shape == (3, 2)
    assert top_ids[0].tolist() == [0, 0]
    assert top_logprobs[0].tolist() == [-99999.0] * 2  # as the SDK reads none
    assert (top_logprobs[1:, 0] >= first.prompt_logprobs[1:]).all()


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


def test_a_field_that_a_loss_reads_must_be_there(engine):
    tenants = Tenants(engine, 4)
    tenants.run(commands.CreateModel("a", 4, 1, TARGETS))
    with pytest.raises(UserError, match=r"datum 0 has no 'logprobs'"):
        tenants.run(commands.ForwardBackward("a", data(), "ppo", {}, False))


def test_a_request_asks_for_no_log_probabilities_by_itself():
    assert not commands.SampleRequest(("x",), (1,), 1, 1.0, 1.0, (), 0).prompt_logprobs


def test_the_front_and_the_ranks_talk_in_turn(tmp_path):
    link = Link(str(tmp_path / "s"))

    def ranks() -> None:
        with Client(str(tmp_path / "s"), "AF_UNIX") as connection:
            connection.send({"vocab_size": 3})
            for _ in range(2):
                connection.send(("done", connection.recv()))

    thread = threading.Thread(target=ranks)
    thread.start()

    async def talk():
        facts = await link.connect()
        return facts, [await link.call(commands.DropModel(name)) for name in "ab"]

    found = asyncio.run(talk())
    thread.join()
    assert found == ({"vocab_size": 3}, [("done", commands.DropModel("a")), ("done", commands.DropModel("b"))])


def test_ranks_end_when_the_front_does():
    here, there = Pipe()
    there.send(commands.DropModel("a"))
    assert worker._next(here) == commands.DropModel("a")
    there.close()
    assert worker._next(here) is None


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
