"""The plan from Hugging Face to Megatron-Core: every byte of every family where Megatron-Core looks for it."""

import io
import json
import math
import os
import pickle
import shutil
import sys
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.faults.faults import struck
from support.models.families import MODELS, SPARSE, VOCAB, write_folder
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.serialization import get_crc32_options

from isoloss.models.conversion import hf_to_mcore, tensors, transfer
from isoloss.models.conversion.distcp_write import envelope
from isoloss.models.conversion.hf_files import ShardLayout
from isoloss.models.conversion.hf_to_mcore import plan
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.conversion.plan import FilePlan
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.mappings import padded_vocab_size
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_names import Style, checkpoint_rows
from isoloss.models.weights.hf_checkpoint import INDEX, SINGLE, HFReader
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError


def read_back(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint whole, by PyTorch's own reader of the format, from one torch.load a chunk."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    found = {}
    for index, where in metadata.storage_data.items():
        with (checkpoint / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            blob = io.BytesIO(file.read(where.length))
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, BytesStorageMetadata):
            assert torch.load(blob) == [None]
            continue
        chunk = torch.load(blob, weights_only=True)
        assert chunk.dtype == entry.properties.dtype
        whole = found.setdefault(index.fqn, torch.full(entry.size, torch.nan, dtype=chunk.dtype))
        box = tuple(slice(start, start + size) for start, size in zip(index.offset, chunk.shape))
        assert whole[box].isnan().all(), f"{index} overlaps"
        whole[box] = chunk
    assert not [key for key, whole in found.items() if whole.isnan().any()]
    return found


def check_weights(checkpoint: Path, folder: Path, dtype: torch.dtype | None = None, style: Style | None = None) -> None:
    """Against the weights that the model loader makes of the folder."""
    arch, reader, found = read_architecture(folder), HFReader(folder), read_back(checkpoint)
    style = style or hf_to_mcore.native_style(arch)
    for weight in weight_map(arch):
        whole = reader.whole(weight)
        if dtype is not None and weight.trained:
            whole = whole.to(dtype)
        places = checkpoint_rows(weight, arch, style)
        stored = torch.cat([found[place.key][place.index] for place in places])
        if weight.shape[0] == VOCAB and weight.layer is None:
            assert stored.shape[0] == padded_vocab_size(VOCAB, 1) and not stored[VOCAB:].any()
            stored = stored[:VOCAB]
        assert stored.dtype == whole.dtype and torch.equal(stored, whole), weight.name


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_every_family(tmp_path, name, monkeypatch):
    folder, checkpoint = write_folder(name, tmp_path / "in"), tmp_path / "out"
    made = plan(folder, file_bytes=100_000)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 5000)
    transfer.run(made.transfer, checkpoint)
    assert len(list(checkpoint.glob("*.distcp"))) > 1
    check_weights(checkpoint, folder)
    written = manifest.read(checkpoint)
    manifest.check_checksums(checkpoint, written)
    on_disk = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert set(written.files) == on_disk - {manifest.NAME}
    assert (written.kind, written.vocab_size, written.key_style) == ("converted", VOCAB, made.style)
    assert written.num_tensors == made.num_tensors == len(read_back(checkpoint))
    assert made.num_source_tensors == len(HFReader(folder).names) and not made.left_out
    assert read_architecture(checkpoint) == read_architecture(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gpt-oss"])
def test_another_dtype(tmp_path, name, dtype):
    folder, checkpoint = write_folder(name, tmp_path / "in"), tmp_path / "out"
    made = plan(folder, dtype)
    transfer.run(made.transfer, checkpoint)
    check_weights(checkpoint, folder, getattr(torch, dtype))
    assert read_architecture(checkpoint).dtype == made.arch.dtype == dtype
    bias = name == "deepseek-v3"  # the experts' selection bias, which stays float32
    assert manifest.read(checkpoint).dtypes == tuple(sorted({dtype, *(["float32"] if bias else [])}))


def test_half_precision_selection_bias_becomes_float32(tmp_path):
    folder = write_folder("glm-4.5", tmp_path / "in")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE)
    transfer.run(plan(folder).transfer, tmp_path / "out")
    found = read_back(tmp_path / "out")
    bias = found["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"].float())
    assert found["decoder.final_layernorm.weight"].dtype == torch.bfloat16


