"""An adapter of the output matrix, with those of the layers: loss and gradients of every factor are PEFT's, on every
kind of layout, for a matrix of its own and for one that is the embedding as well. The vocabulary is padded."""

import warnings

import peft
import pytest
import torch
from peft import load_peft_weights, set_peft_model_state_dict
from support.models import lora as world
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.optimizer_steps import fp64_model

from isoloss.engine.batching.sample import Sample
from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapted_weights
from isoloss.models.lora.peft_source import targets_of
from isoloss.parallel import UserError

SAMPLES = make_samples((30, 41, 17, 29, 2, 33), VOCAB)
LORA = LoraConfig(rank=3, alpha=5.0, seed=1, targets=("all", "lm_head"))
LAYOUTS = {
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2+nosp": (2, {"tp": 2, "sequence_parallel": False}),
    "pp2": (2, {"pp": 2}),
    "ulysses2": (2, {"ulysses": 2}),
}


@pytest.fixture(scope="module", params=[False, True], ids=["own", "tied"])
def model(request, pool, tmp_path_factory):
    """The folder of a model, an exported adapter of it, and PEFT's loss and gradients under that."""
    folder = tmp_path_factory.mktemp("output")
    write_folder("qwen3", folder / "model", tie_word_embeddings=request.param)
    options = {"lora": LORA, "max_tokens": 10_000}
    ((exported),) = pool.run(1, world.exported, folder / "model", folder / "adapter", SAMPLES, options)
    with fp64_model(folder / "model") as base, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(
            base, str(folder / "adapter"), is_trainable=True, autocast_adapter_dtype=False
        )
        weights = load_peft_weights(str(folder / "adapter"), device="cpu")
        loaded = set_peft_model_state_dict(adapted, weights)
        assert loaded.unexpected_keys == [] and not [key for key in loaded.missing_keys if "lora" in key]
        logprobs = []
        for sample in SAMPLES:
            logits = adapted(sample.tokens_T[None]).logits[0, :-1].log_softmax(1)
            logprobs.append(logits.gather(1, sample.tokens_T[1:, None]).squeeze(1)[sample.mask_T[1:]])
        loss = -torch.cat(logprobs).mean()
        loss.backward()
        gradients = {
            name.removeprefix("base_model.model.").replace(".default", ""): p.grad
            for name, p in adapted.named_parameters()
            if p.grad is not None
        }
    assert exported == pytest.approx(loss.item(), rel=1e-12)
    return folder, loss.item(), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_pefts(layout, model, pool):
    folder, loss, gradients = model
    ranks, parallel = LAYOUTS[layout]
    seen = set()
    for rank in pool.run(ranks, world.step_of, folder / "model", SAMPLES, {"lora": LORA, **parallel}):
        assert rank.loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in rank.gradients.items():
            assert (gradient - gradients[name]).norm() <= 1e-12 * gradients[name].norm(), name
        seen |= rank.gradients.keys()
    assert seen == gradients.keys() and {"lm_head.lora_A.weight", "lm_head.lora_B.weight"} <= seen


@pytest.mark.parametrize("options", [{"distributed_optimizer": False}, {"precision": "fp32"}], ids=str)
def test_another_layout_goes_on_from_a_checkpoint(options, model, pool, tmp_path):
    folder, out, common = model[0] / "model", tmp_path / "checkpoint", {"lora": LORA, **options}
    wanted, _ = pool.run(2, world.saved, folder, out, SAMPLES, {"tp": 2, **common})
    for ranks, parallel in ((1, {}), (2, {"pp": 2})):
        for found in pool.run(ranks, world.resumed, folder, out, SAMPLES, {**parallel, **common}):
            assert found == pytest.approx(wanted, rel=1e-4 if "precision" in options else 1e-12)


def test_all_logits_have_the_adapter(model, one_rank):
    """As a backend decodes by them."""
    engine = world.make_engine(model[0] / "model", LORA)
    with engine.trained.adapter.off():
        base = engine.logprobs(SAMPLES)
    for sample, logits, logprobs, without in zip(SAMPLES, engine.logits(SAMPLES), engine.logprobs(SAMPLES), base):
        found = logits.log_softmax(1).gather(1, sample.tokens_T[:, None]).squeeze(1)[sample.mask_T]
        torch.testing.assert_close(found, logprobs[sample.mask_T], rtol=1e-12, atol=1e-12)
        assert not len(found) or not torch.allclose(found, without[sample.mask_T])
        every = sample.mask_T.clone().fill_(True)
        every[0] = False
        logits = engine.logits([Sample(sample.tokens_T, every)])[0][1:].log_softmax(1)
        (prompt,) = engine.prompt_logprobs([sample.tokens_T.tolist()], top_k=3)
        wanted = logits.topk(3)
        assert torch.equal(prompt.top_ids_TK[1:], wanted.indices)
        torch.testing.assert_close(prompt.top_logprobs_TK[1:], wanted.values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "targets", [("all", "lm_head"), ("all",), ("lm_head",), ("q_proj", "k_proj", "v_proj", "lm_head")]
)
def test_what_is_adapted_has_its_name(targets, model):
    arch = read_architecture(model[0] / "model")
    found = targets_of(arch, adapted_weights(arch, targets))
    assert found is not None and sorted(found) == sorted(targets)


def test_merged_weights(model, one_rank):
    """Of a matrix of its own; the embedding is not what the adapter is added to."""
    engine = world.make_engine(model[0] / "model", LORA)
    if engine.arch.tie_embeddings:
        with pytest.raises(UserError, match=r"lora\.targets names lm_head, and this model's output matrix is its em"):
            list(engine.weight_stream(1 << 20, "every rank"))
        return
    merged = {name: tensor.clone() for bucket in engine.weight_stream(1 << 20, "every rank") for name, tensor in bucket}
    own = {name: tensor for name, tensor, _ in engine.model.hf_tensors(torch.float64)}
    factors = world.all_factors(engine.arch, LORA)
    added = LORA.scale(3) * factors["lm_head.lora_B.weight"] @ factors["lm_head.lora_A.weight"]
    torch.testing.assert_close(merged["lm_head.weight"], own["lm_head.weight"] + added)
    assert merged["model.embed_tokens.weight"].equal(own["model.embed_tokens.weight"])
