"""Weights that are gathered in the pass after their step: every number is that of weights gathered in the step."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numerics import gathering
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples

from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from isoloss.parallel import Layout
from isoloss.tools.prove.parity import freeze
from isoloss.tools.prove.proof import on_layout

SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), VOCAB))


def configs(folder: Path, layout: str, precision: Any = "fp32", recompute: Any = "none") -> tuple[Config, Config]:
    """Without and with the overlap."""
    config = Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=64),
        memory=MemoryConfig(recompute),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(precision=precision),
    )
    config = on_layout(config, Layout.parse(layout), precision)
    parallel = dataclasses.replace(config.parallel, distributed_optimizer=True, overlap_grad_reduce=True)
    off, on = (dataclasses.replace(parallel, overlap_param_gather=each) for each in (False, True))
    return dataclasses.replace(config, parallel=off), dataclasses.replace(config, parallel=on)


@pytest.mark.parametrize(
    ("family", "layout", "precision", "recompute", "how"),
    (
        ("qwen3", "dp2", "bf16", "none", "late"),
        ("qwen3", "dp2", "fp32", "none", "gloo's"),
        ("qwen3", "dp2+tp2", "fp32", "none", "late"),
        ("qwen2", "pp2+vpp2+dp2", "fp32", "none", "late"),  # its output matrix is its embedding, on another stage
        ("qwen2", "dp2", "fp32", "full", "late"),
        ("qwen3", "ring2+dp2", "fp32", "none", "late"),
        ("gpt-oss", "dp2", "fp32", "full", "late"),  # sinks, biases, experts
        ("deepseek-v3", "dp2", "fp32", "none", "late"),
        ("qwen3-moe", "ep2+dp4", "fp32", "none", "late"),
        ("qwen3-moe", "ep2+dp4", "fp32", "none", "gloo's"),
        ("qwen3-moe", "ep2+dp4", "fp32", "none", "in the step"),
    ),
)
def test_steps_are_those_of_weights_gathered_by_megatron(pool, tiny_hf, family, layout, precision, recompute, how):
    """Also where weights come at the last moment (late), and are not numbers until somebody waits for them; and where
    one gather of all follows the optimizer's step."""
    world = Layout.parse(layout).world_size
    folder = tiny_hf(family, num_hidden_layers=4) if "vpp" in layout else tiny_hf(family)
    off, on = configs(folder, layout, precision, recompute)
    wanted = pool.run(world, partial(gathering.steps, megatron=True), off, SAMPLES)
    config, late = off if how == "in the step" else on, how == "late"
    found = pool.run(world, partial(gathering.steps, late=late), config, SAMPLES)
    for (numbers, weights, buckets, gathers), (other_numbers, others, *_) in zip(found, wanted, strict=True):
        assert numbers == other_numbers
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            assert np.array_equal(weight, others[name]), name
        assert gathers == 3 * buckets  # once a step, and experts are no reason for a second time
    assert "vpp" in layout or found[0][2] > 4, "one bucket would hide who does not wait"


def test_experts_at_once_wait_for_their_weights(pool, tiny_hf):
    """They read the matrices of all experts without calling them."""
    off, on = configs(tiny_hf("qwen3-moe", moe_intermediate_size=32), "dp2", "bf16")
    run = partial(gathering.steps, at_once=True)
    wanted, found = (pool.run(2, partial(run, megatron=c is off), c, SAMPLES) for c in (off, on))
    for (numbers, *_), (others, *_) in zip(found, wanted, strict=True):
        assert numbers == others


@pytest.mark.parametrize("reader", gathering.READERS)
def test_who_reads_after_a_step_reads_whole_weights(pool, tiny_hf, tmp_path, reader):
    off, on = configs(tiny_hf("qwen3"), "dp2")
    wanted, found = (
        pool.run(2, gathering.read, config, SAMPLES, reader, str(tmp_path / name), name == "megatron")
        for config, name in ((off, "megatron"), (on, "put off"))
    )
    for arrays, others in zip(found, wanted, strict=True):
        assert len(arrays) == len(others) > 0
        for array, other in zip(arrays, others):
            assert np.isfinite(array).all() and np.array_equal(array, other)