def test_large_tensors_are_cut_into_rows(tmp_path, monkeypatch):
    folder = write_folder("mistral", tmp_path / "in")
    monkeypatch.setattr(hf_to_mcore, "CHUNK_BYTES", 5000)
    transfer.run(plan(folder).transfer, tmp_path / "out")
    check_weights(tmp_path / "out", folder)
    entries = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    embedding = entries["embedding.word_embeddings.weight"].chunks
    assert len(embedding) == 1 + math.ceil(VOCAB / (5000 // (48 * 4)))
    assert tuple(embedding[-1].sizes) == (padded_vocab_size(VOCAB, 1) - VOCAB, 48)  # the padding, never large
    fc1 = entries["decoder.layers.mlp.linear_fc1.weight"].chunks
    assert {math.prod(chunk.sizes) * 4 for chunk in (*embedding[:-2], *fc1)} <= {26 * 48 * 4, 80 % 26 * 48 * 4}


def test_gate_and_up_are_two_chunks_and_everything_else_is_one(tmp_path):
    folder = write_folder("qwen3", tmp_path / "in")
    transfer.run(plan(folder).transfer, tmp_path / "out")
    entries = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    fc1 = entries["decoder.layers.mlp.linear_fc1.weight"]
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in fc1.chunks]
    assert boxes == [((i, row, 0), (1, 80, 48)) for i in range(2) for row in (0, 80)]
    qkv = entries["decoder.layers.self_attention.linear_qkv.weight"]
    assert [tuple(chunk.sizes) for chunk in qkv.chunks] == [(1, 160, 48)] * 2


def test_an_envelope_is_what_torch_save_writes_around_the_bytes():
    torch.manual_seed(0)
    for tensor in (torch.randn(1, 3, 5), torch.randn(7).bfloat16(), torch.randn(64, 64).half()):
        before, after = envelope(tuple(tensor.shape), tensor.dtype)
        loaded = torch.load(io.BytesIO(before + tensor.view(torch.uint8).numpy().tobytes() + after), weights_only=True)
        assert torch.equal(loaded, tensor) and loaded.dtype == tensor.dtype
        assert loaded.untyped_storage().nbytes() == tensor.nbytes
        archive = zipfile.ZipFile(io.BytesIO(before + bytes(tensor.nbytes) + after))
        assert not any(info.CRC for info in archive.infolist())  # rather than that of the zeros
    assert get_crc32_options()  # of training checkpoints


def test_shards_and_sidecars_are_remembered(tmp_path):
    folder = tmp_path / "in"
    write_folder("qwen2", folder, max_shard_size="50KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("x")
    transfer.run(plan(folder).transfer, tmp_path / "out")
    check_weights(tmp_path / "out", folder)
    kept = tmp_path / "out" / "huggingface"
    published = json.loads((folder / INDEX).read_text())["weight_map"]
    layout = ShardLayout.read(tmp_path / "out")
    assert layout and layout.indexed and len(layout.files) > 2
    assert {name: file for file, shard in layout.files.items() for name in shard.tensors} == published
    for name in ("tokenizer.json", "additional_chat_templates/tool.jinja", "generation_config.json"):
        assert (kept / name).read_bytes() == (folder / name).read_bytes()


def test_what_is_left_out_is_listed(tmp_path):
    folder = write_folder("qwen2", tmp_path / "in")
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / SINGLE)
    made = plan(folder)
    assert made.left_out == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    transfer.run(made.transfer, tmp_path / "out")
    check_weights(tmp_path / "out", folder)
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, folder / SINGLE)
    with pytest.raises(UserError, match="tie_word_embeddings=True contradicts the weights"):
        plan(folder)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    folder = write_folder("glm-4.5", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(2)}, folder / SINGLE)
    made = plan(folder)
    assert made.left_out == ("model.layers.2.eh_proj.weight",)
    (kept,) = [file for file in made.transfer.files if file.name == "huggingface/config.json"]
    assert json.loads(kept.contents[0])["num_nextn_predict_layers"] == 0


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path) -> Path:
    return write_folder("llama", tmp_path / "in")


def refused(folder: Path, match: str, dtype: str | None = None) -> None:
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(UserError, match=match) as caught:
        made = plan(folder, dtype)
        transfer.run(made.transfer, folder.parent / "out")
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder.parent / ".out.partial", ignore_errors=True)
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_a_truncated_shard_is_named(llama, keep):
    data = (llama / SINGLE).read_bytes()
    (llama / SINGLE).write_bytes(data[:keep])
    refused(llama, r"model\.safetensors is not a safetensors file, or cut short \(.*\); copy or download it again")


