"""`tools.convert merge`: the sum of a model and its adapter is what PEFT makes of the two, in every family."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from numerics.test_transformers_parity import transformers_logprobs, transformers_model
from safetensors.torch import load_file, save_file
from support.models import lora as lora_world
from support.models.families import FAMILIES, VOCAB, tensors_of, write_folder
from support.models.transformers_fp64 import scale_embedding
from support.models.transformers_parity import make_samples
from transformers import AutoModelForCausalLM

from isoloss.models.conversion.tensors import Update
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.lora import merge as merging
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.initial import InitialFactors
from isoloss.models.lora.peft_folder import write_adapter
from isoloss.tools.convert import __main__ as convert

SAMPLES = make_samples((2, 40, 17), VOCAB)
LORA = LoraConfig(rank=4, alpha=2.0)
# Plain; experts one by one, with names of dense MLPs that PEFT takes for theirs; a delta rule, and experts that PEFT
# joins; a tensor of all experts, as [in, out].
QUICK = ("qwen3", "deepseek-v3", "qwen3.5-moe", "gpt-oss")


class ShortNumbers:
    """Random factors of few binary digits, so that a sum with their products is exact in fp32."""

    def whole(self, weight: Weight) -> torch.Tensor:
        return (InitialFactors(3, random_b=True).whole(weight) * 32).round() / 32


def short_model(name: str, folder: Path) -> Path:
    write_folder(name, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = {key: (tensor * 1024).round() / 1024 for key, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def merge(hf: Path, adapter: Path, out: Path, *more: str) -> int:
    return convert.main(["merge", "--hf", str(hf), "--adapter", str(adapter), "--out", str(out), *more])


def with_peft(model: torch.nn.Module, adapter: Path) -> peft.PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return -sum(float(transformers_logprobs(model, sample).sum()) for sample in SAMPLES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_a_merged_model_is_pefts(name, monkeypatch, tmp_path, capsys):
    """Bit for bit where the sum is exact; and the loss is that of the adapter on the base."""
    hf, adapter, out = short_model(name, tmp_path / "hf"), tmp_path / "adapter", tmp_path / "out"
    (hf / "tokenizer.json").write_text("{}")
    write_adapter(adapter, read_architecture(hf), LORA, ShortNumbers(), None)
    assert merge(hf, adapter, out, "--verify") == 0
    assert "verified: " in capsys.readouterr().out
    base = transformers_model(hf, "fp64", monkeypatch)
    without = loss_of(base)
    with_adapter = with_peft(base, adapter)
    wanted = loss_of(with_adapter)
    ours = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", experts_implementation="eager")
    ours = ours.double().eval()
    scale_embedding(ours)
    assert loss_of(ours) == pytest.approx(wanted, rel=1e-14) and abs(without - wanted) > 1e-3
    theirs = with_adapter.merge_and_unload().state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.state_dict().items())
    assert (out / "config.json").read_text() == (hf / "config.json").read_text()
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / "conversion.json").read_text())["verified"] is True


@pytest.mark.parametrize("name", ("qwen3", "qwen3-moe", "gpt-oss"))
def test_a_sum_is_rounded_once(name, tmp_path):
    """From fp64 to the type of each tensor, here bf16: the numbers are those of a sum by hand."""
    hf, adapter = write_folder(name, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "adapter"
    lora, arch = LoraConfig(rank=3, alpha=0.1, seed=1), read_architecture(hf)
    write_adapter(adapter, arch, lora, InitialFactors(1, random_b=True), None)
    assert merge(hf, adapter, tmp_path / "out", "--verify") == 0
    shutil.copytree(hf, tmp_path / "by-hand")
    factors = lora_world.all_factors(arch, lora)
    lora_world.merge_into(tmp_path / "by-hand", factors, lora.scale(3), turned=name == "gpt-oss")
    base, by_hand, found = (tensors_of(tmp_path / folder) for folder in ("hf", "by-hand", "out"))
    assert found.keys() == by_hand.keys()
    modules = {name.split(".lora_")[0] for name in factors}
    for key, tensor in found.items():
        assert torch.equal(tensor, by_hand[key].bfloat16()), key
        assert torch.equal(tensor, base[key]) is (key.removesuffix(".weight") not in modules)


@pytest.mark.parametrize(("numbers", "unchanged", "lost"), [(2.0**-10, 1.0, 1.0), (2.0**-6, 0.0, 0.0)])
def test_what_rounding_takes_is_told(numbers, unchanged, lost, tmp_path, capsys):
    """The next number after 1 in bf16 is 1 + 1/128: an update of 1/1024 is lost, and one of 1/64 is kept."""
    hf, adapter, out = write_folder("qwen3", tmp_path / "hf"), tmp_path / "adapter", tmp_path / "out"
    (path,) = hf.glob("*.safetensors")
    save_file({k: torch.ones_like(v, dtype=torch.bfloat16) for k, v in load_file(path).items()}, path, {"format": "pt"})

    class Constant:
        def whole(self, weight: Weight) -> torch.Tensor:
            return torch.full(weight.shape, 1.0 if weight.name.endswith("A") else numbers)

    write_adapter(adapter, read_architecture(hf), LoraConfig(rank=1, alpha=1.0), Constant(), None)
    assert merge(hf, adapter, out, "--verify") == 0
    said = capsys.readouterr()
    assert f"rounding left {unchanged:.1%} of " in said.out and f", and {lost:.2g} of the update is lost" in said.out
    assert ("100% of the adapter's update is lost in the rounding" in said.err) is (lost > 0)
    evidence = json.loads((out / "conversion.json").read_text())["merged"]
    assert (evidence["lost"], evidence["unchanged"] / evidence["numbers"]) == (lost, unchanged)


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A model in two files, and an adapter of it."""
    hf, adapter = write_folder("qwen3", tmp_path / "hf", max_shard_size="150KB"), tmp_path / "adapter"
    write_adapter(adapter, read_architecture(hf), LORA, ShortNumbers(), "elsewhere/another-name")
    return hf, adapter


