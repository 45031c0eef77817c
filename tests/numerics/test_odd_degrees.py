"""The promise where nothing is a power of two: degrees of 3, worlds of 3 and 6, heads and layers that 3 divides."""

import dataclasses
import json

import pytest
from support import invariance as world
from support.invariance import QWEN3, VOCAB, loss_of
from support.transformers_parity import make_samples

from isoloss.engine.config import BatchConfig, Config, ModelConfig, OptimConfig, TrainConfig
from isoloss.parallel import Layout
from isoloss.tools.parity import TOLERANCE, Case, compare, freeze, measure, merge, reference_file
from isoloss.tools.plants import NONE
from isoloss.tools.prove import on_layout

# 12 query heads for 3 key/value heads; 6 layers; 3 divides the width of the MLP.
MODEL = QWEN3 | {"num_hidden_layers": 6, "hidden_size": 36, "num_attention_heads": 12, "num_key_value_heads": 3}
LENGTHS = (40, 17, 1, 29, 3, 61, 2, 9, 13, 5)  # 180 tokens; some are shorter than a context of 6
# About two sequences a micro-batch, and all in one, which dp cuts.
CASES = [Case(66, loss_of("token-mean")), Case(0, loss_of("seq-mean-token-mean"))]
LAYOUTS = (
    "tp3",
    "tp3+nosp",
    "dp3",
    "ring3",
    "ulysses3",
    "pp3",
    "ulysses3+ring2",
    "tp3+pp2",
    "ring3+dp2",
    "pp3+vpp2+dp2",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return Config(
        ModelConfig(path=str(folder), from_scratch=True),
        optim=OptimConfig(lr=1e-3, clip=0.1),
        train=TrainConfig(precision="fp64", seed=3),
    )


@pytest.fixture(scope="module")
def frozen() -> bytes:
    return freeze(make_samples(LENGTHS, VOCAB))


@pytest.fixture(scope="module")
def references(pool, config, frozen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    files = [reference_file(folder, index) for index, _ in enumerate(CASES)]
    whole = [dataclasses.replace(case, max_tokens=0) for case in CASES]
    run = pool.run(1, measure, on_layout(config, Layout(), "fp64"), frozen, whole, files, NONE, True)
    return files, merge(run)


@pytest.mark.parametrize("text", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_rank(pool, config, frozen, references, text):
    layout = Layout.parse(text)
    files, wanted = references
    run = pool.run(layout.world_size, measure, on_layout(config, layout, "fp64"), frozen, CASES, files)
    for found, reference in zip(merge(run), wanted, strict=True):
        against = compare(found, reference, TOLERANCE["fp64"])
        assert against.passed and found.canary is None, against.reason
        assert found.parameters.keys() == reference.parameters.keys()


@pytest.mark.parametrize("text", ("tp3", "dp3", "ring3"))
def test_steps_are_those_of_one_rank(pool, config, frozen, text):
    """With the distributed optimizer, which deals its state to three ranks, and with every step clipped."""

    def steps(layout: Layout) -> list[float]:
        of_layout = dataclasses.replace(on_layout(config, layout, "fp32"), batch=BatchConfig(max_tokens=66))
        parallel = dataclasses.replace(of_layout.parallel, distributed_optimizer=True)
        return pool.run(layout.world_size, world.losses, dataclasses.replace(of_layout, parallel=parallel), frozen, 5)[
            0
        ]

    one, many = steps(Layout()), steps(Layout.parse(text))
    assert many == pytest.approx(one, rel=2e-6)
    assert one[-1] < one[0]
