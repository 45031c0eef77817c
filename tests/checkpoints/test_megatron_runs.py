"""Folders of Megatron-LM and Megatron-Bridge: what plain Megatron-Core trained and saved is what comes out."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import megatron_runs
from checkpoints.megatron_runs import TRACKER, Held
from safetensors.torch import load_file
from support.models.families import VOCAB
from torch import Tensor
from transformers import AutoModelForCausalLM

from isoloss.models.weights import megatron_args
from isoloss.tools.convert import __main__ as convert

STACKED, PER_LAYER = {"non_homogeneous_layers": False}, {"non_homogeneous_layers": True}
ROWS = {
    "Megatron-LM": ("qwen3", {"metadata": STACKED, "vocab_multiple": 37}),
    "Megatron-LM, layers apart": ("qwen3", {"metadata": PER_LAYER, "optimizer": "dp_reshardable"}),
    "Megatron-Bridge": ("qwen3", {"metadata": STACKED, "bridge": True}),
    "saved inside of a wrapper": ("qwen3", {"metadata": PER_LAYER, "bridge": True, "prefix": "module.model."}),
    "experts": ("qwen3-moe", {"metadata": STACKED, "bridge": True}),
}


@pytest.fixture(scope="session")
def saved(tiny_hf, tmp_path_factory, pool) -> Callable[[str], tuple[Path, Path, Held]]:
    """saved(row) -> (Hugging Face folder, run that trained from it, what it held), not to be written to."""
    made: dict[str, tuple[Path, Path, Held]] = {}

    def of(row: str) -> tuple[Path, Path, Held]:
        if row not in made:
            family, options = ROWS[row]
            hf, folder = tiny_hf(family), tmp_path_factory.mktemp("run") / "ckpt"
            made[row] = (hf, folder, *pool.run(1, megatron_runs.train_and_save, hf, folder, 100, options))
        return made[row]

    return of


@pytest.fixture
def bridge(saved, tmp_path) -> tuple[Path, Path, Held]:
    """The same of Megatron-Bridge, which may be written to."""
    hf, folder, held = saved("Megatron-Bridge")
    return hf, shutil.copytree(folder, tmp_path / "ckpt"), held


def mcore_to_hf(checkpoint: Path, out: Path, *options: object) -> int:
    return convert.main(["mcore-to-hf", "--checkpoint", str(checkpoint), "--out", str(out), *map(str, options)])


def told(capsys) -> str:
    """The one line on standard error."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("isoloss: ")]
    return line


def assert_same_logits(found: Tensor, held: Tensor) -> None:
    assert (found - held).abs().max() <= 2e-5 * held.std()


@pytest.mark.parametrize("row", ROWS)
def test_what_was_trained_comes_out(row, saved, tmp_path, capsys):
    """transformers gives the logits of plain Megatron-Core, and tensors that are one in both are equal."""
    hf, folder, held = saved(row)
    assert mcore_to_hf(folder, tmp_path / "out", "--hf", hf) == 0
    assert capsys.readouterr().out.startswith(f"{folder}/iter_0000100: {ROWS[row][0].replace('-', '_')}, ")
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source"] == f"{folder}/iter_0000100"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        assert_same_logits(model(input_ids=held.tokens).logits, held.logits)
    before, exported = (load_file(each / "model.safetensors") for each in (hf, tmp_path / "out"))
    assert exported.keys() == before.keys()
    assert not any(torch.equal(exported[name], before[name]) for name in before)
    for ours, theirs in (
        ("model.layers.1.self_attn.o_proj.weight", "decoder.layers.1.self_attention.linear_proj.weight"),
        ("model.layers.0.input_layernorm.weight", "decoder.layers.0.input_layernorm.weight"),
        ("model.norm.weight", "decoder.final_layernorm.weight"),
    ):
        assert torch.equal(exported[ours], held.parameters[theirs])
    assert torch.equal(
        exported["model.embed_tokens.weight"], held.parameters["embedding.word_embeddings.weight"][:VOCAB]
    )


