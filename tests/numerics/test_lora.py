"""Adapters: loss and gradients are those of transformers and PEFT, and the same on every layout.

The reference that covers every family is a model of transformers with merged weights W + s B A, whose gradient G gives
those of the factors by the chain rule. It knows neither the engine's mappings nor its products.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from numerics.test_transformers_parity import (
    LAYOUTS,
    LENGTHS,
    SCALED_COSINES,
    admits,
    relative_error,
    transformers_logprobs,
    transformers_loss_and_gradients,
    transformers_model,
)
from support.models import lora as world
from support.models.families import MODELS, VOCAB, write_folder
from support.models.lora import LORA, Step
from support.models.transformers_parity import make_samples
from transformers import AutoModelForCausalLM

from isoloss.engine.rl.backends.local.megatron_backend import PackedProducts
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import UserError

SAMPLES = make_samples(LENGTHS, VOCAB, seed=4)
SCALE = LORA.scale(LORA.rank)


def difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    return max((relative_error(tensor, wanted[name]), name) for name, tensor in got.items())


# A merged projection and gates, one tensor of all experts as rows, latent attention, windows with keys as values.
QUICK = ("qwen3", "qwen3.5-moe", "deepseek-v3-plain", "gemma-4")


def quick_or_full(name: str):
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.full)


@pytest.mark.parametrize("name", [quick_or_full(name) for name in MODELS if name not in SCALED_COSINES])
def test_loss_and_gradients_are_those_of_merged_weights(name, one_rank, monkeypatch, tmp_path):
    folder = write_folder(name, tmp_path / "in")
    got = world.step(folder, SAMPLES)
    factors = world.all_factors(read_architecture(str(folder)))
    merged = Path(shutil.copytree(folder, tmp_path / "merged"))
    world.merge_into(merged, factors, SCALE, turned=name == "gpt-oss")
    model = transformers_model(folder, "fp64", monkeypatch)
    targets = sum(int(sample.mask_T.sum()) for sample in SAMPLES)
    with torch.no_grad():
        base = -sum(float(transformers_logprobs(model, sample).sum()) for sample in SAMPLES) / targets
    with_merged_weights = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
    for parameter, exact in zip(model.parameters(), with_merged_weights.parameters(), strict=True):
        parameter.data.copy_(exact.data)
    loss, of_weights = transformers_loss_and_gradients(model, SAMPLES, tmp_path / "gradients")
    wanted = world.gradients_of_factors(of_weights, factors, SCALE, turned=name == "gpt-oss")
    assert got.gradients.keys() == wanted.keys() == factors.keys()
    worst, where = difference(got.gradients, wanted)
    squares = sum(float(tensor.square().sum()) for tensor in wanted.values())
    print(f"loss {abs(got.loss - loss) / loss:.1e}, gradients {worst:.1e} ({where})")
    assert abs(got.loss - loss) <= 1e-10 * loss and abs(got.loss - got.base) > 1e-3
    assert worst <= 1e-10, where
    assert got.grad_norm == pytest.approx(squares**0.5, rel=1e-10)
    assert got.base == pytest.approx(base, rel=1e-10)


def test_gpt_oss_in_fp32(one_rank, monkeypatch, tmp_path):
    """Experts in one tensor, as [in, out], gate and up alternating; transformers rounds its rotations to fp32."""
    folder = write_folder("gpt-oss", tmp_path / "in")
    got = world.step(folder, SAMPLES, precision="fp32", distributed_optimizer=False)
    factors = world.all_factors(read_architecture(str(folder)))
    merged = Path(shutil.copytree(folder, tmp_path / "merged"))
    world.merge_into(merged, factors, SCALE, turned=True)
    model = transformers_model(merged, "fp32", monkeypatch)
    loss, of_weights = transformers_loss_and_gradients(model, SAMPLES, tmp_path / "gradients")
    wanted = world.gradients_of_factors(of_weights, factors, SCALE, turned=True)
    assert got.gradients.keys() == wanted.keys() == factors.keys()
    assert abs(got.loss - loss) <= 1e-6 * loss
    worst, where = difference(got.gradients, wanted)
    assert worst <= 2e-5, where


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory) -> Callable[[str], tuple[Path, Step]]:
    """reference(family) -> its folder, and a step on one rank with everything in one micro-batch."""
    made: dict[str, tuple[Path, Step]] = {}

    def of(family: str) -> tuple[Path, Step]:
        if family not in made:
            changes = {"num_hidden_layers": 4} if family == "qwen3" else {}
            folder = write_folder(family, tmp_path_factory.mktemp(family), **changes)
            made[family] = folder, pool.run(1, world.step_of, folder, SAMPLES, {"max_tokens": 10_000})[0]
        return made[family]

    return of


MORE = LAYOUTS | {
    "dp2": {},
    "pp2+vpp2": {"pp": 2, "vpp": 2},
    "ep2+dp2": {"ep": 2},
    "etp2+dp2": {"etp": 2},
    "tp2+etp2": {"tp": 2, "etp": 2},
    "tp2+ep2+dp2": {"tp": 2, "ep": 2},
}
WORLDS = {"tp2+pp2": 4, "ulysses2+ring2": 4, "tp2+ep2": 2, "tp2+ep2+dp2": 4}
QUICK_LAYOUTS = {
    ("qwen3", "tp2+nosp"), ("qwen3", "pp2+vpp2"), ("qwen3", "dp2"), ("qwen3-moe", "etp2+dp2"), ("qwen3-moe", "ep2+dp2"),
    ("deepseek-v3", "tp2"), ("qwen3.5-moe", "tp2"),
}  # fmt: skip
GRID = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK_LAYOUTS else pytest.mark.full)
    for name in ("qwen3", "qwen3-moe", "deepseek-v3", "qwen3.5-moe", "gpt-oss", "qwen2")
    for layout, parallel in MORE.items()
    if admits(name, parallel) and not (layout == "pp2+vpp2" and name != "qwen3")
]


@pytest.mark.parametrize(("name", "layout"), GRID)
def test_layouts_give_the_gradients_of_one_rank(name, layout, reference, pool):
    folder, alone = reference(name)
    ranks = pool.run(WORLDS.get(layout, 2), world.step_of, folder, SAMPLES, MORE[layout])
    seen = set()
    for rank in ranks:
        assert rank.loss == pytest.approx(alone.loss, rel=1e-12) and rank.base == pytest.approx(alone.base, rel=1e-12)
        assert rank.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12)
        worst, where = difference(rank.gradients, alone.gradients)
        assert worst <= 1e-12, where
        seen |= rank.gradients.keys()
    assert seen == alone.gradients.keys()


@pytest.mark.parametrize(
    ("precision", "layout", "tolerance"),
    [
        ("fp64", {"tp": 2}, 1e-12),
        pytest.param("fp64", {"pp": 2}, 1e-12, marks=pytest.mark.full),
        ("fp32", {"tp": 2, "distributed_optimizer": True}, 1e-6),
        pytest.param(
            "fp32", {"distributed_optimizer": True, "overlap_grad_reduce": True}, 1e-6, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_three_clipped_steps(precision, layout, tolerance, reference, pool):
    """Moments, decay, clip and norm count each factor once: losses, norms and factors stay those of one rank."""
    folder, _ = reference("qwen3")
    plain = {"precision": precision, "steps": 3, "distributed_optimizer": False}
    (alone,) = pool.run(1, world.step_of, folder, SAMPLES, plain)
    for rank in pool.run(2, world.step_of, folder, SAMPLES, plain | layout):
        assert rank.losses == pytest.approx(alone.losses, rel=tolerance)
        assert all(norm > 0.05 for norm in alone.losses[1::2])  # each step is clipped
        assert all((tensor - alone.factors[name]).abs().max() <= tolerance for name, tensor in rank.factors.items())


@pytest.mark.parametrize("layout", ({}, {"pp": 2}), ids=str)
def test_layers_that_are_computed_again_give_the_same_bits(layout, reference, pool):
    """The embedding is frozen: nothing in front of the first layer asks for a gradient."""
    folder, _ = reference("qwen3")
    ranks = pool.run(2, world.recomputed, folder, SAMPLES, layout)
    assert any(rank for rank in ranks)
    for rank in ranks:
        for name, (kept, again) in rank.items():
            assert kept.norm() > 0 and torch.equal(kept, again), name


def test_it_starts_as_the_base_and_leaves_the_base_as_it_is(one_rank, reference):
    """B is 0 at first; three steps change no weight of the model, and what a step trains is the factors alone."""
    folder, _ = reference("qwen3")
    engine = world.make_engine(folder, random_b=False)
    before = {name: tensor.clone() for name, tensor in engine.model.weights()}
    with engine.trained.adapter.off():
        base = engine.evaluate(SAMPLES, world.TOKEN_MEAN).loss
    first = [engine.train_step(SAMPLES, world.TOKEN_MEAN)[0].loss for _ in range(3)]
    assert first[0] == base and first[2] < first[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.weights())
    stepped = {parameter for part in engine.optimizer.chained_optimizers for parameter in part.get_parameters()}
    numbers = sum(owned.weight.shape[0] * owned.weight.shape[1] for owned in engine.trained.adapter.owned())
    assert sum(parameter.numel() for parameter in stepped) == numbers == world.by_hand(read_architecture(str(folder)))


def test_packed_products_keep_the_adapter(one_rank, reference):
    """Generation on a CPU multiplies by packed copies of the weights, and gives the layers back as they were."""
    folder, _ = reference("qwen3")
    engine = world.make_engine(folder, precision="fp32", distributed_optimizer=False)
    logits, packed = engine.logits(SAMPLES[:2]), PackedProducts(engine.model, 64)
    with packed.in_layers():
        within = engine.logits(SAMPLES[:2])
    after = engine.logits(SAMPLES[:2])
    with engine.trained.adapter.off():
        base = engine.logits(SAMPLES[:2])
    for mine, inside, behind, other in zip(logits, within, after, base):
        assert torch.equal(mine, behind) and relative_error(inside, mine) < 1e-5
        assert mine.norm() == 0 or relative_error(other, mine) > 1e-2


def test_what_does_not_hold_adapters_says_so(one_rank, reference, tmp_path):
    folder, _ = reference("qwen3")
    engine = world.make_engine(folder)
    with pytest.raises(UserError, match=r"lora.rank=3: export_hf\(\) writes no adapter"):
        engine.export_hf(tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_differs_is_found(pool, reference):
    """A replicated factor is compared over TP, as replicated weights are."""
    folder, _ = reference("qwen3")
    for said in pool.run(2, world.with_a_flipped_factor, folder, {"tp": 2}):
        assert "linear_qkv.lora_A" in said
