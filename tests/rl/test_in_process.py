"""The rollout backend in this process: it has the trainer's weights, and its answers do not depend on the ranks."""

import numpy as np
import pytest
import torch
from support.models.families import MODELS, VOCAB, published, tensors_of, write_config
from support.runs import rollouts
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from isoloss.engine.rl.backends.local import transformers_backend
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import UserError

SAMPLING = Sampling(max_new_tokens=20, seed=3)


def make_requests(count: int = 11) -> list[Request]:
    """Three completions of a prompt, of the last one fewer."""
    random = torch.Generator().manual_seed(6)
    prompts = [torch.randint(VOCAB, (1 + 11 * k % 37,), generator=random).tolist() for k in range(count)]
    return [Request(f"{k // 3}/{k}", tuple(prompts[k // 3])) for k in range(count)]


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("llama", 1, {}),
        ("qwen2", 2, {"tp": 2}),
        ("qwen3", 2, {"pp": 2}),
        ("mistral", 2, {"ulysses": 2}),
        ("gpt-oss", 2, {"ep": 2}),
        ("deepseek-v3", 2, {"tp": 2, "ep": 2}),
        ("mimo-v2-flash", 2, {"tp": 2, "ep": 2}),
        ("gemma-4", 2, {"tp": 2}),  # logits are capped before they are sampled from
        ("gemma-4-moe", 2, {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_log_probabilities_are_the_trainers_after_every_sync(family, world, parallel, tiny_hf, pool):
    requests = make_requests()
    ranks = pool.run(world, rollouts.rounds, tiny_hf(family), requests, SAMPLING, parallel, 5)
    print(f"{family} {parallel}: at most {max(r.worst for r in ranks[0]):.1e}, without a sync {ranks[0][1].stale:.1e}")
    for version, done in enumerate(zip(*ranks)):
        assert all(round.completions == done[0].completions for round in done)
        assert [c.id for c in done[0].completions] == [r.id for r in requests]
        assert {v for c in done[0].completions for v in c.versions} == {version}
        assert all(round.worst <= 1e-4 < 1e-1 < round.stale for round in done)


def test_a_name_that_only_code_beside_the_file_knows(tmp_path):
    """Kimi-K2's: the model is built of transformers' own class, of the same numbers."""
    plain = published("deepseek-v3")
    named = {**plain, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    built = []
    for name, config in (("plain", plain), ("named", named)):
        folder = write_config(tmp_path / name, config)
        arch = read_architecture(folder)
        built.append((arch, transformers_backend.build(folder, arch, torch.float32, torch.device("meta"))))
    assert built[0][0] == built[1][0]
    one, other = ({name: t.shape for name, t in model.state_dict().items()} for _, model in built)
    assert one == other and type(built[0][1]) is type(built[1][1])
    wanted, found = (model.config.to_diff_dict() for _, model in built)
    assert {k: v for k, v in found.items() if k != "auto_map"} == wanted


def test_a_class_that_transformers_does_not_choose_by_itself(tmp_path, monkeypatch):
    """Mistral 4's: of the name in the file."""
    folder = write_config(tmp_path / "model", published("mistral-4"))
    monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, Mistral4Config)
    model = transformers_backend.build(folder, read_architecture(folder), torch.float32, torch.device("meta"))
    assert type(model) is Mistral4ForCausalLM


@pytest.mark.parametrize("count", [1, 11])
def test_completions_are_the_same_on_any_number_of_ranks(count, tiny_hf, pool):
    requests = make_requests(count)
    one, *_ = pool.run(1, rollouts.completions, tiny_hf("mistral"), requests, SAMPLING, "fp64")
    for found in pool.run(3, rollouts.completions, tiny_hf("mistral"), requests, SAMPLING, "fp64"):
        assert [(c.id, c.tokens, c.finish) for c in found] == [(c.id, c.tokens, c.finish) for c in one]
        for here, there in zip(found, one):  # transformers norms in fp32
            np.testing.assert_allclose(here.logprobs, there.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "world", "parallel", "kind"),
    [
        ("llama", 1, {}, "transformers"),
        ("llama", 2, {}, "transformers"),
        ("llama", 2, {"pp": 2}, "megatron"),
        ("qwen3-moe", 2, {"ep": 2}, "megatron"),
    ],
    ids=str,
)
def test_pause_resume_and_abort_reach_every_rank(family, world, parallel, kind, tiny_hf, pool):
    requests = make_requests()
    wanted = pool.run(1, rollouts.completions, tiny_hf(family), requests, SAMPLING, "fp64")[0]
    for found in pool.run(world, rollouts.interrupted, tiny_hf(family), requests, SAMPLING, parallel, kind):
        assert [c.tokens for c in found.resumed] == [c.tokens for c in wanted]
        assert all(c.tokens == () and c.finish == "abort" for c in found.aborted)
        assert found.afterwards == found.resumed


def test_a_failure_on_one_rank_is_told_on_all(tiny_hf, pool):
    said = pool.run(2, rollouts.failure_of_rank_1, tiny_hf("llama"), make_requests(), SAMPLING)
    assert said[0] == said[1]
    assert "generation failed on rank 1" in said[0] and "NoneType" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", MODELS)
def test_the_model_is_the_one_that_transformers_loads(family, dtype, tiny_hf, one_rank):
    """Bit for bit, with its experts joined, its embeddings tied, its rotary frequencies and its selection bias."""
    backend = TransformersBackend(tiny_hf(family), dtype, torch.device("cpu"), 4)
    tensors = list(tensors_of(tiny_hf(family)).items())
    backend.update_weights([tensors[:5], [], tensors[5:]], version=0)
    experts = backend.model.config._experts_implementation
    wanted = AutoModelForCausalLM.from_pretrained(tiny_hf(family), dtype=dtype, experts_implementation=experts)
    found = backend.model.state_dict()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    tokens = torch.arange(1, 61)[None]
    with torch.inference_mode():
        assert torch.equal(backend.model(tokens).logits, wanted(tokens).logits)


def test_weights_that_are_not_the_models_are_refused(tiny_hf, one_rank):
    backend = TransformersBackend(tiny_hf("qwen3-moe"), torch.float32, torch.device("cpu"), 4)
    tensors = list(tensors_of(tiny_hf("qwen3-moe")).items())
    name, tensor = tensors[3]
    with pytest.raises(ValueError, match="call update_weights before generate"):
        backend.generate(make_requests(), SAMPLING)
    assert backend.weight_version() is None
    for wrong, said in [
        (tensors[:3] + tensors[4:], f"{name} is missing \\(1 of {len(tensors)}"),
        ([*tensors, tensors[3]], f"{name} came twice"),
        ([*tensors, ("model.more", tensor)], "model.more is not a tensor of the model"),
        ([(name, tensor[:1]), *tensors], f"{name} has shape"),
    ]:
        backend.update_weights([tensors], version=1)
        assert backend.weight_version() == 1
        with pytest.raises(ValueError, match=said):
            backend.update_weights([wrong], version=2)
        assert backend.weight_version() is None
    backend.close()
    backend.close()


def test_mistakes_in_requests_name_them(tiny_hf, one_rank):
    backend = TransformersBackend(tiny_hf("llama"), torch.float32, torch.device("cpu"), 4)
    backend.update_weights([list(tensors_of(tiny_hf("llama")).items())], version=1)
    with pytest.raises(UserError, match=r"^a: the prompt has no tokens"):
        backend.generate([Request("a", ())], SAMPLING)
    with pytest.raises(UserError, match=r"^b: a prompt of 109 tokens"):
        backend.generate([Request("b", (1,) * 109)], SAMPLING)
    with pytest.raises(ValueError, match="two requests are called b"):
        backend.generate([Request(name, (1,)) for name in "abcb"], SAMPLING)
    assert backend.generate([], SAMPLING) == []
    assert [c.id for c in backend.generate([Request(name, (1,)) for name in "abc"], SAMPLING)] == ["a", "b", "c"]
