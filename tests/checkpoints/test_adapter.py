"""Checkpoints of adapters: small, for any layout, and of one model, rank and set of targets."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.models import lora as world
from support.models.families import VOCAB, write_folder
from support.models.lora import LORA
from support.models.transformers_parity import make_samples

from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.weights import manifest
from isoloss.parallel import UserError

SAMPLES = make_samples((2, 40, 17, 29, 33, 9), VOCAB)
PLAIN = {"distributed_optimizer": False}
FP32 = {"precision": "fp32", "distributed_optimizer": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_folder("qwen3", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("family", "saving", "loading", "common", "tolerance"),
    [
        ("qwen3", {"tp": 2}, ({"pp": 2}, {}), PLAIN, 1e-13),  # gate and up, and heads, are cut anew
        ("qwen3.5-moe", {"tp": 2}, ({"ep": 2},), PLAIN, 1e-12),  # sections, and a tensor of all experts
        pytest.param("qwen3-moe", {"etp": 2}, ({"tp": 2}, {}), PLAIN, 1e-12, marks=pytest.mark.full),
        pytest.param("deepseek-v3", {"pp": 2}, ({"tp": 2},), PLAIN, 1e-12, marks=pytest.mark.full),
        ("qwen3", {"tp": 2}, ({},), FP32, 1e-5),
    ],
    ids=str,
)
def test_any_layout_goes_on_from_it(family, saving, loading, common, tolerance, pool, tmp_path):
    folder, out = write_folder(family, tmp_path / "model"), tmp_path / "step_00000002"
    wanted = pool.run(2, world.saved, folder, out, SAMPLES, common | saving)[0]
    assert wanted[2] < wanted[0]
    for layout in loading:
        for rank in pool.run(2, world.resumed, folder, out, SAMPLES, common | layout):
            assert rank == pytest.approx(wanted, rel=tolerance), layout


def test_it_holds_the_adapter_alone(model, one_rank, tmp_path):
    """At most 18 bytes a number, with index and metadata of 0.2 MB here, where the model alone would be more."""
    engine = world.make_engine(model, precision="fp32", **PLAIN)
    engine.save(tmp_path / "step_00000001")
    written = manifest.read(tmp_path / "step_00000001")
    tensors = sum(record.bytes for name, record in written.files.items() if name.endswith(".distcp"))
    numbers = world.by_hand(read_architecture(str(model)))
    assert written.kind == "adapter" and 12 * numbers < tensors < 18 * numbers + 200_000
    assert written.adapter is not None and written.adapter["rank"] == LORA.rank
    with pytest.raises(UserError, match=r"holds an adapter, not a model: give the folder of the model"):
        world.make_engine(tmp_path / "step_00000001", precision="fp32")


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (replace(LORA, rank=4), r"holds an adapter with lora.rank=3, and here lora.rank means 4"),
        (replace(LORA, targets=("attention",)), r"lora.targets=\['down_proj', .*\], and here lora.targets means"),
        (replace(LORA, alpha=1.0), r"lora.alpha=5.0, and here lora.alpha means 1.0"),
        (LoraConfig(), r"holds an adapter, and lora.rank says that a whole model is trained"),
    ],
    ids=str,
)
def test_another_adapter_is_refused(lora, says, model, one_rank, tmp_path):
    world.make_engine(model, precision="fp32", **PLAIN).save(tmp_path / "step_00000001")
    engine = world.make_engine(model, lora, precision="fp32", **PLAIN)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(UserError, match=says):
        engine.load(tmp_path / "step_00000001")
    assert all(tensor.equal(before[name]) for name, tensor in engine.weights())


def test_another_base_is_refused(model, one_rank, tmp_path):
    """A model of the same shapes with one other number."""
    world.make_engine(model, precision="fp32", **PLAIN).save(tmp_path / "step_00000001")
    other = write_folder("qwen3", tmp_path / "other")
    world.change_one_number(other)
    engine = world.make_engine(other, precision="fp32", **PLAIN)
    with pytest.raises(UserError, match=r"holds an adapter of other weights than those of model.path"):
        engine.load(tmp_path / "step_00000001")


def test_a_whole_model_is_no_adapter(model, one_rank, tmp_path):
    world.make_engine(model, LoraConfig(), precision="fp32", **PLAIN).save(tmp_path / "step_00000001")
    engine = world.make_engine(model, precision="fp32", **PLAIN)
    with pytest.raises(UserError, match=r"holds a whole model, and lora.rank says that an adapter is trained"):
        engine.load(tmp_path / "step_00000001")