def test_damaged_headers_are_named(llama):
    data = (llama / SINGLE).read_bytes()

    def damaged(changed: bytes) -> None:
        (llama / SINGLE).write_bytes(changed)
        refused(llama, r"model\.safetensors is not a safetensors file, or cut short")

    damaged(data + b"x")
    damaged(data[:9] + b"\xff" + data[10:])
    header = read_header_text(data)
    name = "model.norm.weight"
    start, stop = header[name]["data_offsets"]
    header[name]["data_offsets"] = [start + 4, stop + 4]
    damaged(with_header(data, header))
    header[name]["data_offsets"], header[name]["shape"] = [start, stop], [3]
    damaged(with_header(data, header))


@pytest.mark.parametrize("keep", [0, 4096 * 3 + 1])
def test_a_shard_that_is_cut_short_after_the_plan_is_named(llama, keep):
    """It is mapped by then: to look at what is gone would kill the process."""
    made = plan(llama)
    os.truncate(llama / SINGLE, keep)
    with pytest.raises(UserError, match=r"model\.safetensors changed while it was read"):
        transfer.run(made.transfer, llama.parent / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells")
def test_a_shard_that_is_cut_short_while_it_is_read_is_named(llama, monkeypatch):
    made, check = plan(llama), transfer._check_sources

    def then_cut(checked: FilePlan) -> None:
        check(checked)
        os.truncate(llama / SINGLE, 4096)

    monkeypatch.setattr(transfer, "_check_sources", then_cut)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: its disk fails, or it was cut short"):
        transfer.run(made.transfer, llama.parent / "out")
    assert sorted(os.listdir(llama.parent)) == ["in"]


def read_header_text(data: bytes) -> dict:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: dict) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def test_a_tensor_that_is_missing_left_over_or_of_another_shape_is_named(llama):
    tensors = load_file(llama / SINGLE)
    save_file({name: t for name, t in tensors.items() if name != "model.norm.weight"}, llama / SINGLE)
    refused(llama, "lack model.norm.weight")
    save_file({**tensors, "model.layers.7.mlp.up_proj.weight": torch.ones(2)}, llama / SINGLE)
    refused(llama, r"model.layers.7.mlp.up_proj.weight is a tensor that .* does not have")
    save_file({**tensors, "model.norm.weight": torch.ones(65)}, llama / SINGLE)
    refused(llama, r"model.norm.weight has shape \[65\]")


def test_types_that_do_not_fit_are_named(llama):
    tensors = load_file(llama / SINGLE)
    k = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, k: tensors[k].to(torch.float8_e4m3fn)}, llama / SINGLE)
    refused(
        llama, rf"{k} in .*model\.safetensors has the type F8_E4M3; only F32, BF16, F16 are read: the weights are q"
    )
    save_file({**tensors, k: tensors[k].bfloat16()}, llama / SINGLE)
    refused(llama, rf"{k} \(bfloat16\).* become one tensor and have different types; choose one for all with --dtype")
    norm = "model.layers.1.input_layernorm.weight"
    save_file({**tensors, norm: tensors[norm].bfloat16()}, llama / SINGLE)
    refused(llama, r"layer_norm_weight is float32 in one layer and bfloat16 in another; choose one with --dtype")
    transfer.run(plan(llama, "bfloat16").transfer, llama.parent / "cast")
    check_weights(llama.parent / "cast", llama, torch.bfloat16)
    save_file({**tensors, norm: tensors[norm] * 1e30}, llama / SINGLE)
    refused(llama, rf"{norm} in .*model\.safetensors holds numbers too large for float16", dtype="float16")


