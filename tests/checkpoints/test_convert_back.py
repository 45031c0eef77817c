"""`tools.convert mcore-to-hf` and `--verify`: what is right is certified, and every planted fault is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import planted_faults
from checkpoints.verification import train_and_save
from safetensors.torch import load_file, save_file
from support.models import plain_megatron
from support.models.families import FAMILIES, VOCAB, write_folder
from support.models.transformers_parity import make_samples
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import manifest
from isoloss.tools.convert import __main__ as convert
from isoloss.tools.convert.verify_logits import CEILING

LLAMA, MOE = "llama", "qwen3-moe"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """pairs(architecture) -> (Hugging Face folder, checkpoint of it), neither to be written to."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(architecture: str) -> tuple[Path, Path]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("pair")
            hf = write_folder(architecture, folder / "hf", num_hidden_layers=4, max_shard_size="100KB")
            assert convert.main(["hf-to-mcore", "--hf", str(hf), "--out", str(folder / "mcore")]) == 0
            made[architecture] = hf, folder / "mcore"
        return made[architecture]

    return of


def mcore_to_hf(checkpoint: Path, out: Path, *options: str) -> int:
    return convert.main(["mcore-to-hf", "--checkpoint", str(checkpoint), "--out", str(out), *options])


def told(capsys) -> str:
    """The one line on standard error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("isoloss: ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_conversion_is_not_a_certificate(pairs, tmp_path):
    """Only --verify makes it one."""
    assert mcore_to_hf(pairs("qwen3")[1], tmp_path / "back") == 0
    record = json.loads((tmp_path / "back" / "conversion.json").read_text())
    assert record["verified"] is False and "logits_compared" not in record


@pytest.mark.parametrize("architecture", FAMILIES)
def test_both_ways_are_certified(architecture, tmp_path):
    hf = write_folder(architecture, tmp_path / "hf", num_hidden_layers=4, dtype=torch.bfloat16, gain=1.0)
    assert convert.main(["hf-to-mcore", "--hf", str(hf), "--out", str(tmp_path / "mcore"), "--verify"]) == 0
    assert mcore_to_hf(tmp_path / "mcore", tmp_path / "back", "--verify") == 0
    for folder, direction in (("mcore", "hf-to-mcore"), ("back", "mcore-to-hf")):
        certificate = json.loads((tmp_path / folder / "conversion.json").read_text())
        logits = certificate["logits_compared"]
        assert certificate["verified"] and certificate["direction"] == direction
        assert logits["max_difference"] <= min(logits["tolerance"], 1e-4 * logits["spread"])
        # The tolerance is four times the noise of transformers. Its delta rule, in chunks of another size, solves other
        # systems of keys: 1.0e-4 of the spread apart on one CPU and 1.1e-4 on another.
        most = CEILING if any(read_architecture(hf).linear) else 1e-4
        assert logits["tolerance"] <= most * logits["spread"]
        assert logits["experts"] == logits["experts_visited"]
        for name, record in certificate["files"].items():
            assert (tmp_path / folder / name).stat().st_size == record["bytes"]


def test_another_type(pairs, tmp_path, capsys):
    """fp32 -> bf16 on the way in, -> fp32 on the way out; a run without --verify may be verified later."""
    logging.enable_progress_bar()  # whatever ran before in this process
    hf, _ = pairs(MOE)
    into = ["hf-to-mcore", "--hf", str(hf), "--out", str(tmp_path / "mcore"), "--dtype", "bf16"]
    assert convert.main(into) == 0 and convert.main([*into, "--verify"]) == 0
    assert mcore_to_hf(tmp_path / "mcore", tmp_path / "back", "--dtype", "fp32", "--verify") == 0
    assert mcore_to_hf(tmp_path / "mcore", tmp_path / "same", "--verify") == 0
    for folder, dtype in (("back", torch.float32), ("same", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert model.dtype == dtype
        wanted = AutoModelForCausalLM.from_pretrained(hf).state_dict()
        assert all(torch.equal(t.float(), wanted[k].bfloat16().float()) for k, t in model.state_dict().items())
    assert "Loading weights" not in capsys.readouterr().err


@pytest.mark.parametrize("architecture", [LLAMA, MOE])
def test_a_checkpoint_trained_at_tp2_pp2(architecture, pairs, tmp_path, pool):
    hf, _ = pairs(architecture)
    samples = make_samples((30, 17, 33, 64, 9, 12), VOCAB)
    trained = pool.run(4, train_and_save, hf, tmp_path / "step", samples, {"tp": 2, "pp": 2})[0].float()
    assert mcore_to_hf(tmp_path / "step", tmp_path / "out", "--verify") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", attn_implementation="eager")
    assert model.dtype == torch.float32
    with torch.no_grad():
        wanted = [model(input_ids=sample.tokens_T[None]).logits[0, :-1] for sample in samples]
    masks = [sample.mask_T[1:] for sample in samples]
    wanted = torch.cat([logits[mask] for logits, mask in zip(wanted, masks)])
    found = trained[torch.cat([sample.mask_T for sample in samples])]
    assert (found - wanted).abs().max() <= 2e-5 * wanted.std()
    before = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    assert not torch.equal(model.state_dict()["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize("architecture", [LLAMA, "deepseek-v3"])
def test_plain_megatron_core(architecture, pairs, tmp_path, pool, capsys):
    hf, _ = pairs(architecture)
    options = {"tp": 2, "pp": 2, "etp": 2, "style": "singleton"}
    pool.run(4, plain_megatron.save_as, hf, tmp_path / "mcore", options)
    assert mcore_to_hf(tmp_path / "mcore", tmp_path / "out", "--verify") == 2
    assert "is a checkpoint without huggingface/config.json" in told(capsys)
    assert mcore_to_hf(tmp_path / "mcore", tmp_path / "out", "--hf", str(hf), "--verify") == 0
    for name in hf.glob("*.safetensors"):
        assert (tmp_path / "out" / name.name).read_bytes() == name.read_bytes()


# Which model; what the comparison of tensors says, by the right map; what is said where it has the wrong one, too.
FAULTS = {
    "plain_qkv": (LLAMA, "linear_qkv.weight (", "logits: isoloss and transformers differ"),
    "gate_for_up": (LLAMA, "linear_fc1.weight (", "logits: isoloss and transformers differ"),
    "experts_exchanged": (MOE, "local_experts.0.linear_fc1.weight (", "logits: isoloss and transformers differ"),
    "expert_misnamed": (MOE, "lack model.layers.2.mlp.experts.1.gate_proj", "transformers finds"),
    "padding_leaked": (LLAMA, "embed_tokens.weight has shape [308, 56]", "transformers finds"),
    "tensor_missing": (LLAMA, "lack model.layers.1.mlp.down_proj.weight", None),
    "wrong_shape": (LLAMA, "o_proj.weight has shape [64, 56]", "has shape [64, 56]"),
}


@pytest.fixture
def plain(pairs, tmp_path, pool) -> Callable[[str], tuple[Path, Path]]:
    """A checkpoint that remembers nothing of the files that it was made from."""

    def of(architecture: str) -> tuple[Path, Path]:
        hf, checkpoint = pairs(architecture)
        shutil.copytree(checkpoint, tmp_path / "plain")
        (tmp_path / "plain" / "isoloss.json").unlink()
        (tmp_path / "plain" / "huggingface" / "shards.json").unlink()
        return hf, tmp_path / "plain"

    return of


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_conversion_is_found(fault, plain, tmp_path, capsys):
    architecture, says, _ = FAULTS[fault]
    _, checkpoint = plain(architecture)
    with getattr(planted_faults, fault)():
        assert mcore_to_hf(checkpoint, tmp_path / "out") == 0
    assert mcore_to_hf(checkpoint, tmp_path / "out", "--verify") == 1
    assert not json.loads((tmp_path / "out" / "conversion.json").read_text())["verified"]
    assert says in told(capsys)


@pytest.mark.parametrize("fault", [fault for fault, (_, _, says) in FAULTS.items() if says])
def test_a_fault_of_the_map_is_found(fault, plain, tmp_path, capsys):
    architecture, _, says = FAULTS[fault]
    _, checkpoint = plain(architecture)
    with getattr(planted_faults, fault)():
        assert mcore_to_hf(checkpoint, tmp_path / "out", "--verify") == 1
    assert says in told(capsys)


@pytest.mark.parametrize("fault", ["expert_misnamed", "tensor_missing"])
def test_the_plan_knows_the_names_that_were_published(fault, pairs, tmp_path, capsys):
    _, checkpoint = pairs(MOE if fault == "expert_misnamed" else LLAMA)
    with getattr(planted_faults, fault)():
        assert mcore_to_hf(checkpoint, tmp_path / "out") == 2
    assert "down_proj" in told(capsys)


@pytest.mark.parametrize("way", ["hf-to-mcore", "mcore-to-hf"])
@pytest.mark.parametrize("architecture", [LLAMA, "deepseek-v3", "gpt-oss"])
def test_ignored_rope_scaling_is_found(architecture, way, pairs, tmp_path, capsys):
    hf, checkpoint = pairs(architecture)
    source = ["--hf", str(hf)] if way == "hf-to-mcore" else ["--checkpoint", str(checkpoint)]
    with planted_faults.rope_scaling_ignored():
        assert convert.main([way, *source, "--out", str(tmp_path / "out"), "--verify"]) == 1
    assert "logits: isoloss and transformers differ" in told(capsys)


@pytest.mark.parametrize("fault", ["plain_qkv", "gate_for_up"])
def test_a_wrong_checkpoint_is_found(fault, pairs, tmp_path, capsys):
    hf, _ = pairs(LLAMA)
    into = ["hf-to-mcore", "--hf", str(hf), "--out", str(tmp_path / "out"), "--verify"]
    with getattr(planted_faults, fault)():
        assert convert.main(into) == 1
    assert FAULTS[fault][2] in told(capsys)


def damage(file: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


NORM = "model.norm.weight"
DAMAGE = {
    "a bit": lambda tensors: tensors[NORM].view(torch.uint8)[3].bitwise_xor_(1),
    "missing": lambda tensors: tensors.pop(NORM),
    "extra": lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}),
    "shape": lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}),
    "type": lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()}),
}


DAMAGE_SAYS = {"extra": "model.extra.weight", "type": "another header than was planned"}


@pytest.mark.parametrize("change", DAMAGE)
@pytest.mark.parametrize("checksum", ["kept", "forged"])
def test_damage_after_the_conversion_is_found(change, checksum, pairs, tmp_path, capsys):
    """By the checksums; and by the tensors themselves, should the checksums have been made of the damage."""
    _, checkpoint = pairs(LLAMA)
    assert mcore_to_hf(checkpoint, tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    name = index["weight_map"][NORM]
    damage(tmp_path / "out" / name, DAMAGE[change])
    if checksum == "forged":
        found = tmp_path / "out" / name
        record["files"][name] = {"bytes": found.stat().st_size, "crc32": manifest.crc32(found)}
        (tmp_path / "out" / "conversion.json").write_text(json.dumps(record))
    assert mcore_to_hf(checkpoint, tmp_path / "out", "--verify") == 1
    assert {"kept": name, "forged": DAMAGE_SAYS.get(change, "norm")}[checksum] in told(capsys)


def test_an_expert_that_no_token_reaches_is_not_vouched_for(tmp_path, capsys):
    hf = write_folder("glm-4.5", tmp_path / "hf", num_hidden_layers=4, n_group=1, topk_group=1)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    damage(hf / "model.safetensors", lambda tensors: tensors[bias][5].fill_(-100.0))
    assert convert.main(["hf-to-mcore", "--hf", str(hf), "--out", str(tmp_path / "mcore"), "--verify"]) == 1
    assert "expert 5 of layer 2 (and 0 more of all 24) saw none of" in told(capsys)


def test_mistakes(pairs, tmp_path, capsys):
    hf, checkpoint = pairs(LLAMA)

    def mistaken(says: str, folder: Path = checkpoint, *options: str, out: Path = tmp_path / "out") -> None:
        assert mcore_to_hf(folder, out, *options) == 2
        assert says in told(capsys)
        assert out == tmp_path or not out.exists()

    mistaken("is not a folder", tmp_path / "nowhere")
    mistaken("hf download Qwen/Qwen3-8B --local-dir Qwen3-8B", Path("Qwen/Qwen3-8B"))
    mistaken("is a Hugging Face folder already: hf-to-mcore makes checkpoints of it", hf)
    mistaken("has no .metadata; give a checkpoint, or the folder of a run", tmp_path)
    mistaken("is no Hugging Face folder, but the checkpoint", checkpoint, "--hf", str(checkpoint))
    mistaken("exists already", out=tmp_path)
    mistaken("has no config.json", checkpoint, "--hf", str(tmp_path))
    other, _ = pairs(MOE)
    mistaken("do not belong together", checkpoint, "--hf", str(other))
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    data = broken / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-7])
    mistaken("__0_0.distcp", broken)
    data.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    mistaken("__0_0.distcp is damaged: its crc32", broken)


def test_a_dry_run_writes_nothing(pairs, tmp_path, capsys):
    _, checkpoint = pairs(LLAMA)
    assert mcore_to_hf(checkpoint, tmp_path / "out", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "384 rows of vocabulary trimmed to 307" in printed and "model-00001-of-" in printed
    assert not list(tmp_path.iterdir())
