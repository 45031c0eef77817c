"""The code that runs on a GPU never mixes host and device, and waits for the device as often as is written here.

The Engine goes through its phases as one rank of many, with fake tensors on a device of their own: an op that takes a
tensor of the host and one of the device raises, as on a GPU.
"""

import json
import subprocess

import pytest
from support import dry_runs, families

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 1024, "head_dim": 32}
RL = ("rollout.backend=sglang", "rollout.servers=[http://a:1]", "reward.function=math", "data.train=[x]")
ROWS = {
    "tp": ("sft", "qwen3", 4, 0, "parallel.tp=2"),
    "no sequence parallelism": ("sft", "qwen3", 4, 0, "parallel.tp=2", "parallel.sequence_parallel=false"),
    "first stage": ("sft", "qwen3", 4, 0, "parallel.pp=2"),
    "last stage": ("sft", "qwen3", 4, 2, "parallel.pp=2"),
    "interleaved": ("sft", "qwen3", 4, 0, "parallel.pp=2", "parallel.vpp=2"),
    "ulysses and ring": ("sft", "qwen3", 4, 0, "parallel.ulysses=2", "parallel.ring=2"),
    "experts": ("sft", "qwen3-moe", 4, 0, "parallel.ep=2"),
    "experts, tp, full recomputation": (
        "sft",
        "qwen3-moe",
        4,
        0,
        "parallel.ep=2",
        "parallel.tp=2",
        "memory.recompute=full",
    ),
    "critic and reference": ("grpo", "qwen3", 4, 0, "algorithm.advantage=gae", "algorithm.kl_coef=0.1", *RL),
    "weights to servers": ("dapo", "qwen3", 4, 0, "parallel.tp=2", "algorithm.overlong_buffer=8", *RL),
}


def row(folder, recipe, family, world, rank, *keys, plant=None):
    changes = SIZES | (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "moe" in family else {}
    )
    model = folder / family
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(families.published(family, **changes)))
    given = [f"model.path={model}", "train.precision=bf16", "batch.max_tokens=512", "data.max_length=64", *keys]
    if recipe != "sft":
        given += ["rollout.max_new_tokens=32"]
    return dry_runs.Row(recipe, given, world, rank, "gpu", plant)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    rows = [row(folder, *values) for values in ROWS.values()]
    return dict(zip(ROWS, dry_runs.in_a_process(rows, folder / "rows.json")))


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_refused(reports, name):
    assert reports[name].faults == []
    print(
        name,
        [(p.name, sum(c for *_, c in p.waits), sum(p.launches.values())) for p in reports[name].phases],
        reports[name].micro_batches,
    )


def test_a_planted_fault_is_caught(tmp_path):
    ring = ("sft", "qwen3", 4, 0, "parallel.ring=2")
    for plant in ("host tensor into a collective", "strided send", "item for every micro-batch"):
        try:
            report = dry_runs.in_a_process([row(tmp_path, *ring, plant=plant)], tmp_path / "rows.json")[0]
            print(plant, report.faults, [w for w in report.phase("forward and backward").waits if "step.py" in w[1]])
        except subprocess.CalledProcessError:
            print(plant, "raised")
