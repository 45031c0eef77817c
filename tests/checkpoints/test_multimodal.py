"""A text model inside of a multimodal one: trained alone, and put back where it came from."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models.families import VOCAB, write_folder
from support.models.multimodal import export, train, write_gemma_4, write_mistral3, write_multimodal
from support.models.transformers_parity import make_engine, make_samples
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from isoloss.engine.rl.backends.local import transformers_backend
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.weight import Part
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.parallel import UserError
from isoloss.tools.convert import __main__ as convert

# A text model's name, how its folder is written, and the class of the text model.
WRITERS = {
    "qwen3.5": (write_multimodal, "Qwen3_5ForCausalLM"),
    "gemma-4": (write_gemma_4, "Gemma4ForCausalLM"),
    "gemma-4-moe": (partial(write_gemma_4, text="gemma-4-moe"), "Gemma4ForCausalLM"),
    "mistral": (partial(write_mistral3, text="mistral"), "MistralForCausalLM"),
    "mistral by common names": (partial(write_mistral3, text="mistral", common=True), "MistralForCausalLM"),
    "ministral-3": (partial(write_mistral3, text="ministral-3"), "Ministral3ForCausalLM"),
    "ministral-3, tied": (partial(write_mistral3, text="ministral-3", tied=True), "Ministral3ForCausalLM"),
}
EACH = pytest.mark.parametrize(("write", "text_class"), WRITERS.values(), ids=WRITERS.keys())


def converted(hf: Path, checkpoint: Path) -> Path:
    assert convert.main(["hf-to-mcore", "--hf", str(hf), "--out", str(checkpoint), "--verify"]) == 0
    return checkpoint


def exported(checkpoint: Path, out: Path, *options: str) -> Path:
    assert convert.main(["mcore-to-hf", "--checkpoint", str(checkpoint), "--out", str(out), "--verify", *options]) == 0
    return out


@EACH
def test_its_logits_are_those_of_the_multimodal_model(tmp_path, one_rank, write, text_class):
    hf = write(tmp_path / "hf")
    samples = make_samples((30, 3, 1, 70, 5), VOCAB)
    found = make_engine(hf, "fp32").logits(samples)
    whole = AutoModelForImageTextToText.from_pretrained(hf, attn_implementation="eager").eval()
    for logits, sample in zip(found, samples, strict=True):
        if not sample.mask_T.any():
            continue
        with torch.no_grad():
            wanted = whole(input_ids=sample.tokens_T[None]).logits[0, :-1][sample.mask_T[1:]]
        assert (logits[sample.mask_T] - wanted).norm() < 4e-6 * wanted.norm()


@pytest.mark.parametrize("precise", (False, True), ids=("as config.json says", "some in fp32"))
def test_it_comes_back_byte_for_byte_with_all_beside_it(tmp_path, precise):
    hf = write_multimodal(tmp_path / "hf", dtype=torch.bfloat16 if precise else torch.float32, precise=precise)
    checkpoint = converted(hf, tmp_path / "checkpoint")
    out = exported(checkpoint, tmp_path / "out", "--hf", str(hf), "--keep-unused")
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (hf / file).read_bytes(), file


@EACH
def test_every_kind_comes_back_byte_for_byte(tmp_path, write, text_class):
    hf = write(tmp_path / "hf")
    out = exported(converted(hf, tmp_path / "checkpoint"), tmp_path / "out", "--hf", str(hf), "--keep-unused")
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (hf / file).read_bytes(), file


def test_a_trained_one_keeps_its_tower_and_types(tmp_path, pool):
    hf = write_multimodal(tmp_path / "hf", dtype=torch.bfloat16, precise=True)
    pool.run(1, train, hf, tmp_path / "checkpoint")
    out = exported(tmp_path / "checkpoint", tmp_path / "out", "--hf", str(hf), "--keep-unused")
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, out))
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    for name in before:
        beside = name.startswith(("model.visual.", "mtp."))
        assert torch.equal(before[name], after[name]) == beside, name


@EACH
def test_without_what_is_beside_it_a_text_model_is_written(tmp_path, pool, write, text_class):
    hf = write(tmp_path / "hf")
    out = exported(converted(hf, tmp_path / "checkpoint"), tmp_path / "out")
    pool.run(1, export, hf, tmp_path / "trained")
    for folder in (out, tmp_path / "trained"):
        fields = json.loads((folder / "config.json").read_text())
        assert fields["architectures"] == [text_class] and not fields.get("mtp_num_hidden_layers")
        arch = read_architecture(folder)
        assert arch.tensor_prefix == "model." and not arch.head_prefix
        text, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        tokens = torch.arange(20)[None]
        with torch.no_grad():
            wanted = AutoModelForImageTextToText.from_pretrained(hf)(input_ids=tokens).logits
            torch.testing.assert_close(text(input_ids=tokens).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", ("published", "converted"))
def test_what_a_run_exports_is_of_the_published_types(tmp_path, pool, start):
    """Tensors that the hub's files hold in fp32 beside bf16 are exact in both."""
    hf = write_multimodal(tmp_path / "hf", dtype=torch.bfloat16, precise=True)
    pool.run(1, export, hf if start == "published" else converted(hf, tmp_path / "checkpoint"), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "out"))
    text = {n.replace("model.language_model.", "model."): t for n, t in before.items() if "language" in n}
    assert len({tensor.dtype for tensor in text.values()}) == 2 and after.keys() >= text.keys()
    for name, tensor in after.items():
        wanted = text.get(name, before.get(name))
        assert wanted is not None and tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name


@EACH
def test_it_generates_as_the_multimodal_model(tmp_path, write, text_class):
    """In process, with weights by the names in its files."""
    hf = write(tmp_path / "hf")
    arch, reader = read_architecture(hf), HFReader(hf)
    text = transformers_backend.build(hf, arch, torch.float32, torch.device("cpu"))
    slots = transformers_backend.slots(text, arch)
    assert slots.keys() == hf_shapes(weight_map(arch)).keys()
    for name, slot in slots.items():
        slot.copy_(reader.get(Part(name, reader.shape(name))))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted = AutoModelForImageTextToText.from_pretrained(hf)(input_ids=tokens).logits
        assert torch.equal(text(input_ids=tokens).logits, wanted)


def test_what_is_kept_has_to_be_somewhere(tmp_path):
    hf = write_multimodal(tmp_path / "hf")
    with pytest.raises(UserError, match="--hf"):
        plan_export(converted(hf, tmp_path / "checkpoint"), keep_unused=True)


def test_layers_for_multi_token_prediction_are_kept(tmp_path):
    """Of any family: a layer behind the last one."""
    hf = write_folder("glm-4.5", tmp_path / "hf", num_hidden_layers=3)
    path = hf / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    out = exported(converted(hf, tmp_path / "checkpoint"), tmp_path / "out", "--hf", str(hf), "--keep-unused")
    assert (out / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
