"""The stream gives every tensor of the Hugging Face folder that the model came from, bit for bit, in every layout."""

import pytest
import torch
from support.models.families import tensors_of
from support.runs import rollouts

BUCKET_BYTES = 30_000  # some tensors are larger
# A norm of 25 bf16 numbers: the bias of the first layer's router, behind it, is at no multiple of 4 bytes.
ODD_SIZES = {"q_lora_rank": 25, "first_k_dense_replace": 0}


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"tp": 2}),
        ("llama", 2, {"ulysses": 2}),
        ("llama", 2, {}),
        ("qwen2", 2, {"pp": 2}),  # the embedding is tied to the output matrix of the other stage
        ("qwen2", 4, {"tp": 2, "pp": 2}),
        ("qwen3", 2, {"pp": 2, "vpp": 2}),
        ("qwen3-moe", 2, {"ep": 2}),
        ("qwen3-moe", 2, {"tp": 2, "ep": 2}),
        ("qwen3-moe", 4, {"tp": 2, "etp": 2, "ep": 2}),
        ("deepseek-v3", 4, {"pp": 2, "ep": 2}),
        ("gpt-oss", 2, {"tp": 2, "ep": 2}),  # a tensor holds all experts
        ("gpt-oss", 4, {"pp": 2, "ep": 2}),
        ("gemma-4", 4, {"tp": 2, "pp": 2}),  # a layer without a projection of values; what is not trained arrives too
        ("gemma-4-moe", 4, {"pp": 2, "ep": 2}),  # and a tensor that holds all experts
        ("mimo-v2-flash", 4, {"tp": 2, "pp": 2}),  # value heads narrower than keys, whose number differs by layer
    ],
    ids=str,
)
def test_every_tensor_arrives_once(family, world, parallel, tiny_hf, pool):
    folder = tiny_hf(family, num_hidden_layers=4 if "vpp" in parallel else 2)
    wanted = tensors_of(folder)
    arrived = pool.run(world, rollouts.buckets, folder, BUCKET_BYTES, parallel)
    assert len({len(buckets) for of_rank in arrived for buckets in of_rank.values()}) == 1
    assert not any(bucket for of_rank in arrived[1:] for bucket in of_rank["rank 0"])
    of_holders = list(zip(*(of_rank["owner"] for of_rank in arrived)))
    assert all(sum(map(bool, buckets)) == 1 for buckets in of_holders)  # one rank at a time
    held = [next(filter(None, buckets)) for buckets in of_holders]
    for buckets in [arrived[0]["rank 0"], held, *(of_rank["every rank"] for of_rank in arrived)]:
        assert len(buckets) > 1
        for bucket in buckets:
            parted = [tensor.nbytes for name, tensor in bucket if "_a_" not in name and "_b_" not in name]
            assert len(bucket) == 1 or 0 < sum(parted) <= BUCKET_BYTES
        named = [pair for bucket in buckets for pair in bucket]
        assert sorted(name for name, _ in named) == sorted(wanted)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in named)


@pytest.mark.parametrize(("family", "parallel"), [("deepseek-v3", {"tp": 2}), ("glm-4.7-flash", {"pp": 2})], ids=str)
def test_what_a_server_joins_comes_in_one_bucket(family, parallel, tiny_hf, pool):
    """q_a_proj and kv_a_proj_with_mqa of a layer, of which SGLang makes one matrix. Nothing else shares a bucket."""
    latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    arrived = pool.run(2, rollouts.buckets, tiny_hf(family), 1, parallel)
    for receives in ("every rank", "rank 0", "owner"):
        joined = set()
        for bucket in (bucket for of_rank in arrived for bucket in of_rank[receives]):
            layers = {name.partition(".self_attn.")[0] for name, _ in bucket}
            parts = {name.split(".")[-2] for name, _ in bucket}
            assert len(layers) <= 1 and (len(parts) <= 1 or parts <= set(latent))
            if parts & {"q_a_proj", "kv_a_proj_with_mqa"}:
                assert {"q_a_proj", "kv_a_proj_with_mqa"} <= parts
                joined |= layers
        assert joined == {"model.layers.0", "model.layers.1"}


def test_messages_go_in_batches(tiny_hf, pool):
    """NCCL sends those through the communicator of the world, and would make one for the two ranks of a single one."""
    batches = pool.run(4, rollouts.batches_of_messages, tiny_hf("qwen3-moe"), {"pp": 2, "ep": 2})
    assert set(batches[0]) == {1} and all(batches)
    assert len(batches[0]) == sum(map(len, batches[1:]))


def test_tensors_of_two_types_share_a_bucket(tiny_hf, pool):
    """What is not trained stays fp32 and comes behind bf16 tensors of any length."""
    folder = tiny_hf("deepseek-v3", **ODD_SIZES)
    wanted = tensors_of(folder)
    for buckets in pool.run(2, rollouts.bf16_buckets, folder, {"tp": 2}):
        assert any(len({tensor.dtype for _, tensor in bucket}) == 2 for bucket in buckets)
        for name, tensor in (pair for bucket in buckets for pair in bucket):
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            assert tensor.dtype == dtype
            assert torch.equal(tensor, wanted[name].to(dtype))
