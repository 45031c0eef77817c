"""What a rank takes from torchrun's environment, and what others are given of ours. The process group is a stand-in."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from isoloss.parallel.runtime import environment, process_group

# Rank 11 of 16, the fourth of its node of eight: as torchrun sets it on the second of two nodes.
SECOND_NODE = {
    "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "11", "ROLE_WORLD_SIZE": "16", "ROLE_NAME": "default", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "42",
}  # fmt: skip


@pytest.fixture
def second_node(monkeypatch) -> None:
    for name, value in SECOND_NODE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def joined(monkeypatch) -> list[tuple[tuple, dict]]:
    """Every call of init_process_group."""
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: calls.append((args, options)))
    return calls


def test_a_rank_of_many(second_node):
    assert environment.rank_and_world() == (11, 16)
    assert environment.local_rank() == 3


def test_without_torchrun(monkeypatch):
    for name in SECOND_NODE:
        monkeypatch.delenv(name, raising=False)
    assert environment.rank_and_world() == (0, 1) and environment.local_rank() == 0


def test_a_rank_takes_the_gpu_of_its_place_in_the_node(second_node, joined, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    process_group.init_process_group(timedelta(seconds=7))
    assert taken == [3]
    # Torch reads the rest from the environment. Bound to a device, the world's communicator is made at once.
    assert joined == [(("nccl",), {"timeout": timedelta(seconds=7), "device_id": torch.device("cuda", 3)})]


def test_groups_of_a_world_on_gpus_are_not_split_off_it(one_rank, second_node, monkeypatch):
    """torch splits every group off a world that is bound to a device, with all ranks of the world and no others."""

    def join(*args, device_id, **options):
        one_rank.bound_device_id = device_id

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    try:
        process_group.init_process_group()
        assert one_rank.bound_device_id is None
    finally:
        one_rank.bound_device_id = None


def test_ranks_without_gpus(second_node, joined, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    process_group.init_process_group()
    assert joined == [(("gloo",), {"timeout": timedelta(minutes=30), "device_id": None})]


def test_one_rank_needs_no_rendezvous(joined, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    process_group.init_process_group()
    ((backend,), options) = joined[0]
    assert (backend, options["rank"], options["world_size"]) == ("gloo", 0, 1)
    assert isinstance(options["store"], dist.HashStore)


def test_who_has_joined_does_not_join_again(second_node, joined, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    process_group.init_process_group()
    assert joined == []


@pytest.mark.parametrize("last_line, left", [("", True), ("sys.exit(3)", True), ("1 / 0", False)])
def test_who_joined_leaves_at_the_end_but_not_after_an_exception(last_line, left):
    """Callbacks run in reverse order: the one registered before sees what the world's own has left."""
    program = f"""
import atexit, sys
import torch.distributed as dist
from isoloss.parallel.runtime import process_group as launch
atexit.register(lambda: print("left:", not dist.is_initialized()))
launch.init_process_group()
assert dist.is_initialized()
{last_line}
"""
    alone = os.environ | {"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True)
    assert done.stdout == f"left: {left}\n", done.stderr


def test_other_programs_get_nothing_of_torchruns(second_node, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    theirs = environment.of_other_programs()
    assert theirs.keys() & SECOND_NODE.keys() == set()
    assert theirs["MINE"] == "kept" and theirs["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("deterministic", (False, True))
def test_kernels_that_torch_may_choose(deterministic, monkeypatch):
    """Parts of a long sum are never rounded to bf16; an operation that repeats otherwise is an error where asked."""
    asked, matmul = [], torch.backends.cuda.matmul
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", True)
    process_group.choose_kernels(deterministic=deterministic)
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert asked == [True] * deterministic


def test_gpus_that_are_left_to_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert environment.visible_gpus() == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # all are hidden, which is not the same as all being there
    assert environment.visible_gpus() == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment.visible_gpus() is None
