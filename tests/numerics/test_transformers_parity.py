"""Independent truth: the engine's loss, gradients and log-probabilities are those of Hugging Face transformers.

transformers runs one sequence at a time, unpadded, with its eager attention; the engine packs, shards and chunks. In
fp64 the places where transformers computes in fp32 whatever the model's type is (norms and the attention's softmax) are
replaced by fp64 twins; rotary angles stay fp32 on both sides and are bit-equal.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from worlds.transformers_parity import (
    TOKEN_MEAN,
    gradients_by_hf_name,
    make_engine,
    make_samples,
    train_and_export,
)

from isoloss.engine.batch import Sample

VOCAB = 307  # prime: every TP degree pads it
LENGTHS = (2, 40, 17, 1, 29, 33, 9, 12)
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    # Wavelengths below 10.7, between, and above 21.3 all occur among the 8 frequencies of a head of 16.
    "llama": LlamaConfig(**SIZES, hidden_size=64, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2,
                         rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=6, num_key_value_heads=2,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=20, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                         tie_word_embeddings=False),
}  # fmt: skip
# Relative errors of the loss and, norm-wise, of each gradient.
TOLERANCE = {"fp32": (1e-6, 1e-5), "fp64": (1e-10, 1e-10)}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path) -> Path:
    """A Hugging Face folder with every weight random: matrices, norms, biases."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            else:  # large enough that attention is far from uniform
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def transformers_model(folder: Path, precision: str, monkeypatch) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(DTYPES[precision]).eval()
    if precision == "fp64":
        module = sys.modules[type(model).__module__]
        monkeypatch.setattr(module, "eager_attention_forward", eager_attention_fp64)
        monkeypatch.setattr(type(model.model.norm), "forward", rms_norm_fp64)
    return model


def rms_norm_fp64(self: nn.Module, x: Tensor) -> Tensor:
    """transformers' RMSNorm without its casts to fp32."""
    assert x.dtype == torch.float64
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def eager_attention_fp64(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """transformers' eager attention without its softmax in fp32."""
    assert query.dtype == torch.float64 and dropout == 0.0
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def transformers_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """log p of every target of a sample, [T]; 0 where mask_T is False."""
    if len(sample) == 1:
        return torch.zeros(1, dtype=model.dtype)
    logits = model(input_ids=sample.tokens_T[None], use_cache=False).logits[0]
    assert logits.dtype == model.dtype
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, sample.tokens_T[1:, None]).squeeze(1)
    return torch.cat([logprobs.new_zeros(1), logprobs * sample.mask_T[1:]])


def transformers_loss_and_gradients(model: PreTrainedModel, samples: Sequence[Sample]):
    targets = sum(int(sample.mask_T.sum()) for sample in samples)
    loss = 0.0
    for sample in samples:
        part = -transformers_logprobs(model, sample).sum() / targets
        loss += part.item()
        if part.requires_grad:
            part.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    assert got.shape == wanted.shape and wanted.norm() > 0
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_loss_and_gradients_are_those_of_transformers(folder, precision, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB)
    engine = make_engine(folder, precision, distributed_optimizer=False)
    metrics = engine.forward_backward(samples, TOKEN_MEAN)
    gradients = gradients_by_hf_name(engine)
    loss, wanted = transformers_loss_and_gradients(transformers_model(folder, precision, monkeypatch), samples)

    assert metrics.micro_batches > 1
    assert gradients.keys() == wanted.keys()
    errors = {name: relative_error(gradients[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.__getitem__)
    loss_error = abs(metrics.loss - loss) / loss
    print(f"relative errors: loss {loss_error:.1e}, gradients at most {errors[worst]:.1e} ({worst})")
    loss_tolerance, gradient_tolerance = TOLERANCE[precision]
    assert loss_error <= loss_tolerance
    assert errors[worst] <= gradient_tolerance, worst


def test_logprobs_are_those_of_transformers(folder, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB, seed=2)
    logprobs = make_engine(folder, "fp64").logprobs(samples)
    model = transformers_model(folder, "fp64", monkeypatch)
    with torch.no_grad():
        wanted = [transformers_logprobs(model, sample) for sample in samples]
    torch.testing.assert_close(torch.cat(logprobs), torch.cat(wanted), rtol=1e-10, atol=1e-10)


def test_rotary_angles_are_bit_equal_to_those_of_transformers(folder, one_rank):
    """Both sides compute them in fp32 even in fp64: one rounding apart would cost the fp64 comparison its 1e-10."""
    engine = make_engine(folder, "fp64")
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    positions = torch.arange(engine.arch.max_positions)
    cos, sin = rotary(torch.zeros((), dtype=torch.float32), positions[None])
    angles = torch.outer(positions.float(), engine.chunks[0].module.inv_freq).repeat(1, 2)
    assert torch.equal(cos[0], angles.cos()) and torch.equal(sin[0], angles.sin())


@pytest.mark.parametrize("layout", ["1", "tp2+pp2"])
def test_an_exported_model_is_the_trained_one(folder, layout, tmp_path, pool):
    """Bit-equal weights in transformers after a few steps of a (sharded) engine, and its log-probabilities."""
    samples = make_samples(LENGTHS, VOCAB, seed=3)
    degree = 2 if layout == "tp2+pp2" else 1
    parallel = {"tp": degree, "pp": degree}
    ranks = pool.run(degree**2, train_and_export, folder, tmp_path / "out", samples, 3, parallel)

    losses = ranks[0].losses
    assert losses[-1] < 0.9 * losses[0]  # it was trained: the weights are not those of the input folder
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert model.dtype == torch.float32
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = {name: weight for rank in ranks for name, weight in rank.weights.items()}
    parameters = dict(model.named_parameters())
    assert trained.keys() == parameters.keys()
    assert not [name for name in trained if not torch.equal(trained[name], parameters[name])]
    with torch.no_grad():
        wanted = torch.cat([transformers_logprobs(model, sample) for sample in samples])
    for rank in ranks:
        torch.testing.assert_close(torch.cat(rank.logprobs).float(), wanted, rtol=1e-5, atol=1e-5)
