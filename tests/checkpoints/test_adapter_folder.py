"""Adapters between PEFT's folders, engines and checkpoints: nothing changes on the way."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from numerics.test_transformers_parity import transformers_logprobs, transformers_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from support.models import lora as world
from support.models.families import VOCAB, write_folder
from support.models.lora import LORA
from support.models.transformers_parity import make_samples

from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.initial import InitialFactors
from isoloss.models.lora.peft_folder import write_adapter
from isoloss.parallel import UserError
from isoloss.tools.convert import __main__ as convert

SAMPLES = make_samples((2, 40, 17, 29), VOCAB)
PLAIN: dict[str, Any] = {"distributed_optimizer": False}


@pytest.mark.parametrize(
    ("family", "from_layout", "to_layouts"),
    [
        ("qwen3", {"tp": 2}, ({"pp": 2}, {})),
        ("qwen3.5-moe", {"ep": 2}, ({"tp": 2},)),
        pytest.param("gpt-oss", {"tp": 2}, ({"ep": 2},), marks=pytest.mark.full),
        pytest.param("deepseek-v3", {"pp": 2}, ({"tp": 2},), marks=pytest.mark.full),
    ],
)
def test_an_export_starts_another_engine(family, from_layout, to_layouts, pool, tmp_path):
    """On other layouts, with the same factors bit for bit."""
    folder, out = write_folder(family, tmp_path / "model"), tmp_path / "adapter"
    loss = pool.run(2, world.exported, folder, out, SAMPLES, PLAIN | from_layout)[0]
    wanted = world.all_factors(read_architecture(folder))
    lora = replace(LORA, seed=None, init=str(out))
    for layout in to_layouts:
        ranks = pool.run(2, world.started, folder, lora, SAMPLES, PLAIN | layout)
        assert {name for _, factors in ranks for name in factors} == wanted.keys()
        for found, factors in ranks:
            assert found == pytest.approx(loss, rel=1e-12)
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in factors.items())


BY_PEFT = {
    "qwen3": {"target_modules": "all-linear", "use_rslora": True},
    "qwen3-moe": {
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "mixtral": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "gemma-4-moe": {
        "target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {".*gate_up_proj": 4, "down_proj": 4},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("qwen3", "qwen3-moe") else pytest.mark.full) for n in BY_PEFT]
)
def test_what_peft_wrote_starts_an_engine(name, one_rank, monkeypatch, tmp_path, capsys):
    """With PEFT's loss, and with the keys that import-adapter prints."""
    folder, out, imported = write_folder(name, tmp_path / "model"), tmp_path / "theirs", tmp_path / "ours"
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **BY_PEFT[name])
    model = transformers_model(folder, "fp64", monkeypatch)
    adapted: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    adapted.save_pretrained(str(out))
    targets = sum(int(sample.mask_T.sum()) for sample in SAMPLES)
    with torch.no_grad():
        wanted = -sum(float(transformers_logprobs(adapted, sample).sum()) for sample in SAMPLES) / targets
    command = ["import-adapter", "--adapter", str(out), "--hf", str(folder), "--out", str(imported)]
    assert convert.main(command) == 0
    keys = dict(
        word.removeprefix("lora.").split("=") for word in capsys.readouterr().out.split("train it on with: ")[1].split()
    )
    lora = LoraConfig(
        init=str(out), rank=int(keys["rank"]), alpha=float(keys["alpha"]), scaling=keys.get("scaling", "rank"),
        targets=tuple(keys.get("targets", "[all]")[1:-1].split(",")),
        expert_rank=int(keys["expert_rank"]) if "expert_rank" in keys else None,
    )  # fmt: skip
    assert keys["init"] == str(imported)
    loss, factors = world.started(folder, lora, SAMPLES, PLAIN)
    assert loss == pytest.approx(wanted, rel=1e-12)
    again, of_imported = world.started(folder, replace(lora, init=str(imported)), SAMPLES, PLAIN)
    assert again == loss and all(torch.equal(tensor, factors[name]) for name, tensor in of_imported.items())