@pytest.mark.parametrize("beside", ["", "iter_0000100"])
def test_model_path(beside, bridge, pool):
    """config.json stands in the checkpoint, or beside all of a run; isoloss then gives Megatron-Core's logits."""
    hf, folder, held = bridge
    (folder / beside / "huggingface").mkdir()
    shutil.copy(hf / "config.json", folder / beside / "huggingface")
    (found,) = pool.run(1, megatron_runs.logits, folder, held.tokens)
    assert_same_logits(found, held.logits[0, :-1])


def test_an_older_iteration_by_its_own_path(bridge, tmp_path):
    hf, folder, held = bridge
    (folder / "iter_0000200").mkdir()
    (folder / TRACKER).write_text("200")
    assert mcore_to_hf(folder / "iter_0000100", tmp_path / "out", "--hf", hf) == 0
    norm = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm, held.parameters["decoder.final_layernorm.weight"])


def test_without_a_config_json_the_line_says_which_and_how(bridge, tmp_path, capsys):
    _, folder, _ = bridge
    assert mcore_to_hf(folder, tmp_path / "out") == 2
    line = told(capsys)
    assert f"{folder}/iter_0000100 is a checkpoint without huggingface/config.json" in line
    assert "(somebody/tiny), or give isoloss.tools.convert such a folder by --hf DIR" in line


def test_a_checkpoint_of_another_model_is_refused(bridge, tmp_path, capsys):
    """One that no tensor tells: with another base of the rotations."""
    hf, folder, _ = bridge
    path = folder / "iter_0000100" / "run_config.yaml"
    container = yaml.safe_load(path.read_text())
    container["model"]["rotary_base"] = 1000000
    path.write_text(yaml.safe_dump(container))
    assert mcore_to_hf(folder, tmp_path / "out", "--hf", hf) == 2
    assert f"{path}: model.rotary_base=1000000 where config.json (qwen3) calls for rope_theta=10000.0" in told(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 2e4}, "rotary_base=10000 where"),
        ("rms_norm_eps", 1e-6, "layernorm_epsilon=1e-05 where"),
    ],
)
def test_the_arguments_of_megatron_lm_tell_another_model(field, value, says, saved, tmp_path, capsys):
    hf, folder, _ = saved("Megatron-LM")
    config = json.loads((hf / "config.json").read_text())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, field: value}))
    assert mcore_to_hf(folder, tmp_path / "out", "--hf", tmp_path / "hf") == 2
    assert f"{folder}/iter_0000100/common.pt: {says} config.json (qwen3) calls for " in told(capsys)


class Bomb:
    def __reduce__(self):
        return print, ("this must not run",)


def test_nothing_in_the_arguments_runs(saved, tmp_path, capsys):
    """What cannot be read is not compared, for no weight stands there."""
    _, folder, _ = saved("Megatron-LM")
    assert megatron_args.read_model(folder / "iter_0000100")["hidden_size"] == 48
    torch.save({"args": argparse.Namespace(hidden_size=7, bomb=Bomb()), "more": Bomb()}, tmp_path / "common.pt")
    assert megatron_args.read_model(tmp_path)["hidden_size"] == 7
    for damaged in (b"", b"PK", (tmp_path / "common.pt").read_bytes()[:-40]):
        (tmp_path / "common.pt").write_bytes(damaged)
        assert megatron_args.read_model(tmp_path) == {}
    torch.save({"args": Bomb()}, tmp_path / "common.pt")
    assert megatron_args.read_model(tmp_path) == {}
    assert "must not run" not in capsys.readouterr().out


def test_a_tracker_that_names_none_is_refused(bridge, tmp_path, capsys):
    hf, folder, _ = bridge
    (folder / TRACKER).write_text("200")
    assert mcore_to_hf(folder, tmp_path / "out", "--hf", hf) == 2
    assert f"{folder / TRACKER} names iter_0000200, which is not there; give {folder}/iter_0000100" in told(capsys)
