"""Engine.generate: log-probabilities of training, the same tokens on any layout, three kinds of prompts."""

import pytest
from support.runs import library

from isoloss.engine import Config, Engine, ModelConfig, Sampling, UserError

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


def test_an_engine_shows_what_it_is(engine, inputs):
    assert repr(engine) == f"Engine('{inputs}/model', 4 layers, fp32, layout 1, cpu)"


@pytest.fixture(scope="module")
def engine(inputs) -> Engine:
    return Engine(Config(ModelConfig(inputs / "model", from_scratch=True)))