def change_config(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_model_of_several_files(pair, tmp_path, capsys):
    """Names of files, headers and index stay; a dry run writes nothing; harmless differences print one line."""
    hf, adapter = pair
    change_config(adapter, lora_dropout=0.1)
    save_file({"other": torch.ones(1)}, hf / "consolidated.safetensors")  # beside the model's, as some are published
    out = tmp_path / "out"
    assert merge(hf, adapter, out, "--dry-run") == 0 and not out.exists()
    assert merge(hf, adapter, out) == 0
    said = capsys.readouterr().out
    assert "14 matrices of rank 4, in 14 tensors" in said
    assert said.count("the adapter names its model elsewhere/another-name") == 2  # once a command
    assert said.count("lora_dropout=0.1 was for its training") == 2
    names = {path.name for path in hf.iterdir()} - {"consolidated.safetensors"}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert {path.name for path in out.iterdir()} == names | {"conversion.json"}
    assert merge(hf, adapter, out) == 2 and "exists already" in capsys.readouterr().err
    assert merge(hf, adapter, out, "--verify") == 0


def test_one_file_with_an_index(pair, tmp_path):
    hf, adapter = pair
    shutil.rmtree(hf)
    write_folder("qwen3", hf)
    names = tensors_of(hf).keys()
    (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert merge(hf, adapter, tmp_path / "out", "--verify") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


@pytest.mark.parametrize("factor", (2.0, -1.0))
def test_a_wrong_sum_is_not_verified(factor, pair, monkeypatch, tmp_path, capsys):
    def wrong(left, right, scale):
        return Update(left, right, scale * factor)

    monkeypatch.setattr(merging, "Update", wrong)
    assert merge(*pair, tmp_path / "out", "--verify") == 1
    assert "numbers are not base plus adapter" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["verified"] is False


def test_a_changed_file_is_not_verified(pair, tmp_path, capsys):
    assert merge(*pair, tmp_path / "out") == 0
    (tmp_path / "out" / "config.json").write_text("{}")
    assert merge(*pair, tmp_path / "out", "--verify") == 1
    assert "config.json holds other bytes than were written" in capsys.readouterr().err


def test_an_adapter_of_another_model(pair, tmp_path, capsys):
    hf, adapter = pair
    other = write_folder("qwen3", tmp_path / "other", intermediate_size=96)
    assert merge(other, adapter, tmp_path / "out") == 2
    assert "call for [4, 96] and [48, 4]: the adapter is of another model" in capsys.readouterr().err
    assert merge(hf, hf, tmp_path / "out") == 2
    assert "is a whole model; give the folder with adapter_config.json" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


def test_ranks_and_alphas_of_patterns(pair, tmp_path, monkeypatch):
    """PEFT's own folder, with a rank and an alpha for some modules, and without adapters in one layer."""
    hf, _ = pair
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64)
    config = peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=["q_proj", "o_proj", "down_proj"], layers_to_transform=[1],
        rank_pattern={"o_proj": 2}, alpha_pattern={"self_attn.o_proj": 8}, init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "theirs")
    assert merge(hf, tmp_path / "theirs", tmp_path / "out", "--verify") == 0
    wanted, found = model.merge_and_unload().state_dict(), tensors_of(tmp_path / "out")
    base = tensors_of(hf)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    assert changed == {
        f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    assert all((tensor - wanted[name]).abs().max() < 1e-6 for name, tensor in found.items())


def test_a_square_matrix_of_transposed_experts(tmp_path):
    """Of gpt-oss, where down_proj has as many inputs as outputs: its shape does not say which is which."""
    hf, adapter = write_folder("gpt-oss", tmp_path / "hf", intermediate_size=48), tmp_path / "adapter"
    lora, arch = LoraConfig(rank=3, alpha=3.0, seed=1, targets=("down_proj",)), read_architecture(hf)
    write_adapter(adapter, arch, lora, InitialFactors(1, random_b=True), None)
    assert merge(hf, adapter, tmp_path / "out", "--verify") == 0
    name, factors = "model.layers.1.mlp.experts.down_proj", lora_world.all_factors(arch, lora)
    base, found = (tensors_of(tmp_path / folder)[name] for folder in ("hf", "out"))
    a, b = (factors[f"{name}.lora_{letter}.weight/2"] for letter in "AB")
    assert (found[2] - base[2].double() - (b @ a).T).abs().max() < 1e-6


def test_a_router_and_joined_experts_of_peft(tmp_path):
    """PEFT's own folder of `all-linear`: a router, and gate and up as one matrix of twice the rank, which the files of
    the model have apart."""
    hf = write_folder("qwen3-moe", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "theirs")
    assert merge(hf, tmp_path / "theirs", tmp_path / "out", "--verify") == 0
    ours, base = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "hf"))
    for name, wanted in model.merge_and_unload().state_dict().items():
        assert (ours[name] - wanted).abs().max() < 1e-6, name
        assert torch.equal(ours[name], base[name]) is (
            "norm" in name or name.endswith(("embed_tokens.weight", "lm_head.weight"))
        )
