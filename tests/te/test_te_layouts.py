"""isoloss asks Transformer Engine's modules for the right thing: names, arguments, shards, and the layout of rows.

On a stand-in (tests/doubles/transformer_engine.py) with the parameters and the assertions of the real one and a forward
in plain torch. So what is compared with Megatron's local layers is what isoloss builds and hands over, on setups that
are legal with the real one; of its kernels' numerics nothing is claimed. tests/gpu/test_te_kernels.py makes the same
comparison with the real one, on a GPU that has it.
"""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from support.models import te_models
from support.models.families import MODELS, VOCAB, write_folder
from support.models.transformers_parity import make_samples

from isoloss.engine.config.schema import MoeConfig

LENGTHS = (2, 40, 17, 29, 33, 60)  # several micro-batches, and documents that no number of ranks divides
FP32 = 1e-5  # relative to the norm


def degrees(layout: dict) -> str:
    return "+".join(f"{key}{value}" for key, value in layout.items()) or "1"


def check_same_step(te_pool, folder, world, parallel, moe: MoeConfig | None = None) -> list[te_models.Evaluated]:
    """Logits, loss, gradients by name of the local spec on one rank and of the TE spec on `world` ranks."""
    samples = make_samples(LENGTHS, VOCAB)
    (local,) = te_pool.run(1, te_models.evaluate, folder, samples, False, {}, "fp32", moe)
    ranks = te_pool.run(world, te_models.evaluate, folder, samples, True, parallel, "fp32", moe)
    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    assert gradients.keys() == local.gradients.keys()
    for rank in ranks:
        assert (rank.logits - local.logits).norm() <= FP32 * local.logits.norm()
        assert rank.terms == pytest.approx(local.terms, rel=FP32)
        assert rank.loss == pytest.approx(local.loss, rel=FP32)
        assert rank.grad_norm == pytest.approx(local.grad_norm, rel=FP32)
    for name, wanted in local.gradients.items():
        assert gradients[name].shape == wanted.shape
        assert (gradients[name] - wanted).norm() <= FP32 * max(wanted.norm(), 1e-3), name
    return ranks


@pytest.mark.parametrize("name", MODELS)
def test_every_family_takes_the_same_step(name, te_pool, tmp_path):
    check_same_step(te_pool, write_folder(name, tmp_path), 1, {})


@pytest.mark.parametrize(
    ("name", "world", "parallel"),
    [
        ("llama", 2, {"tp": 2}),
        ("qwen2", 2, {"tp": 2, "sequence_parallel": False}),  # biases of a column-parallel layer
        ("qwen3", 2, {"tp": 2, "sequence_parallel": False}),  # norms of the heads of a TP rank
        ("gpt-oss", 2, {"tp": 2, "ep": 2}),  # biases of experts and of a row-parallel layer
        ("deepseek-v3", 2, {"tp": 2}),
        ("qwen3-moe", 4, {"tp": 2, "ep": 2}),
        ("glm-4.5", 2, {"pp": 2}),  # the first expert layer is not the first layer of its stage
        ("qwen3-moe", 2, {"ep": 2, "ulysses": 2}),
    ],
    ids=lambda value: degrees(value) if isinstance(value, dict) else str(value),
)
def test_every_layout_takes_the_same_step(name, world, parallel, te_pool, tmp_path):
    check_same_step(te_pool, write_folder(name, tmp_path), world, parallel)


