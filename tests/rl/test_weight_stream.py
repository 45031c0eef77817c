"""The stream gives every tensor of the Hugging Face folder that the model came from, bit for bit, in every layout."""

import pytest
import torch
from support import families, rollouts
from support.families import CONFIGS, write_folder
from transformers import DeepseekV3Config, Qwen3Config

from isoloss.models.checkpoint_hf import HFReader
from isoloss.models.weights import Part

BUCKET_BYTES = 30_000  # some tensors are larger
MORE_CONFIGS = {
    "qwen3 of 4 layers": Qwen3Config(**{**CONFIGS["qwen3"].to_dict(), "num_hidden_layers": 4, "layer_types": None}),
    # A norm of 25 bf16 numbers: the bias of the first layer's router, behind it, is at no multiple of 4 bytes.
    "deepseek-v3 of odd sizes": DeepseekV3Config(
        **{**CONFIGS["deepseek-v3"].to_dict(), "q_lora_rank": 25, "first_k_dense_replace": 0}
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    written = {}

    def of(family: str):
        if family not in written:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(families, "CONFIGS", CONFIGS | MORE_CONFIGS)
                written[family] = write_folder(family, tmp_path_factory.mktemp("model"))
        return written[family]

    return of


def tensors_of(folder) -> dict[str, torch.Tensor]:
    reader = HFReader(folder)
    return {name: reader.get(Part(name, reader.shape(name))) for name in reader.names}


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"tp": 2}),
        ("llama", 2, {"ulysses": 2}),
        ("llama", 2, {}),
        ("qwen2", 2, {"pp": 2}),  # the embedding is tied to the output matrix of the other stage
        ("qwen2", 4, {"tp": 2, "pp": 2}),
        ("qwen3 of 4 layers", 2, {"pp": 2, "vpp": 2}),
        ("qwen3-moe", 2, {"ep": 2}),
        ("qwen3-moe", 2, {"tp": 2, "ep": 2}),
        ("qwen3-moe", 4, {"tp": 2, "etp": 2, "ep": 2}),
        ("deepseek-v3", 4, {"pp": 2, "ep": 2}),
        ("gpt-oss", 2, {"tp": 2, "ep": 2}),  # a tensor holds all experts
        ("gpt-oss", 4, {"pp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_every_tensor_arrives_once(family, world, parallel, folder, pool):
    wanted = tensors_of(folder(family))
    arrived = pool.run(world, rollouts.buckets, folder(family), BUCKET_BYTES, parallel)
    assert len({len(buckets) for of_rank in arrived for buckets in of_rank.values()}) == 1
    assert not any(bucket for of_rank in arrived[1:] for bucket in of_rank["rank 0"])
    for buckets in [arrived[0]["rank 0"], *(of_rank["every rank"] for of_rank in arrived)]:
        assert len(buckets) > 1
        for bucket in buckets:
            assert len(bucket) == 1 or 0 < sum(tensor.nbytes for _, tensor in bucket) <= BUCKET_BYTES
        named = [pair for bucket in buckets for pair in bucket]
        assert sorted(name for name, _ in named) == sorted(wanted)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in named)


def test_tensors_of_two_types_share_a_bucket(folder, pool):
    """What is not trained stays fp32 and comes behind bf16 tensors of any length."""
    wanted = tensors_of(folder("deepseek-v3 of odd sizes"))
    for buckets in pool.run(2, rollouts.bf16_buckets, folder("deepseek-v3 of odd sizes"), {"tp": 2}):
        assert any(len({tensor.dtype for _, tensor in bucket}) == 2 for bucket in buckets)
        for name, tensor in (pair for bucket in buckets for pair in bucket):
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            assert tensor.dtype == dtype
            assert torch.equal(tensor, wanted[name].to(dtype))
