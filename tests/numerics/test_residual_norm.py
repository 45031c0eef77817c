"""A layer that adds and norms at once gives the gradients of one that does so in two steps, whatever is recomputed."""

import numpy as np
import pytest
from numerics import residual_norms
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples
from support.runs import training

from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, ParallelConfig, TrainConfig
from isoloss.models.mcore.kernels import Kernels
from isoloss.tools.prove.parity import freeze

SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), VOCAB))  # two micro-batches
# Family, memory, degrees, and how often each rank adds and norms at once: two layers, whole ones run twice.
ROWS = {
    "qwen3": ("qwen3", MemoryConfig(), {}, 4),
    "qwen3-full": ("qwen3", MemoryConfig("full"), {}, 8),
    "qwen3-layernorm": ("qwen3", MemoryConfig("selective", ("layernorm",)), {}, 0),
    "qwen3-mlp": ("qwen3", MemoryConfig("selective", ("core_attn", "mlp")), {}, 4),
    "gpt-oss": ("gpt-oss", MemoryConfig(), {}, 4),  # attention's output has a bias
    "deepseek-v3": ("deepseek-v3", MemoryConfig("selective", ("mla_up_proj", "moe")), {}, None),
    "tp2": ("qwen3", MemoryConfig(), {"tp": 2}, 4),
    "pp2": ("qwen3-moe", MemoryConfig("full"), {"pp": 2}, 4),
}


def config(folder, memory, parallel, **kernels):
    return Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=128),
        parallel=ParallelConfig(**parallel),
        memory=memory,
        kernels=Kernels(**kernels),
        train=TrainConfig(precision="fp64"),
    )


@pytest.mark.parametrize("name", ROWS)
def test_no_gradient_changes(pool, tiny_hf, name):
    family, memory, parallel, expected = ROWS[name]
    world = 2 if parallel else 1
    case = config(tiny_hf(family), memory, parallel)
    wanted = pool.run(world, training.gradients, case, SAMPLES, [range(6)])
    found = pool.run(world, residual_norms.gradients, case, SAMPLES, [range(6)])
    for (norm, gradients, at_once), (wanted_norm, wanted_gradients) in zip(found, wanted, strict=True):
        assert at_once == expected if expected is not None else at_once > 0
        assert norm == pytest.approx(wanted_norm, rel=1e-12)
        assert gradients.keys() == wanted_gradients.keys()
        for key, gradient in gradients.items():
            error = np.linalg.norm(gradient - wanted_gradients[key])
            assert wanted_gradients[key].any(), f"{key}: nothing is compared"
            assert error <= 1e-12 * np.linalg.norm(wanted_gradients[key]), key


def test_a_key_turns_it_off(pool, tiny_hf):
    case = config(tiny_hf("qwen3"), MemoryConfig(), {}, residual_norm=False)
    ((_, _, at_once),) = pool.run(1, residual_norms.gradients, case, SAMPLES, [range(6)])
    assert at_once == 0
