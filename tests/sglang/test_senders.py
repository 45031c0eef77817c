"""With weight_sync=broadcast weights go from the ranks that hold them to the servers, and through no other rank."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
from support.models.families import tensors_of
from support.servers import senders

from isoloss.engine.rl.backends.sglang.server import SGLangServer

BUCKET_BYTES = 30_000

CASES = [
    # family, ranks, layout, the ranks that send, the groups in which shards are gathered
    ("qwen2", 2, {"pp": 2}, 2, ()),  # tied: the last stage has a copy of the embedding, and does not send it
    ("qwen3-moe", 2, {"ep": 2}, 2, ()),
    ("qwen3", 4, {"tp": 2, "pp": 2}, 2, ((0, 1), (2, 3))),
    ("qwen3-moe", 4, {"pp": 2, "ep": 2}, 4, ()),
    ("gpt-oss", 2, {"ep": 2}, 1, ((0, 1),)),  # a tensor holds all experts
    ("mimo-v2-flash", 2, {"ep": 2}, 2, ()),
    ("gemma-4", 2, {"pp": 2}, 2, ()),
    ("gemma-4-moe", 2, {"ep": 2}, 1, ((0, 1),)),
]


@pytest.fixture
def servers(double, second_double) -> Iterator[list[SGLangServer]]:
    """They are told of any model's weights, and keep their own."""
    servers = [SGLangServer(each.url, 60.0) for each in (double, second_double)]
    for server in servers:
        server.post("/options", {"keeps_own": True})
    yield servers
    for server in servers:
        server.post("/options", {"keeps_own": False})
        server.close()


@pytest.mark.parametrize(("family", "world", "parallel", "num_senders", "gathering"), CASES, ids=str)
def test_weights_go_through_no_other_rank(
    family, world, parallel, num_senders, gathering, tiny_hf, pool, servers, tmp_path
):
    folder = tiny_hf(family, num_hidden_layers=2)
    urls = tuple(server.url for server in servers)
    of_ranks = pool.run(world, senders.sync, urls, folder, tmp_path, "broadcast", BUCKET_BYTES, parallel)
    wanted = [[name, checksum(t), list(t.shape), str(t.dtype)] for name, t in tensors_of(folder).items()]
    for server in servers:
        assert sorted(server.get("/received")["tensors"]) == sorted(wanted)  # each once, bit for bit
        assert not server.get("/received")["groups"]  # after the end
    for rank, (updates, groups_of_server) in enumerate(of_ranks):
        assert groups_of_server == num_senders  # after two updates: they are formed once
        groups = {ranks for ranks in gathering if rank in ranks}
        for traffic in updates:
            assert set(traffic) == {("allgather_", ranks) for ranks in groups}, traffic


def test_the_counting_sees_what_goes_through_rank_0(tiny_hf, pool, servers, tmp_path):
    """As it does on its way to a folder."""
    folder = tiny_hf("qwen2", num_hidden_layers=2)
    urls = tuple(server.url for server in servers)
    (_, _), ((traffic, _), _) = pool.run(2, senders.sync, urls, folder, tmp_path, "disk", BUCKET_BYTES, {"pp": 2})
    assert list(traffic) == [("send", (0, 1))]
    tensors = tensors_of(folder).items()
    of_stage_1 = [t.nbytes for name, t in tensors if ".layers.1." in name or name == "model.norm.weight"]
    assert sum(of_stage_1) <= traffic["send", (0, 1)] <= sum(of_stage_1) + 16 * len(of_stage_1)


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
