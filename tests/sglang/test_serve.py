"""SGLang servers that sample for the clients of isoloss-serve, from versions of several training clients."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.models import families
from support.models.lora import make_engine
from support.servers.adapters import SIZES
from support.servers.server_commands import DOUBLE, SGLANG

from isoloss.models.lora.config import LoraConfig
from isoloss.parallel import UserError
from isoloss.tools.serve import commands
from isoloss.tools.serve.ranks.sampler import requests_of, rules_of
from isoloss.tools.serve.ranks.servers import VersionServers, body_of, name_of
from isoloss.tools.serve.ranks.tenants import Tenants
from isoloss.tools.serve.wire import Datum

from .conftest import free_url

COMMANDS = {"double": DOUBLE, "sglang": f"{SGLANG} --lora-backend torch_native"}
OPTIONS = (
    "--enable-lora --max-lora-rank 4 --max-loras-per-batch 4 "
    "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head"
)
GROUPS = ("attention", "mlp", "lm_head")
VOCAB = SIZES["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose output matrix is its own."""
    return families.write_folder("llama", tmp_path_factory.mktemp("serve") / "model", seed=0, **SIZES)


@pytest.fixture(params=["double", pytest.param("sglang", marks=pytest.mark.sglang)])
def url(request, start: Callable[..., str], folder) -> Iterator[str]:
    yield start(f"{COMMANDS[request.param].replace('{model}', str(folder))} {OPTIONS}")


def asked(*ids: str) -> commands.SampleRequest:
    return commands.SampleRequest(ids, (5, 6, 7), 6, 1.0, 1.0, -1, (), (), 3)


def trained(tenants: Tenants, model: str) -> None:
    """Take a step that is large enough to see."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, VOCAB, 12) for _ in range(4)]
    data = [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]
    tenants.run(commands.ForwardBackward(model, data, "cross_entropy", {}, False))
    tenants.run(commands.OptimStep(model, 2e-2, 0.9, 0.95, 1e-8, 0.0, 0.0))


def apart(servers: VersionServers, tenants: Tenants, of: str, version: str) -> float:
    """Return by how much a server's log-probabilities differ from those of a version on the engine."""
    difference = 0.0
    for future in servers.sample(commands.Sample("", of, asked("a", "b"))):
        done = future.result(60)
        whole = (5, 6, 7, *done.tokens)
        (scores,) = tenants.sampler(version).scores([commands.Score("", version, whole, 0)])
        difference = max(difference, np.abs(scores.logprobs[3:] - np.array(done.logprobs)).max())
    return difference


def test_versions_of_several_clients_are_sampled_by_their_names(url, folder, tmp_path):
    servers = VersionServers((url,), 60.0, 4)
    servers.check()
    engine = make_engine(folder, LoraConfig(rank=1), precision="fp32", random_b=False)
    tenants = Tenants(engine, 4, tmp_path, servers.load, servers.drop)
    for model in ("one", "two"):
        tenants.run(commands.CreateModel(model, 4, 1 if model == "one" else 2, GROUPS))
        trained(tenants, model)
        tenants.run(commands.Snapshot(model, f"of {model}"))
        trained(tenants, model)
    tenants.run(commands.Snapshot("one", "newer"))
    for version in ("of one", "of two", "newer", commands.BASE):
        assert apart(servers, tenants, version, version) <= 1e-5, version
    assert apart(servers, tenants, "of one", "newer") > 1e-3
    assert apart(servers, tenants, "of one", "of two") > 1e-4
    tenants.run(commands.Snapshot("one", "of two"))  # of a version in flight, which moves
    assert apart(servers, tenants, "of two", "newer") <= 1e-5
    tenants.run(commands.DropVersion("", "of one"))
    (failed,) = servers.sample(commands.Sample("", "of one", asked("a")))
    with pytest.raises(UserError, match="SGLang gave no completion: http"):
        failed.result(60)
    assert not [*tmp_path.iterdir()]  # servers have read the folders


def test_servers_that_are_not_there_are_named(tmp_path):
    url = free_url()
    with pytest.raises(UserError, match=rf"serve\.sglang_servers: {url} does not answer"):
        VersionServers((url,), 5.0, 1).check()


def test_the_body_names_the_adapter_and_the_stop_strings():
    request = asked("x")
    rules = rules_of(commands.SampleRequest(**{**vars(request), "stop": ("END",), "top_k": 5}))
    (each,) = requests_of(request)
    body = body_of(each, rules, name_of("v"))
    assert body["lora_path"] == name_of("v") != name_of("w")
    assert (body["sampling_params"]["stop"], body["sampling_params"]["top_k"]) == (["END"], 5)
    assert "lora_path" not in body_of(each, rules, None)
