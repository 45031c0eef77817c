"""Tinker's own SDK, unmodified, against real servers: numbers of the engine, whatever dies meanwhile."""

import json
import subprocess
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from support.serve.server import PYTHON, environment, served

from isoloss.engine.batching.sample import Sample
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, Term, target_logprobs
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel.aggregation import Aggregation
from isoloss.recipes import launch
from isoloss.tools.prove.serve.server import Server
from isoloss.tools.serve.config import ServeConfig

STEPS = 24

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .tinker-venv/.ready installs the SDK"),
    pytest.mark.xdist_group("tinker"),
]


def start_session(server: Server, out: Path) -> subprocess.Popen:
    script = Path(__file__).with_name("session.py")
    command = [PYTHON, script, server.url, server.key, out, str(STEPS)]
    return subprocess.Popen(command, env=environment(server.url, server.key))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("serve") / "server", "serve.save_every=5") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("numbers") / "out.json"
    assert start_session(server, out).wait(240) == 0
    return json.loads(out.read_text())


def on_the_engine() -> list[dict]:
    """Return the numbers of a session's steps, computed by a loop over the engine."""
    config, *_ = launch.compose_config("serve", ServeConfig, ["preset=tiny"])
    engine = Engine(config.of_engine()).adapter(LoraConfig(rank=4, seed=1, targets=("attention", "mlp", "lm_head")))
    draw, numbers = np.random.default_rng(0), []

    def ratio(inputs):
        return torch.exp(inputs.logprobs_N - inputs.fields["old"])

    per_token = [
        lambda inputs: -inputs.logprobs_N * inputs.fields["factor"],
        lambda inputs: -ratio(inputs) * inputs.fields["factor"],
        lambda inputs: (
            -torch.minimum(
                ratio(inputs) * inputs.fields["factor"], ratio(inputs).clamp(0.8, 1.2) * inputs.fields["factor"]
            )
        ),
        lambda inputs: -ratio(inputs).clamp(0, 4).detach() * inputs.logprobs_N * inputs.fields["factor"],
    ]
    for step in range(STEPS):
        loss = Loss((Term(per_token[step % 4], Aggregation("sum")),), outputs={"logprobs": target_logprobs})
        found = {"loss": [], "logprobs": []}
        for _ in range(2):
            metrics = engine.forward_backward([sample(step % 4 == 0, draw) for _ in range(5)], loss)
            found["loss"].append(metrics.loss)
            found["logprobs"] += [row[1:].float().tolist() for row in metrics.outputs["logprobs"]]
        result = engine.optim_step(1e-3, betas=(0.8, 0.98), eps=1e-8, weight_decay=0.01, clip=1.0)
        numbers.append({**found, "norm": result.grad_norm})
    return numbers


def sample(weighted: bool, draw: np.random.Generator) -> Sample:
    """Return the sample of the datum that session.py draws."""
    tokens = draw.integers(3, 2000, int(draw.integers(5, 40)))
    count = len(tokens) - 1
    targets, factor, old = tokens[1:].copy(), draw.random(count) if weighted else None, np.zeros(count)
    if factor is None:
        old, factor = -7.6 + 0.1 * draw.standard_normal(count), draw.standard_normal(count)
        targets[: count // 3], factor[: count // 3] = 0, 0.0
    fields = {"factor": factor, "old": old}
    return Sample(
        torch.from_numpy(np.append(tokens[:-1], tokens[-2])),
        torch.arange(count + 1) > 0,
        fields={name: torch.from_numpy(np.append(0.0, of.astype(np.float32))) for name, of in fields.items()},
        targets_T=torch.from_numpy(np.append(tokens[0], targets)),
    )


def test_a_session_has_the_bits_of_a_loop_on_the_engine(undisturbed):
    *steps, last = undisturbed
    expected = on_the_engine()
    assert len(steps) == len(expected) == STEPS
    for found, wanted in zip(steps, expected):
        assert found == wanted
    assert last["resumed"][0] == last["resumed"][1]
    assert [len(tokens) for tokens in last["tokens"]]


def test_two_clients_and_dying_processes_change_no_bit(server, undisturbed, tmp_path):
    outs = [tmp_path / f"{k}.json" for k in range(2)]
    clients = [start_session(server, out) for out in outs]
    for victim, seconds in (("rank", 7), ("front", 18)):
        time.sleep(seconds)
        server.kill(victim, Random(0))
    assert [client.wait(280) for client in clients] == [0, 0]
    assert [json.loads(out.read_text()) for out in outs] == [undisturbed, undisturbed]
