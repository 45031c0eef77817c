"""Checkpoints of plain Megatron-Core, in every style and layout, read without a model; damaged ones refused by name."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import plain_megatron
from support.models.decoders import attending
from support.models.families import FAMILIES, VOCAB
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.weight import Part
from isoloss.models.weights.checkpoint_names import Style
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.distcp import Folder
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.manifest import Manifest
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError


def assert_reads_back(checkpoint: Path, hf: Path, dtype=torch.float32) -> CheckpointWeights:
    arch = read_architecture(hf)
    weights, reader = CheckpointWeights(checkpoint, arch), HFReader(hf)
    for weight in weight_map(arch):
        found = weights.whole(weight)
        wanted = reader.whole(weight).to(torch.float32 if not weight.trained else dtype)
        assert found.is_contiguous() and torch.equal(found, wanted), weight.name
        assert weights.dtype(weight) == found.dtype == wanted.dtype
    return weights


def read_all(folder: Path, arch: Architecture) -> None:
    weights = CheckpointWeights(folder, arch)
    for weight in weight_map(arch):
        weights.whole(weight)


def native(style: str, arch) -> Style:
    """What Megatron-Core makes of "stacked" where layers differ."""
    asymmetric = any(isinstance(kind, Asymmetric) for kind in arch.attentions)
    differ = any(arch.linear) or asymmetric or len(set(arch.sparse)) > 1
    return Style.PER_LAYER if style == "stacked" and differ else Style(style)


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_in_every_style(architecture, style, deep_hf, plain_checkpoint):
    hf = deep_hf(architecture)
    weights = assert_reads_back(plain_checkpoint(hf, style=style), hf)
    assert weights.style == native(style, weights.arch)
    assert weights.padded_vocab == 384 and not weights.skipped


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("layout", plain_megatron.LAYOUTS)
@pytest.mark.parametrize("architecture", ["qwen3", "glm-4.5"])
def test_layouts(architecture, layout, style, deep_hf, plain_checkpoint):
    hf = deep_hf(architecture, tie_word_embeddings=architecture == "qwen3")
    weights = assert_reads_back(plain_checkpoint(hf, style=style, **plain_megatron.LAYOUTS[layout]), hf)
    assert weights.padded_vocab == 370


@pytest.mark.parametrize("style", plain_megatron.METADATA)
@pytest.mark.parametrize("architecture", ["deepseek-v3", "gpt-oss", "qwen3-moe"])
def test_experts_and_tensors_on_different_ranks(architecture, style, deep_hf, plain_checkpoint):
    hf = deep_hf(architecture)
    assert_reads_back(plain_checkpoint(hf, style=style, **plain_megatron.experts_apart(architecture)), hf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_a_prefix(dtype, deep_hf, plain_checkpoint):
    hf = deep_hf("mixtral")
    assert_reads_back(plain_checkpoint(hf, dtype=dtype, prefix="model."), hf, dtype)


@pytest.mark.parametrize("layout", ["tp2", "tp2+dp2, fully parallel"])
def test_any_rows_of_a_tensor_are_those_of_the_file(layout, deep_hf, plain_checkpoint):
    """As a rank of any TP degree reads its part: from inside one piece to inside another."""
    hf = deep_hf("llama")
    folder = Folder(plain_checkpoint(hf, **plain_megatron.LAYOUTS[layout]))
    stored = folder.tensors["embedding.word_embeddings.weight"]
    wanted = HFReader(hf).get(Part("model.embed_tokens.weight", (VOCAB, 56)))
    assert len(stored.pieces) >= 2
    for first, rows in ((0, VOCAB), (1, 300), (5, 60), (180, 20), (184, 2), (276, 31)):
        found = folder.rows(stored, (), first, (rows, 56))
        assert torch.equal(found, wanted[first : first + rows]), (first, rows)


@pytest.fixture
def checkpoint(deep_hf, plain_checkpoint, tmp_path) -> tuple[Path, Path]:
    """(Hugging Face folder, checkpoint of it at tp2), the latter to be damaged."""
    hf = deep_hf("llama")
    return hf, shutil.copytree(plain_checkpoint(hf, 2, tp=2), tmp_path / "mcore")


def edit_metadata(folder: Path, change) -> None:
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def rename(old: str, new: str):
    def change(found):
        entry = found.state_dict_metadata.pop(old)
        found.state_dict_metadata[new] = entry
        for chunk in entry.chunks:
            info = found.storage_data.pop(MetadataIndex(old, chunk.offsets))
            found.storage_data[MetadataIndex(new, chunk.offsets)] = info

    return change


FC2 = "decoder.layers.mlp.linear_fc2.weight"


def test_what_does_not_belong_to_the_model_is_named(checkpoint):
    hf, folder = checkpoint
    arch = read_architecture(hf)
    for changed, says in (
        (
            replace(arch, layers=arch.layers[:1] * 5),
            r"linear_qkv.layer_norm_weight has shape \[4, 56\] where .* \[5, 56\]",
        ),
        (replace(arch, vocab_size=600), r"word_embeddings.weight has shape \[512, 56\] where .* \[600, 56\]"),
        (replace(arch, tie_embeddings=True), r"has output_layer.weight \(1 such\), a tensor that the model"),
        (attending(arch, qk_norm="head"), r"lacks decoder.layers.self_attention.q_layernorm.weight, which"),
    ):
        with pytest.raises(UserError, match=says):
            CheckpointWeights(folder, changed)
    edit_metadata(folder, rename(FC2, "decoder.layers.mlp.linear_fc3.weight"))
    with pytest.raises(UserError, match=f"lacks {FC2}"):
        CheckpointWeights(folder, arch)


def test_the_optimizer_is_passed_over(checkpoint):
    hf, folder = checkpoint

    def add(found):
        for name in ("optimizer.state.exp_avg.", "chained_0.optimizer.state.exp_avg."):
            found.state_dict_metadata[name + FC2] = found.state_dict_metadata[FC2]
            for chunk in found.state_dict_metadata[FC2].chunks:
                info = found.storage_data[MetadataIndex(FC2, chunk.offsets)]
                found.storage_data[MetadataIndex(name + FC2, chunk.offsets)] = info

    edit_metadata(folder, add)
    assert_reads_back(folder, hf)


def test_a_key_twice_under_two_spellings_is_refused(checkpoint):
    hf, folder = checkpoint
    other = "decoder.layers.pre_mlp_layernorm.weight"

    def add(found):
        old = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
        found.state_dict_metadata[other] = found.state_dict_metadata[old]
        for chunk in found.state_dict_metadata[old].chunks:
            found.storage_data[MetadataIndex(other, chunk.offsets)] = found.storage_data[
                MetadataIndex(old, chunk.offsets)
            ]

    edit_metadata(folder, add)
    with pytest.raises(UserError, match=rf"has {other} \(1 such\)"):
        CheckpointWeights(folder, read_architecture(hf))


def test_adapters_alone_are_refused(checkpoint):
    """As Megatron-Bridge saves a model of which only those were trained."""
    hf, folder = checkpoint

    def leave_adapters(found):
        rename(FC2, "decoder.layers.mlp.linear_fc2.adapter.linear_in.weight")(found)
        for key in [key for key in found.state_dict_metadata if ".adapter." not in key]:
            del found.state_dict_metadata[key]

    edit_metadata(folder, leave_adapters)
    with pytest.raises(UserError, match=r"holds adapters \(LoRA\) without the model that they belong to; merge them"):
        CheckpointWeights(folder, read_architecture(hf))


def test_pieces_that_do_not_make_up_their_tensor_are_refused(checkpoint):
    _, folder = checkpoint

    def drop(found):
        found.state_dict_metadata[FC2].chunks.pop()

    edit_metadata(folder, drop)
    with pytest.raises(UserError, match=rf"pieces of {FC2} do not add up to its shape \[4, 56, 88\]"):
        Folder(folder)

    def overlap(found):
        first = found.state_dict_metadata[FC2].chunks[0]
        offsets = torch.Size([0, 0, 1])
        found.state_dict_metadata[FC2].chunks.append(ChunkStorageMetadata(offsets, first.sizes))
        found.storage_data[MetadataIndex(FC2, offsets)] = found.storage_data[MetadataIndex(FC2, first.offsets)]

    edit_metadata(folder, overlap)
    opened = Folder(folder)
    for layer in (0, 3):  # there twice in part; not there in part
        with pytest.raises(UserError, match=rf"pieces of {FC2} do not cover \[{layer}, 0, 0\] to .* once"):
            opened.rows(opened.tensors[FC2], (layer,), 0, (56, 88))


def test_damaged_files_are_named(checkpoint):
    hf, folder = checkpoint
    arch = read_architecture(hf)
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    opened = Folder(folder)
    stored = opened.tensors[FC2]
    piece = next(piece for piece in stored.pieces if piece.file == file.name)
    start, _ = opened.payload(stored, piece)
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"__0_0.distcp has \d+ bytes where .metadata calls for .* cut short"):
        CheckpointWeights(folder, arch)
    flipped = bytearray(whole)
    flipped[start + 100] ^= 16
    file.write_bytes(flipped)
    with pytest.raises(UserError, match=f"__0_0.distcp is damaged: {FC2} fails its checksum"):
        read_all(folder, arch)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match=r"__0_0.distcp is damaged at byte \d+, where .* should stand"):
        read_all(folder, arch)
    file.unlink()
    with pytest.raises(UserError, match=r"lacks __0_0.distcp, which its .metadata names"):
        CheckpointWeights(folder, arch)
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r".metadata is damaged or not a checkpoint's"):
        CheckpointWeights(folder, arch)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"is not a torch_dist checkpoint: it has no .metadata"):
        CheckpointWeights(folder, arch)


class Bomb:
    def __reduce__(self):
        return print, ("this must not run",)


def test_metadata_runs_nothing(checkpoint, capsys):
    _, folder = checkpoint
    edit_metadata(folder, lambda found: setattr(found, "planner_data", Bomb()))
    with pytest.raises(UserError, match=r"asks for builtins.print, which has no place in a checkpoint's metadata"):
        Folder(folder)
    assert "must not run" not in capsys.readouterr().out


def test_tensors_of_no_layer_are_refused_whatever_the_model_predicts(checkpoint):
    """A model with layers for multi-token prediction leaves out those, and nothing else."""
    hf, folder = checkpoint

    def add(name: str):
        def change(found):
            found.state_dict_metadata[name] = found.state_dict_metadata[FC2]
            for chunk in found.state_dict_metadata[FC2].chunks:
                found.storage_data[MetadataIndex(name, chunk.offsets)] = found.storage_data[
                    MetadataIndex(FC2, chunk.offsets)
                ]

        return change

    arch = replace(read_architecture(hf), mtp_layers=1)
    edit_metadata(folder, add("mtp.layers.0.weight"))
    assert CheckpointWeights(folder, arch).skipped == ("mtp.layers.0.weight",)
    edit_metadata(folder, add("decoder.layers.mlp.linear_fc9.weight"))
    with pytest.raises(UserError, match=r"has decoder\.layers\.mlp\.linear_fc9\.weight \(1 such\)"):
        CheckpointWeights(folder, arch)


def test_a_manifest_of_another_vocabulary_is_refused(checkpoint):
    """The rows that pad a vocabulary hide it: 307 and 306 tokens are both 512 rows."""
    hf, folder = checkpoint
    arch = read_architecture(hf)
    whole = Manifest("converted", arch.family, arch.vocab_size, Style.STACKED, ("float32",), 9, {})
    (folder / "isoloss.json").write_text(whole.to_json())
    CheckpointWeights(folder, arch)
    with pytest.raises(UserError, match=r"vocab_size=307 where config\.json says 306"):
        CheckpointWeights(folder, replace(arch, vocab_size=306))
