"""What a run adds to its environment, when, and what a user's own value does; and when Python's garbage goes."""

import gc
import os
import subprocess
import sys

import pytest

from isoloss.engine.instruments import startup
from isoloss.engine.instruments.startup import Garbage
from isoloss.parallel.runtime import environment
from isoloss.recipes.launch import RECIPES, compose_config

GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
REPEATS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
SERVERS = ("rollout.backend=sglang", "rollout.servers=[http://localhost:1]")


def config(recipe: str, *overrides: str):
    return compose_config(recipe, RECIPES[recipe].config, overrides)[0]


@pytest.fixture
def clean(monkeypatch):
    """An environment without any of it, which comes back after the test."""
    for name in (*GROWING, "PYTORCH_CUDA_ALLOC_CONF", *ONE_QUEUE, *REPEATS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_added", {})


@pytest.fixture
def gpu(clean, monkeypatch, tmp_path):
    """A machine with a driver."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(environment, "DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("recipe", "overrides", "wanted"),
    [
        ("sft", (), GROWING),
        ("sft", ("parallel.tp=2",), GROWING | ONE_QUEUE),
        ("sft", ("parallel.ulysses=2",), GROWING),
        ("sft", ("train.deterministic=true",), GROWING | REPEATS),
        ("sft", ("train.device=cpu", "parallel.tp=2"), {}),
        ("grpo", (), GROWING),
        ("grpo", (*SERVERS, "rollout.weight_sync=broadcast"), GROWING),
        ("grpo", (*SERVERS, "rollout.weight_sync=tensor"), {}),  # by handles, which segments that grow have not
        ("grpo", ("rollout.weight_sync=tensor",), GROWING),  # of servers that are not there
    ],
)
def test_variables_of_a_run_on_a_gpu(recipe, overrides, wanted, gpu):
    assert startup.variables(config(recipe, *overrides)) == wanted


@pytest.mark.parametrize("why", ("no driver", "hidden"))
def test_without_a_gpu_nothing_is_set_but_what_is_asked_for(why, gpu, monkeypatch):
    if why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        monkeypatch.setattr(environment, "DEVICE_FILES", ("/nothing/there",))
    assert startup.variables(config("sft", "parallel.tp=2")) == {}
    assert startup.variables(config("sft", "train.deterministic=true")) == REPEATS


@pytest.mark.parametrize(
    ("own", "left"),
    [
        ({}, GROWING | ONE_QUEUE),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, GROWING),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": ""}, GROWING),  # set, to CUDA's default
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, ONE_QUEUE),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, ONE_QUEUE),  # the same under its old name
    ],
)
def test_a_users_own_value_stays(own, left, gpu, monkeypatch):
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    startup.prepare(config("sft", "parallel.tp=2"))
    startup.prepare(config("sft", "parallel.tp=2"))  # as an Engine does after its recipe
    assert environment.added() == left
    assert {name: os.environ[name] for name in own} == own
    for name in (*GROWING, *ONE_QUEUE):
        assert os.environ.get(name) == (own | left).get(name)


def test_servers_get_the_users_values_and_none_of_ours(gpu, monkeypatch):
    """A server that gives its memory back does so with segments that cannot grow."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the user's, and what we would set
    startup.prepare(config("sft", "parallel.tp=2"))
    theirs = environment.of_other_programs()
    assert theirs["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "PYTORCH_ALLOC_CONF" not in theirs
    assert os.environ["PYTORCH_ALLOC_CONF"] == GROWING["PYTORCH_ALLOC_CONF"]


def test_a_recipe_sets_them_before_torch_is_there():
    """CUDA reads its variables at its first call, which torch or Megatron may make at import."""
    code = """if True:
    import sys
    from isoloss.engine.instruments import startup
    from isoloss.recipes import launch
    seen = []
    startup.prepare = lambda config: seen.append(("prepare", "torch" in sys.modules))
    launch.run = lambda recipe, config, name: seen.append(("run", name))
    launch.main("sft", [])
    print(seen)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[('prepare', False), ('run', 'sft-tiny')]\n"


class Knot:
    """Garbage that only a collection finds."""

    gone = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Knot.gone += 1


def test_garbage_goes_after_every_so_many_steps():
    Knot.gone, gone = 0, []
    garbage = Garbage(3)
    before = Knot()
    garbage.begin()
    try:
        assert not gc.isenabled()
        del before  # of the time before: never searched
        for step in range(1, 8):
            Knot()
            garbage.after_step(step)
            gone.append(Knot.gone)
    finally:
        garbage.end()
    assert gone == [0, 0, 3, 3, 3, 6, 6] and gc.isenabled()
    gc.collect()
    assert Knot.gone == 8


def test_garbage_is_left_to_python():
    garbage, frozen = Garbage(0), gc.get_freeze_count()
    garbage.begin()
    # What earlier tests froze may still be let go of.
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
    garbage.after_step(10)
    garbage.end()
    assert gc.isenabled()
