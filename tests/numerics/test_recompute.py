"""Activations that the backward computes again are gone in between, and change no gradient: every family, every module.

The grid of test_invariance.py has the dense model on more layouts.
"""

import numpy as np
import pytest
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples
from support.ranks import recompute
from support.ranks.recompute import fp64_config
from support.runs import training

from isoloss.engine.config.schema import MemoryConfig
from isoloss.tools.prove.parity import freeze

SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), VOCAB))
FULL = MemoryConfig("full")
FOUR_RANKS = {
    "qwen2": {"pp": 2, "ulysses": 2},
    "gpt-oss": {"pp": 2, "ulysses": 2, "ep": 2},
    "ministral-3": {"pp": 2, "ulysses": 2},
    "minimax-m2": {"tp": 2, "pp": 2, "ep": 2},
}


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig("selective", modules)


@pytest.mark.parametrize(
    ("family", "memory"),
    (
        ("qwen2", FULL),  # its output matrix is its embedding
        ("gpt-oss", FULL),
        ("gpt-oss", selective("core_attn", "moe", "layernorm")),  # sinks, windows, biases
        ("qwen2", selective("mlp_act")),
        ("ministral-3", selective("core_attn")),  # queries that grow with their position
        ("minimax-m2", FULL),  # a norm whose squares TP ranks sum
        ("mimo-v2-flash", FULL),  # layers of two kinds
        ("mimo-v2-flash", selective("core_attn", "moe", "layernorm")),
        ("qwen3-moe", selective("moe")),
        ("qwen3-moe", selective("experts")),
        ("gpt-oss", selective("core_attn", "experts", "layernorm")),
        ("deepseek-v3", FULL),
        ("deepseek-v3", selective("core_attn")),
        ("deepseek-v3", selective("mla_up_proj")),
        ("deepseek-v3", selective("core_attn", "mla_up_proj", "mlp", "shared_experts", "layernorm")),
        ("deepseek-v3", selective("mla_up_proj", "mlp_act", "layernorm")),
        ("deepseek-v3-plain", selective("mla_up_proj", "moe", "shared_experts")),
    ),
    ids=lambda value: value if isinstance(value, str) else "+".join(value.recompute_modules) or value.recompute,
)
@pytest.mark.parametrize("world", (1, 4))
def test_no_gradient_changes(pool, tiny_hf, family, memory, world):
    """Alone; and on four ranks, where collectives of TP, experts, Ulysses and the pipeline are entered again."""
    parallel = FOUR_RANKS.get(family, {"tp": 2, "ulysses": 2, "ep": 2}) if world == 4 else {}
    calls = [range(6)]
    wanted = pool.run(
        world, training.gradients, fp64_config(tiny_hf(family), MemoryConfig(), **parallel), SAMPLES, calls
    )
    found = pool.run(world, training.gradients, fp64_config(tiny_hf(family), memory, **parallel), SAMPLES, calls)
    for (norm, gradients), (wanted_norm, wanted_gradients) in zip(found, wanted, strict=True):
        assert norm == pytest.approx(wanted_norm, rel=1e-12)
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            error = np.linalg.norm(gradient - wanted_gradients[name])
            assert wanted_gradients[name].any(), f"{name}: nothing is compared"
            assert error <= 1e-12 * np.linalg.norm(wanted_gradients[name]), name


@pytest.mark.parametrize(
    ("family", "module"),
    (
        ("qwen3", "core_attn"), ("qwen3", "mlp"), ("qwen3", "mlp_act"), ("qwen3", "layernorm"), ("qwen3-moe", "moe"),
        ("qwen3-moe", "experts"), ("deepseek-v3", "core_attn"), ("deepseek-v3", "mla_up_proj"),
        ("deepseek-v3-plain", "shared_experts"),
    ),
)  # fmt: skip
def test_every_module_saves_memory(pool, tiny_hf, family, module):
    plain, saving, full = (
        pool.run(1, recompute.kept, fp64_config(tiny_hf(family), memory), SAMPLES)[0]
        for memory in (MemoryConfig(), selective(module), FULL)
    )
    assert full.nbytes < saving.nbytes < plain.nbytes
    assert saving.forwards == plain.forwards


@pytest.mark.parametrize(
    ("family", "modules", "parallel"),
    (
        ("qwen3", ("core_attn", "layernorm"), {"tp": 2, "ulysses": 2}),
        ("qwen3", ("mlp",), {"pp": 2, "ring": 2}),
        ("qwen3", ("mlp_act",), {"tp": 2, "pp": 2}),
        ("gpt-oss", ("core_attn", "moe"), {"pp": 2, "ulysses": 2, "ep": 2}),
        ("deepseek-v3", ("mla_up_proj", "shared_experts"), {"tp": 2, "ep": 2}),
        ("qwen3-moe", ("experts",), {"tp": 2, "pp": 2, "ep": 2}),
    ),
    ids=("tp2+ulysses2", "pp2+ring2", "tp2+pp2", "pp2+ulysses2+ep2", "tp2+ep2", "tp2+pp2+ep2"),
)
def test_every_rank_saves_memory(pool, tiny_hf, family, modules, parallel):
    """On each rank, the last stage too, the modules keep less and whole layers least, and those run twice."""
    world = 2 ** len(parallel.keys() - {"ep"})
    plain, saving, full = (
        pool.run(world, recompute.kept, fp64_config(tiny_hf(family), memory, **parallel), SAMPLES)
        for memory in (MemoryConfig(), selective(*modules), FULL)
    )
    for rank, (of_plain, of_saving, of_full) in enumerate(zip(plain, saving, full, strict=True)):
        assert of_full.nbytes < of_saving.nbytes < of_plain.nbytes, rank
        assert of_saving.forwards == of_plain.forwards > 0
        assert of_full.forwards == 2 * of_plain.forwards


def test_whole_layers_run_twice(pool, tiny_hf):
    """The family has two layers, and the step two micro-batches."""
    plain, first, full = (
        pool.run(1, recompute.kept, fp64_config(tiny_hf("qwen3"), memory), SAMPLES)[0]
        for memory in (MemoryConfig(), MemoryConfig("full", recompute_layers=1), FULL)
    )
    assert (plain.forwards, first.forwards, full.forwards) == (4, 6, 8)
    assert full.nbytes < first.nbytes < plain.nbytes
