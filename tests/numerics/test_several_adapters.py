"""Several adapters of one model: each computes, to the last bit, what it computes alone."""

import pytest
import torch
from support.models import lora as world
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples

SAMPLES = make_samples((2, 40, 17, 29, 33, 9, 21), VOCAB, seed=4)
FP32 = {"precision": "fp32", "distributed_optimizer": True}
FP64 = {"distributed_optimizer": False}
LAYOUTS = {
    "1": (1, {**FP64}),
    "tp2": (2, {"tp": 2, **FP32}),
    "pp2": (2, {"pp": 2, **FP64}),
    "dp2": (2, {**FP32}),
    "tp2+pp2+vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2, **FP64}),
}
LAST = len(world.TENANTS) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def equal(got: world.Tenant, wanted: world.Tenant) -> bool:
    same = got.factors.keys() == wanted.factors.keys() and got.numbers == wanted.numbers
    return same and all(torch.equal(tensor, wanted.factors[name]) for name, tensor in got.factors.items())


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in ("1", "pp2") else pytest.mark.full) for name in LAYOUTS]
)
def test_each_among_five_is_what_it_is_alone(layout, folder, pool, tmp_path):
    """Of other ranks, scales, targets and samples; in turns, in one schedule, next to one whose loss is infinite."""
    world_size, options = LAYOUTS[layout]
    options = {"max_tokens": 64, **options}
    found = pool.run(world_size, world.among_others, folder, SAMPLES, tmp_path / "step_00000000", options)
    for index in (0, 1, 2, 3):
        wanted = pool.run(world_size, world.alone, folder, SAMPLES, index, options)
        for rank, of_rank in enumerate(wanted):
            assert of_rank.numbers[0] != of_rank.numbers[2] and equal(found[rank][index], of_rank), (rank, index)
    for of_rank in found:  # its steps are taken back by what it loads
        assert of_rank[LAST].numbers[0] == of_rank[LAST].numbers[4]
    assert not torch.equal(*(next(iter(found[0][index].factors.values())) for index in (0, 3)))


@pytest.mark.parametrize("layout", ("pp2", pytest.param("1", marks=pytest.mark.full)))
def test_a_layer_that_is_computed_again_has_its_own_adapter(layout, folder, pool):
    """In one schedule the backward of an adapter follows the forward of another."""
    world_size, options = LAYOUTS[layout]
    for alone, together in pool.run(world_size, world.with_a_tenant_that_recomputes, folder, SAMPLES, options):
        assert alone and alone.keys() == together.keys()
        for name, gradient in alone.items():
            assert torch.equal(gradient, together[name]), name


def test_each_is_balanced_by_its_own_work(folder, one_rank):
    """As alone: the balance decides which rank sums what."""
    first = world.make_engine(folder, world.TENANTS[0])
    second, alone = first.adapter(world.TENANTS[4]), world.make_engine(folder, world.TENANTS[4])
    assert second.cost_model == alone.cost_model != first.cost_model


def test_mistakes_are_refused(folder, one_rank):
    said = world.refused(folder)
    assert said.keys() == {"of a whole model", "without a rank", "unknown target", "of two models", "twice"}
    assert all("lora.rank above 0" in said[name] for name in ("of a whole model", "without a rank"))
    assert "'w9'" in said["unknown target"] and "one model" in said["of two models"] and "each once" in said["twice"]


def test_each_generates_by_its_own_weights(folder, one_rank):
    tokens = world.generated(folder)
    assert tokens["first"] == tokens["first, after a step of the second"] != tokens["second"]
