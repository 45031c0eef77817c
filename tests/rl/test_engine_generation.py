"""Engine.generate: log-probabilities of training, the same tokens on any layout, three kinds of prompts."""

import pytest
import torch
from support.runs import library

from isoloss.engine import Config, Engine, ModelConfig, Sample, Sampling, UserError
from isoloss.engine.rl import generation

PROMPTS = ["What is 2 plus 2?", [{"role": "user", "content": "Hello"}], [5, 6, 7], "What is 2 plus 2?", [5, 6, 7]]
IDS = ["a", "b", "c", "d", "e"]


@pytest.fixture(scope="module")
def alone(pool, inputs) -> list:
    (found,) = pool.run(1, library.generated, inputs / "model", {}, PROMPTS, IDS)
    assert found[1] <= 2e-6
    return found[0]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"ulysses": 2}, {}], ids=str)
def test_every_rank_of_any_layout_has_the_completions_of_one(parallel, alone, pool, inputs):
    for found, difference in pool.run(2, library.generated, inputs / "model", parallel, PROMPTS, IDS):
        assert found == alone and difference <= 2e-6


def test_an_id_is_the_seed_of_its_completion(alone, pool, inputs):
    tokens = [tokens for _, tokens, _ in alone]
    assert [id for id, _, _ in alone] == IDS and len({*tokens}) == 5  # prompts given twice are answered twice
    (found,) = pool.run(1, library.generated, inputs / "model", {}, PROMPTS[2:4], IDS[2:4])
    assert found[0] == alone[2:4]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one text", "prompts is one text: give a list of prompts"),
        ([""], "prompt 0: `prompt` is empty"),
        ([[1], [2048]], "prompt 1 has the token 2048, and the model's are 0 to 2047"),
        ([[1.5]], "prompt 0 has the token 1.5"),
        ([7], "prompt 0 is a int: give text, messages, or a list of token ids"),
        ([[]], "0: the prompt has no tokens"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_id(prompts, message, engine):
    with pytest.raises(UserError) as refused:
        engine.generate(prompts, Sampling(4))
    assert message in str(refused.value)


def test_completions_end_with_the_models_turn_unless_told_otherwise(engine, monkeypatch):
    ends = {*range(0, 2048, 3)}
    monkeypatch.setattr(generation, "stop_tokens", lambda folder, tokenizer, variables: (*ends,))
    own, given = (engine.generate([[5, 6]] * 4, Sampling(30, stop_token_ids=stops)) for stops in ((), (1, 4)))
    for completion in own:
        assert [token in ends for token in completion.tokens] == [False] * (len(completion.tokens) - 1) + [True]
    assert any(ends & {*completion.tokens[:-1]} for completion in given)


def test_one_process_holds_several_engines(engine, tiny_hf):
    """What the first one generates and computes is the same after a second one, of another family, has done so."""
    sample = Sample(torch.arange(9), torch.arange(9) > 3)

    def numbers() -> list:
        completions = engine.generate([[5, 6]] * 3, Sampling(5))
        return [*[(*c.tokens, *c.logprobs) for c in completions], engine.logprobs([sample])[0].tolist()]

    first = numbers()
    other = Engine(Config(ModelConfig(tiny_hf("gemma-4"))))
    other.generate([[5, 6]], Sampling(5, stop_token_ids=(1,)))
    assert numbers() == first


def test_with_several_ranks_an_engine_that_lost_its_groups_says_so(pool, inputs):
    for refusal in pool.run(2, library.lost_groups, inputs / "model"):
        assert refusal.startswith("this Engine lost its process groups to a later one")


def test_an_engine_shows_what_it_is(engine, inputs):
    assert repr(engine) == f"Engine('{inputs}/model', 4 layers, fp32, layout 1, cpu)"


@pytest.fixture
def engine(inputs, one_rank) -> Engine:
    return Engine(Config(ModelConfig(inputs / "model", from_scratch=True)))