@pytest.mark.parametrize("name", ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"))
@pytest.mark.parametrize("value", (math.nan, -math.inf))
def test_weights_that_are_no_numbers_are_named(value, name, llama):
    """On the way there, and from a checkpoint that holds them already."""
    stored = load_file(llama / SINGLE)
    stored[name].view(-1)[-3] = value
    save_file(stored, llama / SINGLE)
    out = llama.parent / "checkpoint"
    with pytest.raises(
        UserError, match=rf"^{name} in .*model\.safetensors holds numbers that are infinite or NaN \(1 of "
    ):
        transfer.run(plan(llama).transfer, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "check_finite", lambda *_: None)
        transfer.run(plan(llama).transfer, out)
    with pytest.raises(UserError, match=rf" in {out} holds numbers that are infinite or NaN \(1 of "):
        transfer.run(plan_export(out).plan, llama.parent / "back")
    assert not (llama.parent / "back").exists()


def test_a_tensor_in_two_shards_is_named(tmp_path):
    folder = tmp_path / "in"
    write_folder("llama", folder, max_shard_size="50KB")
    first = sorted(folder.glob("model-*.safetensors"))[0]
    save_file({**load_file(first), "model.norm.weight": torch.ones(64)}, first)
    refused(folder, rf"{first.name} holds model.norm.weight, which {INDEX} does not place there; copy it again")


def test_no_weights_and_a_checkpoint_in_place_of_a_folder(llama):
    transfer.run(plan(llama).transfer, llama.parent / "checkpoint")
    refused(llama.parent / "checkpoint", "is a checkpoint already; give a Hugging Face folder with safetensors weights")
    (llama / SINGLE).unlink()
    refused(llama, "has neither model.safetensors nor model.safetensors.index.json")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("publisher", ["download", "cache", "conversion"])
def test_a_flipped_bit_is_named_where_the_publisher_left_a_checksum(llama, publisher):
    path = llama / SINGLE
    checksum = sha256(path.read_bytes()).hexdigest()
    if publisher == "download":
        record = llama / ".cache" / "huggingface" / "download" / f"{SINGLE}.metadata"
        record.parent.mkdir(parents=True)
        record.write_text(f"{'0' * 40}\n{checksum}\n1700000000.0\n")
        mend = rf"download it again, or delete {record} if you changed the file yourself"
    elif publisher == "cache":
        blob = llama.parent / "blobs" / checksum
        blob.parent.mkdir()
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, llama))
        mend = "delete it and download it again"
    else:
        checksum = f"{zlib.crc32(path.read_bytes()):08x}"
        files = {SINGLE: {"bytes": path.stat().st_size, "crc32": checksum}}
        (llama / "conversion.json").write_text(json.dumps({"files": files}))
        mend = "convert it again"
    made = plan(llama)
    assert [s.checksum.partition(":")[2] for s in made.transfer.sources if s.path == path] == [checksum]
    transfer.run(made.transfer, llama.parent / "good")
    check_weights(llama.parent / "good", llama)
    flip_a_bit(path.resolve())
    refused(llama, rf"model\.safetensors is damaged: its (sha256|crc32) is \w+, not {checksum}; {mend}")


def test_a_record_without_a_sha256_is_no_checksum(llama):
    record = llama / ".cache" / "huggingface" / "download" / f"{SINGLE}.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"{'0' * 40}\n{'1' * 40}\n1700000000.0\n")  # a git hash, of a small file
    assert not [source for source in plan(llama).transfer.sources if source.checksum]
    (llama / "conversion.json").write_text("{}")
    with pytest.raises(UserError, match=r"conversion\.json is damaged; delete it to go without the checksums in it"):
        plan(llama)


def test_a_plan_is_the_same_in_another_process(llama):
    """Or nothing that was written before a kill would ever be kept."""

    def identity() -> str:
        return transfer._identity(plan(llama).transfer)

    path = llama.parent / "identity"
    assert struck(lambda: path.write_text(identity()), None)[0] == "done"
    assert path.read_text() == identity()


@pytest.mark.parametrize("name", SPARSE)
def test_metadata_is_small_and_loads_without_isoloss(tmp_path, name):
    transfer.run(plan(write_folder(name, tmp_path / "in")).transfer, tmp_path / "out")
    metadata = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    modules = {type(entry).__module__ for entry in metadata.state_dict_metadata.values()}
    assert modules == {"torch.distributed.checkpoint.metadata"}
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    assert all(entry.chunks for entry in tensors)


def test_a_shard_without_a_tensor_of_the_model_is_forgotten(tmp_path):
    """One of layers for multi-token prediction: the way back would write an empty file. The order is kept: of the files
    that of the index, of the tensors that of their bytes."""
    one = torch.ones(2, dtype=torch.bfloat16)
    save_file({"x": one, "mtp": one + 1, "zz": torch.ones(2)}, tmp_path / "b")
    save_file({"y": one}, tmp_path / "mtp")
    save_file({"z": one}, tmp_path / "a", metadata={"format": "pt"})
    file_of = {"x": "b", "y": "mtp", "mtp": "b", "z": "a", "zz": "b"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": file_of}))
    layout = ShardLayout.of(HFReader(tmp_path), {"x", "z", "zz"})
    assert list(layout.files) == ["b", "a"] and layout.indexed
    assert list(layout.files["b"].tensors.items()) == [("zz", "F32"), ("x", "BF16")]
    assert layout.files["b"].metadata is None and layout.files["a"].metadata == {"format": "pt"}
