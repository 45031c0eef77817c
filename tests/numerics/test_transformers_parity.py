"""Independent truth: the engine's logits, loss, gradients and log-probabilities are those of Hugging Face transformers.

transformers runs one sequence at a time, unpadded, with its eager attention; the engine packs, shards and chunks. In
fp64 the places where transformers computes in fp32 whatever the model's type is (norms, routers, the attention's
softmax) are compiled again in fp64; rotary angles stay fp32 on both sides and are bit-equal.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from numerics import embedding_gradients
from support.models import transformers_fp64
from support.models.families import MODELS, SPARSE, VOCAB, write_folder
from support.models.multimodal import WRAPPERS
from support.models.transformers_parity import (
    TOKEN_MEAN,
    Evaluated,
    evaluate,
    gradients_by_hf_name,
    make_engine,
    make_samples,
    train_and_export,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from isoloss.engine.batching.sample import Sample
from isoloss.models.families.registry import FAMILIES
from isoloss.models.kinds.weight import Part
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.parallel import attention, loss_head
from isoloss.parallel.ops import row_blocks

LENGTHS = (2, 40, 17, 1, 29, 33, 110, 9, 12)  # one far beyond the windows and the original lengths of scaled rotations
# Relative errors of the loss and, norm-wise, of each gradient.
TOLERANCE = {"fp32": (1e-6, 1e-5), "fp64": (1e-10, 1e-10)}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.fixture(params=MODELS)
def folder(request, tmp_path) -> Path:
    return write_folder(request.param, tmp_path / "in")


SCALED_COSINES = ("qwen2-yarn", "gpt-oss", "deepseek-v3", "mistral-4")


@pytest.fixture(params=[name for name in MODELS if name not in SCALED_COSINES])
def exact_folder(request, tmp_path) -> Path:
    """YaRN that scales cosines is left out of fp64: transformers rounds the products to fp32."""
    return write_folder(request.param, tmp_path / "in")


def test_every_family_is_compared():
    compared = {config_class.model_type for config_class, _ in MODELS.values()}
    assert compared | WRAPPERS == set(FAMILIES.values()) and not compared & WRAPPERS


def transformers_model(folder: Path, precision: str, monkeypatch) -> PreTrainedModel:
    eager = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if precision == "fp64" else {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    model = model.to(DTYPES[precision]).eval()
    if precision == "fp64":
        module = sys.modules[type(model).__module__]
        transformers_fp64.compute_in(module, monkeypatch)
        transformers_fp64.scale_embedding(model)
    return model


def transformers_logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """The logits that predict each target of a sample, [T, V]; 0 where mask_T is False."""
    if len(sample) == 1:
        return torch.zeros(1, VOCAB, dtype=model.dtype)
    logits = model(input_ids=sample.tokens_T[None], use_cache=False).logits[0]
    assert logits.dtype == model.dtype
    return torch.cat([logits.new_zeros(1, VOCAB), logits[:-1]]) * sample.mask_T[:, None]


def transformers_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """log p of every target of a sample, [T]; 0 where mask_T is False."""
    logprobs = torch.log_softmax(transformers_logits(model, sample), -1).gather(1, sample.tokens_T[:, None]).squeeze(1)
    return logprobs * sample.mask_T


def transformers_loss_and_gradients(model: PreTrainedModel, samples: Sequence[Sample], path: Path):
    """The mean loss of a token, and its gradient by the names of tensors in files: transformers joins experts in
    memory, so the gradients take the place of the weights and are saved by it."""
    targets = sum(int(sample.mask_T.sum()) for sample in samples)
    loss = 0.0
    for sample in samples:
        part = -transformers_logprobs(model, sample).sum() / targets
        loss += part.item()
        if part.requires_grad:
            part.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(path)
    reader = HFReader(path)
    names = [name for name in reader.names if not name.endswith(("e_score_correction_bias", "layer_scalar"))]
    return loss, {name: reader.get(Part(name, reader.shape(name))) for name in names}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    assert got.shape == wanted.shape and wanted.norm() > 0
    return float((got - wanted).norm() / wanted.norm())


def compare_step(folder: Path, precision: str, monkeypatch, lengths=LENGTHS, max_tokens: int = 128) -> None:
    samples = make_samples(lengths, VOCAB)
    engine = make_engine(folder, precision, max_tokens=max_tokens, distributed_optimizer=False)
    metrics = engine.forward_backward(samples, TOKEN_MEAN)
    gradients = gradients_by_hf_name(engine)
    model = transformers_model(folder, precision, monkeypatch)
    loss, wanted = transformers_loss_and_gradients(model, samples, folder.parent / "gradients")

    assert metrics.micro_batches > 1
    assert gradients.keys() == wanted.keys()
    errors = {name: relative_error(gradients[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.__getitem__)
    loss_error = abs(metrics.loss - loss) / loss
    print(f"relative errors: loss {loss_error:.1e}, gradients at most {errors[worst]:.1e} ({worst})")
    loss_tolerance, gradient_tolerance = TOLERANCE[precision]
    assert loss_error <= loss_tolerance
    assert errors[worst] <= gradient_tolerance, worst


def test_loss_and_gradients_are_those_of_transformers(folder, one_rank, monkeypatch):
    compare_step(folder, "fp32", monkeypatch)


def test_fp64_loss_and_gradients_are_those_of_transformers(exact_folder, one_rank, monkeypatch):
    compare_step(exact_folder, "fp64", monkeypatch)


@pytest.mark.parametrize("name", ("mistral", "gpt-oss"))
def test_long_documents_and_a_vocabulary_in_chunks(name, one_rank, monkeypatch, tmp_path):
    """Micro-batches of more tokens than the blocks in which masked attention takes its queries, and of more labeled
    positions than the loss head takes at a time: a window, and sinks, reach over the borders."""
    monkeypatch.setattr(row_blocks, "CACHED_ELEMENTS", 5 * VOCAB)
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 100 * VOCAB)
    folder = write_folder(name, tmp_path / "in", max_position_embeddings=2048)
    lengths = (1200, 3, 700, 9)
    assert max(lengths) > 2 * attention.QUERY_BLOCK
    compare_step(folder, "fp32", monkeypatch, lengths, max_tokens=1300)


def test_logits_are_those_of_transformers(folder, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB, seed=2)
    logits = torch.cat(make_engine(folder, "fp32").logits(samples))
    model = transformers_model(folder, "fp32", monkeypatch)
    with torch.no_grad():
        wanted = torch.cat([transformers_logits(model, sample) for sample in samples]).double()
    print(f"logits: norm-wise {relative_error(logits, wanted):.1e}, largest {(logits - wanted).abs().max():.1e}")
    assert relative_error(logits, wanted) <= 2e-6


def test_logprobs_are_those_of_transformers(exact_folder, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB, seed=2)
    logprobs = make_engine(exact_folder, "fp64").logprobs(samples)
    model = transformers_model(exact_folder, "fp64", monkeypatch)
    with torch.no_grad():
        wanted = [transformers_logprobs(model, sample) for sample in samples]
    torch.testing.assert_close(torch.cat(logprobs), torch.cat(wanted), rtol=1e-10, atol=1e-10)


def test_rotary_angles_are_bit_equal_to_those_of_transformers(folder, one_rank):
    """Both sides compute them in fp32 even in fp64: one rounding apart would cost the fp64 comparison its 1e-10."""
    engine = make_engine(folder, "fp64")
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    positions = torch.arange(engine.arch.max_positions)
    kinds = [{"layer_type": kind} for kind in getattr(rotary, "layer_types", ())] or [{}]
    inv_freqs = engine.chunks[0].module.inv_freq.split([channels // 2 for _, channels in engine.arch.ropes])
    for kind, inv_freq, (rope, _) in zip(kinds, inv_freqs, engine.arch.ropes, strict=True):
        cos, sin = rotary(torch.zeros((), dtype=torch.float32), positions[None], **kind)
        angles = torch.outer(positions.float(), inv_freq)
        if cos.shape[-1] != angles.shape[-1]:  # gpt-oss keeps one half
            angles = angles.repeat(1, 2)
        factor = rope.cos_sin_factor
        assert torch.equal(cos[0], angles.cos() * factor) and torch.equal(sin[0], angles.sin() * factor)


LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+nosp": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "ulysses2": {"ulysses": 2},
    "ring2": {"ring": 2},
    "ulysses2+ring2": {"ulysses": 2, "ring": 2},
    "tp2+pp2": {"tp": 2, "pp": 2},
    "ep2": {"ep": 2},
    "tp2+ep2": {"tp": 2, "ep": 2},
    "etp2": {"tp": 2, "etp": 2},
}


def admits(name: str, parallel: dict) -> bool:
    """Experts need sequence parallelism under tp, and with biases are not divided over etp; dense models have none."""
    if name not in SPARSE:
        return not {"ep", "etp"} & parallel.keys()
    return parallel.get("sequence_parallel", True) and not (name == "gpt-oss" and "etp" in parallel)


SHARDED_SAMPLES = make_samples(LENGTHS, VOCAB, seed=4)
SHARDED = [(name, layout) for name in MODELS for layout, parallel in LAYOUTS.items() if admits(name, parallel)]


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory) -> Callable[[str], tuple[Path, Evaluated]]:
    """reference(family) -> its folder, and what one rank makes of SHARDED_SAMPLES."""
    made: dict[str, tuple[Path, Evaluated]] = {}

    def of(family: str) -> tuple[Path, Evaluated]:
        if family not in made:
            folder = write_folder(family, tmp_path_factory.mktemp(family))
            made[family] = folder, pool.run(1, evaluate, folder, SHARDED_SAMPLES, {})[0]
        return made[family]

    return of


@pytest.mark.parametrize(("name", "layout"), SHARDED)
def test_layouts_give_the_logits_and_gradients_of_one_rank(name, layout, reference, pool):
    """Latent attention, windows, sinks and experts, sharded, in fp64."""
    parallel = LAYOUTS[layout]
    folder, alone = reference(name)
    world = 4 if layout in ("tp2+pp2", "ulysses2+ring2") else 2
    ranks = pool.run(world, evaluate, folder, SHARDED_SAMPLES, parallel)
    for rank in ranks:
        assert relative_error(rank.logits, alone.logits) <= 1e-11
        assert rank.grad_norm == pytest.approx(alone.grad_norm, rel=1e-10)
        for tensor, gradient in rank.gradients.items():
            assert relative_error(gradient, alone.gradients[tensor]) <= 1e-10, tensor
    assert {tensor for rank in ranks for tensor in rank.gradients} == alone.gradients.keys()


@pytest.mark.parametrize(
    ("family", "parallel", "asked"),
    [
        ("qwen2", {}, True),  # whose output matrix is its embedding
        ("llama", {}, True),
        ("qwen2", {"pp": 2}, True),  # on the first stage alone
        ("qwen2", {"tp": 2}, False),
    ],
    ids=str,
)
def test_an_embedding_that_adds_its_gradient_in_place(family, parallel, asked, pool, tmp_path):
    """On a CPU, where it is whole. What autograd brings then has no meaning: here it is NaN, and reaches nobody."""
    world = 2 if parallel else 1
    folder = write_folder(family, tmp_path)
    ranks = pool.run(world, embedding_gradients.both_ways, folder, SHARDED_SAMPLES, parallel)
    for by_autograd, in_place, _ in ranks:
        assert in_place.grad_norm == pytest.approx(by_autograd.grad_norm, rel=1e-12)
        for name, gradient in by_autograd.gradients.items():
            assert relative_error(in_place.gradients[name], gradient) <= 1e-12, name
    assert (ranks[0][2] > 0) == asked


def test_more_tp_ranks_than_heads_of_keys(pool, tmp_path):
    """A rank has half of the queries of a group, and their gates alone."""
    sizes = {"num_key_value_heads": 1, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    folder = write_folder("qwen3.5", tmp_path / "in", **sizes)
    (alone,) = pool.run(1, evaluate, folder, SHARDED_SAMPLES, {})
    for rank in pool.run(2, evaluate, folder, SHARDED_SAMPLES, {"tp": 2}):
        assert relative_error(rank.logits, alone.logits) <= 1e-11
        for tensor, gradient in rank.gradients.items():
            assert relative_error(gradient, alone.gradients[tensor]) <= 1e-10, tensor


EXPORTED = [(name, layout) for name in MODELS for layout in ("tp2+pp2", "ep2" if name in SPARSE else "1")]


@pytest.mark.parametrize(("name", "layout"), EXPORTED)
def test_an_exported_model_is_the_trained_one(name, layout, tmp_path, pool):
    """Bit-equal weights in transformers after a few steps of a (sharded) engine, and its log-probabilities."""
    folder = write_folder(name, tmp_path / "in")
    samples = make_samples(LENGTHS, VOCAB, seed=3)
    world, parallel = {"1": (1, {}), "ep2": (2, {"ep": 2}), "tp2+pp2": (4, {"tp": 2, "pp": 2})}[layout]
    ranks = pool.run(world, train_and_export, folder, tmp_path / "out", samples, 3, parallel)

    losses = ranks[0].losses
    assert losses[-1] < 0.9 * losses[0]  # it was trained: the weights are not those of the input folder
    reader = HFReader(tmp_path / "out")
    trained = {tensor: weight for rank in ranks for tensor, weight in rank.weights.items()}
    assert trained.keys() == set(reader.names)
    for tensor, weight in trained.items():
        written = reader.get(Part(tensor, reader.shape(tensor)))
        if weight.shape == written.shape:  # with ep, a rank has a share of what holds all experts
            assert torch.equal(weight, written), tensor
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert model.dtype == torch.float32
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        wanted = torch.cat([transformers_logprobs(model, sample) for sample in samples])
    for rank in ranks:
        torch.testing.assert_close(torch.cat(rank.logprobs).float(), wanted, rtol=1e-5, atol=1e-5)
