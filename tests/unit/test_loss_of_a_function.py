"""A bare function as a loss: weighted as configured, and what is neither is refused."""

import pytest
import torch

from isoloss.engine import Config, Engine, Loss, LossConfig, ModelConfig, Sample, negative_log_likelihood

LENGTHS = (9, 5, 14)


def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(4)
    tokens = [torch.randint(2048, (length,), generator=random) for length in LENGTHS]
    return [Sample(tokens_T, torch.arange(len(tokens_T)) > 2, id=f"row:{len(tokens_T)}") for tokens_T in tokens]


@pytest.fixture
def engine(inputs, one_rank) -> Engine:
    loss = LossConfig("seq-mean-token-sum-norm", norm_length=7)
    return Engine(Config(ModelConfig(inputs / "model", from_scratch=True), loss=loss))


def test_a_bare_function_is_weighted_as_configured(engine):
    wanted = -sum(logprobs_T.sum().item() for logprobs_T in engine.logprobs(samples())) / len(LENGTHS) / 7
    own = Loss.of(negative_log_likelihood, "seq-mean-token-sum-norm", 7)
    for loss in (lambda inputs: -inputs.logprobs_N, own):
        assert engine.evaluate(samples(), loss).loss == pytest.approx(wanted, rel=1e-6)
        assert engine.forward_backward(samples(), loss).loss == pytest.approx(wanted, rel=1e-6)
        engine.zero_grad()
        assert engine.train_step(samples(), loss, lr=0.0)[0].loss == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("loss", [3, None, "nll", Loss])
def test_what_is_no_loss_is_refused(engine, loss):
    for call in (engine.evaluate, engine.forward_backward, engine.train_step):
        with pytest.raises(ValueError, match=r"the loss is .*: give a Loss, or a function of TokenInputs"):
            call(samples(), loss)


def test_a_token_that_the_model_does_not_have_is_named(engine):
    wrong = Sample(torch.tensor([3, 2048, 4]), torch.tensor([False, True, True]), id="row:7")
    for call in (engine.evaluate, engine.train_step):
        with pytest.raises(ValueError, match=r"sample 3 \('row:7'\) has the token 2048"):
            call([*samples(), wrong], negative_log_likelihood)


def test_a_folder_that_is_not_there_is_named(engine, tmp_path):
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/nope: correct the path"):
        engine.load(tmp_path / "nope")
