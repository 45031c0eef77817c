"""The weight map and its forms: against plain formulas, against transformers, and there and back again."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.decoders import decoder, with_mlp
from support.models.families import FAMILIES, make, published, tensors_of

from isoloss.models.families import glm4_moe, qwen2, qwen3
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.experts import ExpertNames
from isoloss.models.kinds.mappings import (
    QKV,
    ColumnParallel,
    GatedMLP,
    InterleavedGatedMLP,
    Replicated,
    RowParallel,
    TransposedRowParallel,
    Vocabulary,
    padded_vocab_size,
)
from isoloss.models.weights.weight_map import num_parameters, weight_map
from isoloss.parallel.runtime.errors import UserError

MAPPINGS = [
    Replicated, ColumnParallel, RowParallel, TransposedRowParallel, QKV, GatedMLP, InterleavedGatedMLP, Vocabulary
]  # fmt: skip
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64])


def numbered(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_map_covers_the_tensors_of_transformers_exactly(family, tie, tmp_path):
    """Those of its files: of a tensor that holds all experts, each row once."""
    model = make(family, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    stored, arch = tensors_of(tmp_path), read_architecture(tmp_path)
    weights = weight_map(arch)
    parts = [part for weight in weights for part in weight.parts]
    covered = {(part.tensor, part.row): part.shape for part in parts}
    assert len(covered) == len(parts) and len({weight.name for weight in weights}) == len(weights)
    rows = {part.tensor: part.rows for part in parts}
    assert covered == {
        (name, row): tuple(tensor.shape[row is not None :])
        for name, tensor in stored.items()
        for row in (range(rows[name]) if rows.get(name) else (None,))
    }
    trained = sum(torch.Size(weight.shape).numel() for weight in weights if weight.trained)
    assert trained == num_parameters(arch) == model.num_parameters()
    for weight in weights:
        tensors = [stored[part.tensor] if part.row is None else stored[part.tensor][part.row] for part in weight.parts]
        whole = weight.mapping.merge(tensors)
        assert tuple(whole.shape) == weight.shape
        assert all(torch.equal(a, b) for a, b in zip(weight.mapping.split(whole), tensors))
        for tp in (1, 2):
            shards = [weight.mapping.shard(whole, tp, rank) for rank in range(tp)]
            assert all(shard.is_contiguous() for shard in shards)
            assert torch.equal(weight.mapping.unshard(shards), whole)


def test_names_are_those_of_megatron_core_in_model_order():
    arch = qwen2.architecture(published("qwen2", num_hidden_layers=1, tie_word_embeddings=False))
    names = [weight.name for weight in weight_map(arch)]
    layer = "decoder.layers.0."
    assert names == [
        "embedding.word_embeddings.weight", f"{layer}input_layernorm.weight",
        f"{layer}self_attention.linear_qkv.weight", f"{layer}self_attention.linear_qkv.bias",
        f"{layer}self_attention.linear_proj.weight",
        f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.linear_fc1.weight", f"{layer}mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight", "output_layer.weight",
    ]  # fmt: skip
    names = [weight.name for weight in weight_map(qwen3.architecture(published("qwen3", tie_word_embeddings=True)))]
    assert "output_layer.weight" not in names
    assert f"{layer}self_attention.q_layernorm.weight" in names and f"{layer}self_attention.k_layernorm.weight" in names


def test_a_family_names_all_that_belongs_to_experts():
    """As Hunyuan V3 does, and with a module and projections of other names as well."""
    arch = glm4_moe.architecture(published("glm-4.5"))
    names = ExpertNames("moe", "router.gate", ("w1", "w3", "w2"), selection_bias="expert_bias", shared="shared_mlp")
    arch = with_mlp(arch, replace(arch.experts, names=names), 1)
    found = {weight.name: [part.tensor for part in weight.parts] for weight in weight_map(arch)}
    mcore, hf = "decoder.layers.1.mlp.", "model.layers.1.moe."
    assert found[f"{mcore}router.weight"] == [f"{hf}router.gate.weight"]
    assert found[f"{mcore}router.expert_bias"] == [f"{hf}expert_bias"]
    assert found[f"{mcore}experts.local_experts.3.linear_fc2.weight"] == [f"{hf}experts.3.w2.weight"]
    assert found[f"{mcore}shared_experts.linear_fc1.weight"] == [
        f"{hf}shared_mlp.gate_proj.weight",
        f"{hf}shared_mlp.up_proj.weight",
    ]


@pytest.mark.parametrize("rest", [(), (3,)])
def test_qkv_is_the_queries_of_a_group_then_its_key_then_its_value(rest):
    h, g, d, u = 6, 2, 4, 3
    q, k, v = numbered((h, d, *rest)), numbered((g, d, *rest)) + 1000, numbered((g, u, *rest)) + 2000
    expected = torch.cat([q[0], q[1], q[2], k[0], v[0], q[3], q[4], q[5], k[1], v[1]])
    whole = QKV(h, g, d, u).merge([tensor.reshape(-1, *rest) for tensor in (q, k, v)])
    assert torch.equal(whole, expected)
    assert torch.equal(QKV(h, g, d, u).shard(whole, 2, 1), torch.cat([q[3], q[4], q[5], k[1], v[1]]))


def test_more_ranks_than_kv_heads_take_runs_of_rows():
    whole = numbered((48, 3))
    shards = [QKV(8, 2, 4, 4).shard(whole, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(shards), whole) and torch.equal(QKV(8, 2, 4, 4).unshard(shards), whole)


def test_gate_and_up_are_sharded_each_for_itself():
    gate, up = numbered((4, 2)), numbered((4, 2)) + 100
    whole = GatedMLP().merge([gate, up])
    assert torch.equal(whole, torch.cat([gate, up]))
    assert torch.equal(GatedMLP().shard(whole, 2, 1), torch.cat([gate[2:], up[2:]]))


def test_what_gpt_oss_stores_transposed_and_interleaved():
    gate, up = numbered((4, 2)), numbered((4, 2)) + 100
    stored = torch.stack([gate, up], 1).reshape(8, 2).T  # [inputs, gate 0, up 0, gate 1, ...]
    assert torch.equal(InterleavedGatedMLP().merge([stored]), torch.cat([gate, up]))
    assert torch.equal(InterleavedGatedMLP().merge([stored[0]]), torch.cat([gate, up])[:, 0])
    assert torch.equal(TransposedRowParallel().merge([gate.T]), gate)


def test_rows_and_replicated():
    whole = numbered((4, 6))
    assert torch.equal(RowParallel().shard(whole, 2, 1), whole[:, 3:])
    assert torch.equal(Replicated().shard(whole, 2, 1), whole)
    assert Replicated().shard(whole, 2, 1).data_ptr() != whole.data_ptr()


def test_vocabulary_is_padded_with_zero_rows_and_trimmed():
    whole = numbered((131, 2)) + 1
    shards = [Vocabulary(131).shard(whole, 4, rank) for rank in range(4)]
    assert {tuple(shard.shape) for shard in shards} == {(64, 2)}
    together = torch.cat(shards)
    assert torch.equal(together[:131], whole) and not together[131:].any()
    assert not shards[3].any()  # a rank of padding only
    assert torch.equal(Vocabulary(131).unshard(shards), whole)
    assert Vocabulary(131).shard(whole, 2, 0, padded_vocab=132).shape == (66, 2)
    with pytest.raises(ValueError, match="padded_vocab=130"):
        Vocabulary(131).shard(whole, 2, 0, padded_vocab=130)


def test_padded_vocab_size():
    assert [padded_vocab_size(n, 1) for n in (1, 128, 129, 151936)] == [128, 128, 256, 151936]
    assert padded_vocab_size(151936, 4) == 151936  # does not depend on tp as long as tp divides 128
    assert padded_vocab_size(100, 3) == 384
    assert padded_vocab_size(100, 256) == 256


@st.composite
def forms(draw):
    """(mapping, shapes of its Hugging Face tensors, tp) for sizes that tp divides."""
    tp = draw(st.sampled_from([1, 2, 4]))
    n, m, rest = (draw(st.integers(1, 5)) for _ in range(3))
    kind = draw(st.sampled_from(MAPPINGS))
    if kind is QKV:
        g, d, u = tp * n, draw(st.integers(1, 4)), draw(st.integers(1, 4))
        tail = draw(st.sampled_from([(), (rest,)]))
        return QKV(g * m, g, d, u), [(g * m * d, *tail), (g * d, *tail), (g * u, *tail)], tp
    if kind is GatedMLP:
        return GatedMLP(), [(tp * n, m), (tp * n, m)], tp
    if kind is InterleavedGatedMLP:
        return InterleavedGatedMLP(), [(m, 2 * tp * n) if draw(st.booleans()) else (2 * tp * n,)], tp
    if kind is Vocabulary:
        size = draw(st.integers(1, 600))
        return Vocabulary(size), [(size, m)], tp
    return kind(), [(tp * n, tp * m)], tp


@settings(max_examples=200, deadline=None)
@given(forms(), DTYPES)
def test_there_and_back_again(case, dtype):
    mapping, shapes, tp = case
    tensors = [numbered(shape, dtype) + 1000 * i for i, shape in enumerate(shapes)]
    whole = mapping.merge(tensors)
    parts = mapping.split(whole)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(parts, tensors, strict=True))
    shards = [mapping.shard(whole, tp, rank) for rank in range(tp)]
    assert len({tuple(shard.shape) for shard in shards}) == 1
    back = mapping.unshard(shards)
    assert torch.equal(back, whole) and back.dtype == dtype


def test_a_tp_degree_that_does_not_fit_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"parallel.tp=4 neither divides nor is a multiple of the model's 3 key/value heads"
    ):
        QKV(12, 3, 4, 4).shard(numbered((72, 3)), 4, 0)
    with pytest.raises(UserError, match=r"parallel.tp=4 does not divide the model's 6 MLP features"):
        GatedMLP().shard(numbered((12, 3)), 4, 0)
    with pytest.raises(UserError, match=r"parallel.tp=4 does not divide the model's 6 input features"):
        RowParallel().shard(numbered((4, 6)), 4, 0)


def test_a_plain_architecture_needs_no_config_file():
    arch = decoder(1, 8, (2, 1, 4), 12, 10, tie_embeddings=True)
    assert arch.torch_dtype == torch.float32
    assert [weight.layer for weight in weight_map(arch)] == [None, 0, 0, 0, 0, 0, 0, None]


def test_a_critic_has_a_head_of_its_own():
    """Also that of a model whose output matrix is its embedding."""
    arch = decoder(1, 8, (2, 1, 4), 12, 10, tie_embeddings=True)
    for policy in (arch, replace(arch, tie_embeddings=False)):
        head = weight_map(policy.as_critic())[-1]
        assert (head.name, head.shape, head.parts[0].tensor) == ("output_layer.weight", (1, 8), "score.weight")
        assert not policy.as_critic().tie_embeddings


def test_square_matrices_are_transposed_as_well():
    """The experts of gpt-oss are 2880 x 2880: no shape tells whether they were."""
    matrix = numbered((3, 3))
    (back,) = TransposedRowParallel().split(matrix)
    assert (
        TransposedRowParallel().merge([matrix]).tolist()
        == back.tolist()
        == [[r[c] for r in matrix.tolist()] for c in range(3)]
    )
