"""Independent truth: the engine's logits, loss, gradients and log-probabilities are those of Hugging Face transformers.

transformers runs one sequence at a time, unpadded, with its eager attention; the engine packs, shards and chunks. In
fp64 the places where transformers computes in fp32 whatever the model's type is (norms and the attention's softmax) are
replaced by fp64 twins; rotary angles stay fp32 on both sides and are bit-equal. Routers of transformers compute in fp32
at several places, so that models with experts are compared in fp32.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from worlds.transformers_parity import (
    TOKEN_MEAN,
    evaluate,
    gradients_by_hf_name,
    make_engine,
    make_samples,
    train_and_export,
)

from isoloss.engine.batch import Sample
from isoloss.models.checkpoint_hf import HFReader
from isoloss.models.registry import FAMILIES
from isoloss.models.weights import Part

VOCAB = 307  # prime: every TP degree pads it
LENGTHS = (2, 40, 17, 1, 29, 33, 110, 9, 12)  # one far beyond the windows and the original lengths of scaled rotations
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 4,
            "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "kv_lora_rank": 20,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "num_nextn_predict_layers": 0}  # fmt: skip
DENSE: dict[str, PreTrainedConfig] = {
    # Wavelengths below 10.7, between, and above 21.3 all occur among the 8 frequencies of a head of 16.
    "llama": LlamaConfig(**SIZES, hidden_size=64, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2,
                         rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, hidden_size=48, intermediate_size=80, num_attention_heads=6,
                             num_key_value_heads=2, head_dim=12, sliding_window=11, rope_parameters=PLAIN_ROPE),
    "qwen2": Qwen2Config(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=6, num_key_value_heads=2,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=6,
                              num_key_value_heads=2, rope_parameters=YARN_ROPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=20, rope_parameters=PLAIN_ROPE, tie_word_embeddings=False),
}  # fmt: skip
SPARSE: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=20, moe_intermediate_size=28, num_experts=6,
                                num_experts_per_tok=3, norm_topk_prob=True, rope_parameters=PLAIN_ROPE),
    "qwen3-moe-unnormalized": Qwen3MoeConfig(
        **SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
        moe_intermediate_size=28, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False,
        rope_parameters=PLAIN_ROPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, hidden_size=48, intermediate_size=40, num_attention_heads=6,
                             num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                             rope_parameters=PLAIN_ROPE),
    "deepseek-v3": DeepseekV3Config(**SIZES, **DEEPSEEK, n_group=4, topk_group=2, n_shared_experts=2,
                                    first_k_dense_replace=1, q_lora_rank=26, routed_scaling_factor=1.5,
                                    rope_parameters={**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2}),
    "deepseek-v3-plain": DeepseekV3Config(**SIZES, **DEEPSEEK, n_group=1, topk_group=1, n_shared_experts=1,
                                          first_k_dense_replace=0, q_lora_rank=None, norm_topk_prob=False,
                                          rope_parameters=PLAIN_ROPE),
    "glm-4.5": Glm4MoeConfig(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=20, moe_intermediate_size=28, n_routed_experts=8,
                             num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True,
                             use_qk_norm=True, routed_scaling_factor=2.0, num_nextn_predict_layers=0,
                             rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5}),
    "gpt-oss": GptOssConfig(**SIZES, hidden_size=48, intermediate_size=40, num_attention_heads=6,
                            num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                            sliding_window=9, rope_parameters={**YARN_ROPE, "truncate": False}),
}  # fmt: skip
CONFIGS = DENSE | SPARSE
# Relative errors of the loss and, norm-wise, of each gradient.
TOLERANCE = {"fp32": (1e-6, 1e-5), "fp64": (1e-10, 1e-10)}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def write_folder(name: str, path: Path) -> Path:
    """A Hugging Face folder with every weight random: matrices, norms, biases, sinks."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1)  # of the size of the scores' differences
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.5)
            elif tensor.ndim == 1:
                tensor.normal_(1.0, 0.3)
            else:  # large enough that attention is far from uniform
                tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path) -> Path:
    return write_folder(request.param, tmp_path / "in")


