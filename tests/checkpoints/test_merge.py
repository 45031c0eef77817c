"""`tools.convert merge`: the sum of a model and its adapter is what PEFT makes of the two, in every family."""

import json
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
from numerics.test_transformers_parity import transformers_logprobs, transformers_model
from safetensors.torch import load_file, save_file
from support.models.families import FAMILIES, VOCAB, published, tensors_of, write_folder
from support.models.transformers_parity import make_samples
from transformers import AutoModelForCausalLM

from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.weight import Weight
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


def loss_of(model: torch.nn.Module) -> float:
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
    with_adapter = with_peft(transformers_model(hf, "fp64", monkeypatch), adapter)
    wanted = loss_of(with_adapter)
    ours = transformers_model(out, "fp64", monkeypatch)
    assert loss_of(ours) == pytest.approx(wanted, rel=1e-14)
    assert abs(loss_of(transformers_model(hf, "fp64", monkeypatch)) - wanted) > 1e-3
    theirs = with_adapter.merge_and_unload().state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.state_dict().items())
    assert (out / "config.json").read_text() == (hf / "config.json").read_text()
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / "conversion.json").read_text())["verified"] is True
