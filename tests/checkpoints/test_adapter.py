"""Checkpoints of adapters: small, for any layout, and of one model, rank and set of targets."""

import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from numerics.test_transformers_parity import SCALED_COSINES, transformers_logprobs, transformers_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from support.models import lora as world
from support.models.families import MODELS, SPARSE, VOCAB, write_folder
from support.models.lora import LORA
from support.models.transformers_parity import make_samples

from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.peft_folder import config_of
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


FAMILIES = [name for name in MODELS if name not in SCALED_COSINES]
# Plain; names of dense MLPs, which PEFT takes for experts'; experts that PEFT joins.
QUICK = ("qwen3", "deepseek-v3-plain", "qwen3.5-moe")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_peft_loads_what_is_exported(name, pool, one_rank, monkeypatch, tmp_path):
    """Without a key too many, from ranks that hold parts; log-probabilities are the engine's."""
    folder, out = write_folder(name, tmp_path / "model"), tmp_path / "adapter"
    layout = {"ep": 2} if name in SPARSE else {"tp": 2, "pp": 2}
    (loss, *_) = pool.run(2 if name in SPARSE else 4, world.exported, folder, out, SAMPLES, layout)
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    model = transformers_model(folder, "fp64", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(model, str(out), autocast_adapter_dtype=False)
    loaded = set_peft_model_state_dict(adapted, load_peft_weights(str(out), device="cpu"))
    assert loaded.unexpected_keys == [] and not [key for key in loaded.missing_keys if "lora" in key]
    targets = sum(int(sample.mask_T.sum()) for sample in SAMPLES)
    with torch.no_grad():
        found = -sum(float(transformers_logprobs(adapted, sample).sum()) for sample in SAMPLES) / targets
    assert found == pytest.approx(loss, rel=1e-12)


def test_gpt_oss_in_peft(pool, one_rank, monkeypatch, tmp_path):
    """A tensor of all experts, as [in, out]. transformers rounds its rotations to fp32."""
    folder, out = write_folder("gpt-oss", tmp_path / "model"), tmp_path / "adapter"
    (loss, *_) = pool.run(2, world.exported, folder, out, SAMPLES, {"ep": 2})
    model = transformers_model(folder, "fp64", monkeypatch)
    adapted = peft.PeftModel.from_pretrained(model, str(out), autocast_adapter_dtype=False)
    loaded = set_peft_model_state_dict(adapted, load_peft_weights(str(out), device="cpu"))
    assert loaded.unexpected_keys == []
    targets = sum(int(sample.mask_T.sum()) for sample in SAMPLES)
    with torch.no_grad():
        found = -sum(float(transformers_logprobs(adapted, sample).sum()) for sample in SAMPLES) / targets
    assert found == pytest.approx(loss, rel=1e-7)


@pytest.mark.parametrize(
    ("lora", "wanted"),
    [
        (LoraConfig(rank=4, alpha=8.0, scaling="sqrt-rank"), {"r": 4, "lora_alpha": 16.0, "rank_pattern": {}}),
        (
            LoraConfig(rank=4, alpha=8.0, expert_rank=2),
            # PEFT joins gate and up of an expert.
            {
                "rank_pattern": {r".*\.experts\.gate_up_proj": 4, r".*\.experts\..*": 2},
                "alpha_pattern": {r".*\.experts\.gate_up_proj": 16.0, r".*\.experts\..*": 8.0},
            },
        ),
    ],
)
def test_scales_and_ranks_of_an_export(lora, wanted, tmp_path):
    """The scale is alpha / r also for rsLoRA, since SGLang reads nothing else."""
    arch = read_architecture(str(write_folder("qwen3-moe", tmp_path)))
    config = config_of(arch, lora, "BASE")
    assert {key: config[key] for key in wanted} == wanted and config["use_rslora"] is False


def test_an_export_overwrites_nothing(model, one_rank, tmp_path):
    """And takes nothing from one that was killed on more ranks."""
    engine = world.make_engine(model)
    save_file({"0": torch.zeros(3, 48)}, tmp_path / ".rank00007.safetensors")
    engine.export_adapter(tmp_path)
    assert all(tensor.any() for tensor in load_file(tmp_path / "adapter_model.safetensors").values())
    assert not (tmp_path / ".rank00007.safetensors").exists()
    with pytest.raises(UserError, match=r"holds an adapter already"):
        engine.export_adapter(tmp_path)
    with pytest.raises(UserError, match=r"lora.rank=0: the model has no adapter to export"):
        world.make_engine(model, LoraConfig()).export_adapter(tmp_path / "other")


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
        (LoraConfig(), r"holds an adapter, and lora.rank=0 trains a whole model: set lora.rank=3"),
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


def test_experts_without_their_neighbours_are_other_targets(one_rank, tmp_path):
    """Experts that a router chooses, shared experts and dense MLPs all have a gate_proj."""
    folder = write_folder("deepseek-v3", tmp_path / "model")
    world.make_engine(folder, replace(LORA, targets=("mlp",)), **PLAIN).save(tmp_path / "step_00000001")
    engine = world.make_engine(folder, replace(LORA, targets=("experts",)), **PLAIN)
    with pytest.raises(UserError, match=r"lora.targets=\['down_proj', .*, and here lora.targets means \['experts.down"):
        engine.load(tmp_path / "step_00000001")


@pytest.mark.parametrize("options", [PLAIN, FP32], ids=str)
def test_experts_alone_go_on_from_it(options, one_rank, tmp_path):
    """The optimizer of all other factors has none."""
    folder, out = write_folder("qwen3-moe", tmp_path / "model"), tmp_path / "step_00000002"
    options = {"lora": replace(LORA, targets=("experts",)), **options}
    wanted = world.saved(folder, out, SAMPLES, options)
    assert wanted[2] < wanted[0] and world.resumed(folder, out, SAMPLES, options) == wanted


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
    with pytest.raises(UserError, match=r"holds a whole model, and lora.rank=3 trains an adapter: set lora.rank=0"):
        engine.load(tmp_path / "step_00000001")