@pytest.fixture(params=[name for name in DENSE if name != "qwen2-yarn"])
def dense_folder(request, tmp_path) -> Path:
    """YaRN is left out of fp64: transformers rounds its scaled cosines to fp32."""
    return write_folder(request.param, tmp_path / "in")


def test_every_family_is_compared():
    assert {config.model_type for config in CONFIGS.values()} == {
        module.__name__.rpartition(".")[2] for module in FAMILIES.values()
    }


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
    names = [name for name in reader.names if not name.endswith("e_score_correction_bias")]
    return loss, {name: reader.get(Part(name, reader.shape(name))) for name in names}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    assert got.shape == wanted.shape and wanted.norm() > 0
    return float((got - wanted).norm() / wanted.norm())


def compare_step(folder: Path, precision: str, monkeypatch) -> None:
    samples = make_samples(LENGTHS, VOCAB)
    engine = make_engine(folder, precision, distributed_optimizer=False)
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


def test_fp64_loss_and_gradients_are_those_of_transformers(dense_folder, one_rank, monkeypatch):
    compare_step(dense_folder, "fp64", monkeypatch)


def test_logits_are_those_of_transformers(folder, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB, seed=2)
    logits = torch.cat(make_engine(folder, "fp32").logits(samples))
    model = transformers_model(folder, "fp32", monkeypatch)
    with torch.no_grad():
        wanted = torch.cat([transformers_logits(model, sample) for sample in samples]).double()
    print(f"logits: norm-wise {relative_error(logits, wanted):.1e}, largest {(logits - wanted).abs().max():.1e}")
    assert relative_error(logits, wanted) <= 2e-6


def test_logprobs_are_those_of_transformers(dense_folder, one_rank, monkeypatch):
    samples = make_samples(LENGTHS, VOCAB, seed=2)
    logprobs = make_engine(dense_folder, "fp64").logprobs(samples)
    model = transformers_model(dense_folder, "fp64", monkeypatch)
    with torch.no_grad():
        wanted = [transformers_logprobs(model, sample) for sample in samples]
    torch.testing.assert_close(torch.cat(logprobs), torch.cat(wanted), rtol=1e-10, atol=1e-10)


def test_rotary_angles_are_bit_equal_to_those_of_transformers(folder, one_rank):
    """Both sides compute them in fp32 even in fp64: one rounding apart would cost the fp64 comparison its 1e-10."""
    engine = make_engine(folder, "fp64")
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    positions = torch.arange(engine.arch.max_positions)
    cos, sin = rotary(torch.zeros((), dtype=torch.float32), positions[None])
    angles = torch.outer(positions.float(), engine.chunks[0].module.inv_freq)
    if cos.shape[-1] != angles.shape[-1]:  # gpt-oss keeps one half
        angles = angles.repeat(1, 2)
    factor = engine.arch.rope.cos_sin_factor
    assert torch.equal(cos[0], angles.cos() * factor) and torch.equal(sin[0], angles.sin() * factor)


LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+nosp": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "ulysses2": {"ulysses": 2},
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


SHARDED = [(name, layout) for name in CONFIGS for layout, parallel in LAYOUTS.items() if admits(name, parallel)]


@pytest.mark.parametrize(("name", "layout"), SHARDED)
def test_layouts_give_the_logits_and_gradients_of_one_rank(name, layout, tmp_path, pool):
    """Latent attention, windows, sinks and experts, sharded, in fp64."""
    parallel = LAYOUTS[layout]
    folder = write_folder(name, tmp_path / "in")
    samples = make_samples(LENGTHS, VOCAB, seed=4)
    world = 4 if layout == "tp2+pp2" else 2
    (reference,) = pool.run(1, evaluate, folder, samples, {})
    ranks = pool.run(world, evaluate, folder, samples, parallel)
    for rank in ranks:
        assert relative_error(rank.logits, reference.logits) <= 1e-11
        assert rank.grad_norm == pytest.approx(reference.grad_norm, rel=1e-10)
        for tensor, gradient in rank.gradients.items():
            assert relative_error(gradient, reference.gradients[tensor]) <= 1e-10, tensor
    assert {tensor for rank in ranks for tensor in rank.gradients} == reference.gradients.keys()


EXPORTED = [(name, layout) for name in CONFIGS for layout in ("tp2+pp2", "ep2" if name in SPARSE else "1")]


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
