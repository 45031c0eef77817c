"""Weight gradients that matrix products add to the buffer of gradients themselves."""

import dataclasses

import numpy as np
import pytest
import torch
from numerics import weight_gradients as world
from support.models import families

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from isoloss.parallel import Layout
from isoloss.parallel.ops.matmul import add_product
from isoloss.tools.prove.parity import freeze
from isoloss.tools.prove.proof import on_layout

LENGTHS = (37, 5, 23, 2, 61, 11, 3, 47)
FOUR = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
# Experts, shared ones and a dense layer; latent attention; output matrix tied to the embedding.
MODELS = {"glm-4.5": FOUR, "deepseek-v3": {}, "qwen3": FOUR, "tied": FOUR | {"tie_word_embeddings": True}}
ROWS = [
    ("tied", "1", False),
    ("deepseek-v3", "1", False),
    ("qwen3", "tp2", True),
    ("tied", "tp2+pp2+nosp", True),
    ("qwen3", "pp2+vpp2+dp2", True),
    ("glm-4.5", "ep2+dp2", True),
    ("glm-4.5", "tp2+ep2", False),
]


def batch() -> bytes:
    rng = np.random.default_rng(5)
    samples = []
    for length in LENGTHS:
        mask = torch.from_numpy(rng.random(length) < 0.8)
        mask[0], mask[1] = False, True
        samples.append(Sample(torch.from_numpy(rng.integers(0, families.VOCAB, length)), mask))
    return freeze(samples)


@pytest.fixture(scope="module")
def gradients(pool, tmp_path_factory):
    """gradients(model, layout, precision, **parallel) -> products that added themselves, and the whole gradients."""
    folders = {}

    def gradients(model, layout, precision="fp32", memory=None, **parallel):
        family = "qwen3" if model == "tied" else model
        if model not in folders:
            folders[model] = families.write_folder(family, tmp_path_factory.mktemp(model), **MODELS[model])
        config = Config(
            ModelConfig(str(folders[model])), batch=BatchConfig(max_tokens=64), train=TrainConfig(precision=precision)
        )
        config = on_layout(config, Layout.parse(layout), precision)
        config = dataclasses.replace(
            config, parallel=dataclasses.replace(config.parallel, **parallel), memory=memory or config.memory
        )
        answers = pool.run(Layout.parse(layout).world_size, world.gradients, config, batch())
        return sum(calls for calls, _ in answers), {k: v for _, part in answers for k, v in part.items()}

    return gradients


@pytest.mark.parametrize(("model", "layout", "overlap"), ROWS)
def test_products_that_add_give_what_the_sum_of_gradients_gives(gradients, model, layout, overlap):
    none, plain = gradients(model, layout, gradient_accumulation_fusion=False)
    some, fused = gradients(model, layout, gradient_accumulation_fusion=True, overlap_grad_reduce=overlap)
    assert none == 0 and some > 0 and plain.keys() == fused.keys() and len(plain) > 20
    for name, gradient in plain.items():
        scale = np.abs(gradient).max()
        assert scale > 0, name
        np.testing.assert_allclose(fused[name], gradient, rtol=0, atol=1e-6 * scale, err_msg=name)


def test_an_activation_that_is_computed_again_is_there_for_the_product(gradients):
    """Also where the weight's gradient is reduced during the backward, which asks for it in Megatron's way."""
    again = MemoryConfig(recompute="selective", recompute_modules=("mlp_act",))
    plain = gradients("qwen3", "dp2")[1]
    some, fused = gradients("qwen3", "dp2", memory=again, gradient_accumulation_fusion=True, overlap_grad_reduce=True)
    assert some > 0 and plain.keys() == fused.keys()
    for name, gradient in plain.items():
        np.testing.assert_allclose(fused[name], gradient, rtol=0, atol=1e-6 * np.abs(gradient).max(), err_msg=name)


def test_on_a_cpu_the_default_adds_gradients_up_as_before(gradients):
    (none, plain), (zero, default) = (gradients("qwen3", "1", **{key: False} if key else {}) for key in
                                      ("gradient_accumulation_fusion", ""))  # fmt: skip
    assert none == zero == 0
    for name, gradient in plain.items():
        assert (default[name] == gradient).all(), name


def test_in_bf16_products_that_add_round_less(gradients):
    """Of the same backward: what the product adds is not rounded to bf16 first."""
    exact = gradients("qwen3", "1", "fp64")[1]
    plain, fused = (gradients("qwen3", "1", "bf16", gradient_accumulation_fusion=each)[1] for each in (False, True))
    fused_names = [name for name in exact if "proj" in name]
    errors = [
        np.sqrt(sum(np.square(found[name] - exact[name]).sum() for name in fused_names)) for found in (plain, fused)
    ]
    assert 0 < errors[1] <= errors[0]


@pytest.mark.parametrize("kept", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("factors", (torch.float32, torch.bfloat16), ids=str)
def test_the_product_against_fp64(kept, factors):
    if kept == torch.bfloat16 and factors == torch.float32:
        pytest.skip("gradients are never kept in less than the weights' precision")
    torch.manual_seed(0)
    left, right = torch.randn(7, 300).to(factors), torch.randn(300, 5).to(factors)
    before = torch.randn(7, 5).to(kept)
    exact = before.double() + left.double() @ right.double()
    found, twin = before.clone(), before.clone().add_(left @ right)
    add_product(found, left, right)
    error, of_twin = ((each.double() - exact).abs().max() for each in (found, twin))
    assert error <= of_twin and error < 4 * torch.finfo(kept).eps * exact.abs().max()