@pytest.mark.parametrize(
    ("name", "world", "parallel"),
    [
        ("llama", 1, {"cp_kernel": "p2p"}),
        ("mixtral", 1, {"cp_kernel": "p2p"}),  # a window, which no kernel for one rank minds
        ("llama", 2, {"cp_kernel": "p2p", "ring": 2}),
        ("llama", 2, {"cp_kernel": "a2a", "ulysses": 2}),
        ("mixtral", 2, {"cp_kernel": "a2a", "ulysses": 2}),
        ("qwen3-moe", 4, {"cp_kernel": "all_gather", "ring": 2, "tp": 2}),
        ("qwen2-yarn", 4, {"cp_kernel": "p2p", "ring": 4}),  # documents of 2 tokens in 8 chunks; a scale of its own
        ("llama", 4, {"cp_kernel": "a2a+p2p", "ulysses": 2, "ring": 2}),
        ("ministral-3", 2, {"cp_kernel": "p2p", "ring": 2}),  # queries that grow with their position
    ],
    ids=lambda value: degrees(value) if isinstance(value, dict) else str(value),
)
def test_transformer_engines_attention_takes_the_same_step(name, world, parallel, te_pool, tmp_path):
    ranks = check_same_step(te_pool, write_folder(name, tmp_path), world, parallel)
    multiple = 2 * parallel.get("ulysses", 1) * parallel.get("ring", 1)
    for rank in ranks:
        starts = rank.arguments["cu_seqlens_q"].tolist()
        assert rank.arguments["cp_comm_type"] == parallel["cp_kernel"] or world == 1
        assert rank.arguments["window"] == ((8, 0) if name == "mixtral" else None)
        assert world == 1 or all((b - a) % multiple == 0 for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize(
    ("name", "world", "parallel"),
    [
        ("qwen3-moe", 2, {"cp_kernel": "p2p", "ring": 2}),
        ("glm-4.5", 4, {"cp_kernel": "all_gather", "ring": 4}),  # sigmoid scores
        ("mixtral", 2, {"cp_kernel": "a2a", "ulysses": 2, "ep": 2}),
    ],
    ids=lambda value: degrees(value) if isinstance(value, dict) else str(value),
)
def test_losses_of_routers_do_not_count_the_padding_of_the_kernels(name, world, parallel, te_pool, tmp_path):
    moe = MoeConfig("sequence", 0.5, 0.1)
    ranks = check_same_step(te_pool, write_folder(name, tmp_path), world, parallel, moe)
    assert ranks[0].terms.keys() == {"loss", "moe_aux_loss", "moe_z_loss"}


@pytest.mark.parametrize("from_fused", [False, True], ids=["of local", "of TE"])
@pytest.mark.parametrize(
    ("name", "distributed_optimizer"),
    [("qwen2", True), ("deepseek-v3", False), ("gpt-oss", False), ("qwen3-moe", True)],
)
def test_a_checkpoint_goes_on_alike_in_both(name, from_fused, distributed_optimizer, te_pool, tmp_path):
    folder, samples = write_folder(name, tmp_path / "in"), make_samples(LENGTHS, VOCAB)
    optimizer = {"distributed_optimizer": distributed_optimizer}
    te_pool.run(2, te_models.train_and_save, folder, tmp_path, samples, from_fused, {"tp": 2, **optimizer})
    for tp in (1, 2):
        local, fused = (
            te_pool.run(tp, te_models.load_and_train, folder, tmp_path, samples, fused, {"tp": tp, **optimizer})
            for fused in (False, True)
        )
        for wanted, found in zip(local, fused):
            assert found.keys() == wanted.keys()
            for weight, tensor in wanted.items():
                torch.testing.assert_close(
                    found[weight], tensor, rtol=0, atol=2e-5, msg=lambda m, w=weight: f"{w}: {m}"
                )


@pytest.mark.parametrize(("name", "parallel"), [("qwen3-moe", {"tp": 2, "ep": 2}), ("gpt-oss", {"ep": 2})])
def test_streams_and_exports_the_folder_it_loaded(name, parallel, te_pool, tmp_path):
    folder = write_folder(name, tmp_path / "in")
    original = load_file(folder / "model.safetensors")
    for weights in te_pool.run(2, te_models.streamed, folder, True, parallel):
        assert weights.keys() == original.keys()
        assert all(torch.equal(weights[key], original[key]) for key in original)