@pytest.mark.parametrize(("family", "layout"), [("qwen3", {"tp": 2}), ("qwen3.5-moe", {"ep": 2})], ids=str)
def test_the_export_of_a_checkpoint_is_the_engines(family, layout, pool, tmp_path, capsys):
    """Without ranks, whatever layout wrote it."""
    folder, run = write_folder(family, tmp_path / "model"), tmp_path / "run"
    checkpoint, out = run / "checkpoints" / "step_00000003", tmp_path / "exported"
    lora = replace(LORA, targets=("mlp",))
    pool.run(2, world.saved_and_exported, folder, checkpoint, tmp_path / "engine", lora, PLAIN | layout)
    assert convert.main(["export-adapter", "--checkpoint", str(run), "--hf", str(folder), "--out", str(out)]) == 0
    assert f"{checkpoint}: " in capsys.readouterr().out
    ours, engines = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path / "engine"))
    assert ours.keys() == engines.keys() and all(torch.equal(tensor, engines[name]) for name, tensor in ours.items())
    ours, engines = (json.loads((path / "adapter_config.json").read_text()) for path in (out, tmp_path / "engine"))
    assert ours == engines


def test_what_export_adapter_refuses(one_rank, tmp_path, capsys):
    folder = write_folder("qwen3.5-moe", tmp_path / "model")
    world.make_engine(folder, precision="fp32", **PLAIN).save(tmp_path / "step_00000001")
    world.make_engine(folder, LoraConfig(), precision="fp32", **PLAIN).save(tmp_path / "whole")

    def export(checkpoint: Path, *more: str) -> str:
        assert (
            convert.main(["export-adapter", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "o"), *more]) == 2
        )
        return capsys.readouterr().err

    # The files of the model have experts one by one, which its config.json does not say.
    assert "name the folder of the model that it was trained on by --hf" in export(tmp_path / "step_00000001")
    other = write_folder("qwen3", tmp_path / "other")
    assert "holds an adapter that does not fit the model of" in export(tmp_path / "step_00000001", "--hf", str(other))
    assert "holds a whole model and no adapter: mcore-to-hf converts it" in export(tmp_path / "whole")
    assert "is not a folder" in export(tmp_path / "nowhere")
    path = next((tmp_path / "step_00000001").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert "damaged" in export(tmp_path / "step_00000001", "--hf", str(folder))
    assert not list(tmp_path.glob("*o"))


@pytest.mark.parametrize("family", ("qwen3-moe", "qwen3.5-moe"))
def test_peft_takes_the_rank_of_experts(family, monkeypatch, tmp_path):
    """Of experts that PEFT joins, gate and up have twice the rank together."""
    folder, out = write_folder(family, tmp_path / "model"), tmp_path / "adapter"
    lora = replace(LORA, expert_rank=2)
    write_adapter(out, read_architecture(folder), lora, InitialFactors(1, random_b=True), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers_model(folder, "fp64", monkeypatch)
        adapted = peft.PeftModel.from_pretrained(model, str(out), autocast_adapter_dtype=False)
    loaded = set_peft_model_state_dict(adapted, load_peft_weights(str(out), device="cpu"))
    assert loaded.unexpected_keys == [] and not [key for key in loaded.missing_keys if "lora" in key]
    command = ["merge", "--hf", str(folder), "--adapter", str(out), "--out", str(tmp_path / "merged"), "--verify"]
    assert convert.main(command) == 0
    ours, theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), adapted.merge_and_unload()
    for (name, tensor), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (tensor - wanted).abs().max() < 1e-6, name


def test_an_engine_refuses_another_adapter(tmp_path):
    """Before any process group."""
    folder, out = write_folder("qwen3", tmp_path / "model"), tmp_path / "adapter"
    write_adapter(out, read_architecture(folder), LORA, InitialFactors(1), None)
    with pytest.raises(UserError, match=r"lora.rank=4, and the adapter of lora.init=.* set lora.rank=3"):
        world.make_engine(folder, replace(LORA, rank=4, seed=None, init=str(out)))


def test_a_bad_factor_of_one_stage_ends_every_rank(pool, one_rank, tmp_path):
    """None waits for the one that has read it."""
    folder, adapter = write_folder("qwen3", tmp_path / "model"), tmp_path / "adapter"
    world.make_engine(folder).export_adapter(adapter)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[max(tensors)][0, 0] = math.nan  # of the last layer
    save_file(tensors, path, metadata={"format": "pt"})
    first, second = pool.run(2, world.refused_start, folder, adapter, {"pp": 2})
    assert first == second and "adapter_model.safetensors" in first
