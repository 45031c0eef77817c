"""The layer of experts: what it keeps, what it sends, and that its fast path is its slow one."""

import numpy as np
import pytest
from numerics import retained
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples
from support.ranks import grouped
from support.ranks.recompute import fp64_config
from support.runs import training

from isoloss.engine.config.schema import MemoryConfig
from isoloss.tools.prove.parity import freeze

SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), VOCAB))
RECOMPUTE = {
    "none": MemoryConfig(),
    "moe": MemoryConfig("selective", ("moe",)),
    "experts": MemoryConfig("selective", ("experts",)),
    "full": MemoryConfig("full"),
}
# Sizes of which 8 numbers, 16 bytes in bf16, are a part, also where two ranks share them.
ALIGNED = {"hidden_size": 48, "moe_intermediate_size": 32}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_nothing_of_a_step_stays_in_its_layers(pool, tiny_hf, recompute):
    """Weights of experts would bring along the graph that they came from."""
    given, alive = pool.run(
        1, retained.router_outputs, fp64_config(tiny_hf("qwen3-moe"), RECOMPUTE[recompute]), SAMPLES
    )[0]
    assert given > 0 and alive == 0


# Layouts, with the ranks that each takes.
LAYOUTS = {
    "1": (1, {}),
    "ep2+dp2": (2, {"ep": 2}),
    "tp2+etp2": (2, {"tp": 2, "etp": 2}),
    "ulysses2+ep2": (2, {"ulysses": 2, "ep": 2}),
    "tp2+ep2+etp2+dp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp2+tp2+ep2": (4, {"pp": 2, "tp": 2, "ep": 2}),
}
ROWS = [(layout, "none") for layout in LAYOUTS] + [
    (layout, recompute) for layout in ("1", "tp2+ep2+etp2+dp2") for recompute in RECOMPUTE if recompute != "none"
]


def assert_same(found, wanted):
    for (norm, gradients, *_), (wanted_norm, wanted_gradients) in zip(found, wanted, strict=True):
        assert norm == pytest.approx(wanted_norm, rel=1e-12)
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            error = np.linalg.norm(gradient - wanted_gradients[name])
            assert error <= 1e-12 * np.linalg.norm(wanted_gradients[name]), name


@pytest.mark.parametrize(("layout", "recompute"), ROWS, ids=["-".join(row) for row in ROWS])
def test_a_gpus_way_is_the_cpus(pool, tiny_hf, layout, recompute):
    """Rows gathered by index, experts at once, gradients added to Megatron's: Megatron's dispatcher and its loop. And
    it waits once a layer and micro-batch where other ranks have experts, also where the layer runs twice."""
    world, parallel = LAYOUTS[layout]
    case = fp64_config(tiny_hf("qwen3-moe", **ALIGNED), RECOMPUTE[recompute], **parallel)
    wanted = pool.run(world, training.gradients, case, SAMPLES, [range(6)])
    found = pool.run(world, grouped.gradients, case, SAMPLES, [range(6)])
    assert_same(found, wanted)
    for *_, counts in found:
        twice = 2 if recompute in ("moe", "full") else 1
        layers = counts["layers"] // twice
        assert layers > 0 and counts["products"] > 0
        assert counts["waits"] == (0 if layout == "1" else layers)
        assert counts["dispatches"] == twice * layers


@pytest.mark.parametrize("name", ("deepseek-v3-plain", "gemma-4-moe"))
def test_shared_experts_are_added(pool, tiny_hf, name):
    """And a scaled router's weights count; and experts with GELU next to a dense MLP."""
    case = fp64_config(tiny_hf(name, **ALIGNED), tp=2, ep=2)
    wanted = pool.run(2, training.gradients, case, SAMPLES, [range(6)])
    assert_same(pool.run(2, grouped.gradients, case, SAMPLES, [range(6)]), wanted)


@pytest.mark.parametrize("family", ("gpt-oss", "qwen3-moe"))
def test_what_the_product_cannot_do_goes_one_by_one(pool, tiny_hf, family):
    """Biases, another activation; and rows that are no multiple of 16 bytes."""
    case = fp64_config(tiny_hf(family, **({} if family == "gpt-oss" else ALIGNED | {"moe_intermediate_size": 20})))
    ((_, _, counts),) = pool.run(1, grouped.gradients, case, SAMPLES, [range(6)])
    assert not counts
