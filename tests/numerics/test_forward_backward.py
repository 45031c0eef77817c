"""Samples with targets of their own are those of torch's cross-entropy with these labels, and a training pass returns
their log-probabilities, on every kind of layout."""

from dataclasses import replace

import pytest
import torch
from numerics.step_outputs import outputs
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.optimizer_steps import fp64_model
from torch.nn.functional import cross_entropy

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, negative_log_likelihood
from isoloss.parallel import UserError

ROWS = {  # ranks, degrees, and whether what samples begin with alike is computed once
    "1": (1, {}, False),
    "1-shared": (1, {}, True),
    "dp2-shared": (2, {}, True),
    "tp2": (2, {"tp": 2}, False),
    "pp2": (2, {"pp": 2}, False),
    "ulysses2-shared": (2, {"ulysses": 2}, True),
    "ring2": (2, {"ring": 2}, False),
}


def labelled() -> list[Sample]:
    """Labels drawn apart from the tokens, and no token where none is read. Two samples share all their tokens, and a
    third one most; the last has the tokens themselves as targets."""
    random = torch.Generator().manual_seed(9)
    samples = make_samples((30, 41, 17, 29, 2, 33), VOCAB)
    samples[1] = Sample(samples[0].tokens_T, samples[0].mask_T)
    samples[2] = Sample(torch.cat([samples[0].tokens_T[:25], samples[2].tokens_T]), torch.arange(42) > 20)
    for index, sample in enumerate(samples[:-1]):
        targets = torch.randint(VOCAB, (len(sample),), generator=random)
        samples[index] = replace(sample, targets_T=torch.where(sample.mask_T, targets, -1))
    samples[-1] = replace(samples[-1], mask_T=torch.arange(33) > 3)
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def wanted(folder):
    """Loss, gradients and log-probabilities of each target, by transformers and torch."""
    with fp64_model(folder) as model:
        logprobs = []
        for sample in labelled():
            labels = sample.tokens_T if sample.targets_T is None else sample.targets_T
            of_labels = -cross_entropy(
                model(sample.tokens_T[None]).logits[0, :-1], labels[1:].clamp(min=0), reduction="none"
            )
            logprobs.append(torch.where(sample.mask_T, torch.cat([of_labels.new_zeros(1), of_labels]), 0.0))
        loss = -torch.cat(logprobs).sum() / sum(int(sample.mask_T.sum()) for sample in labelled())
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss.item(), gradients, [values.detach() for values in logprobs]


@pytest.mark.parametrize("row", ROWS)
def test_targets_and_what_a_pass_returns_of_them(pool, folder, wanted, row):
    world, parallel, shared = ROWS[row]
    loss, gradients, logprobs = wanted
    ranks = pool.run(world, outputs, folder, labelled(), parallel, shared)
    for of_rank in ranks:
        with_outputs, without, evaluated = of_rank.losses
        assert with_outputs == without == evaluated == pytest.approx(loss, rel=1e-9)
        for name, gradient in of_rank.gradients[0].items():
            assert gradient.equal(of_rank.gradients[1][name]), name  # what is returned costs no bit
            assert (gradient - gradients[name]).norm() <= 1e-8 * gradients[name].norm() + 1e-12, name
        for returned in of_rank.outputs:
            for values, twice, asked, right in zip(*returned.values(), of_rank.logprobs, logprobs, strict=True):
                assert values.dtype == torch.float64 and values.equal(asked) and twice.equal(2 * asked)
                torch.testing.assert_close(asked, right, rtol=1e-9, atol=1e-9)
    assert {name for of_rank in ranks for name in of_rank.gradients[0]} == gradients.keys()


@pytest.mark.parametrize("target", [-1, 2048])
def test_a_target_that_is_no_token_is_refused_by_name(inputs, one_rank, target):
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    tokens = torch.arange(1, 5)
    sample = Sample(tokens, tokens > 3, id="row:7", targets_T=torch.tensor([0, 0, 0, target]))
    with pytest.raises(UserError, match=f"targets_T of sample 'row:7' has the target {target}, .* 0 to 2047: correct"):
        engine.forward_backward([sample], Loss.of(negative_log_likelihood))


def test_an_output_that_is_no_number_a_target_is_refused_by_name(inputs, one_rank):
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    tokens = torch.arange(1, 5)
    loss = replace(Loss.of(negative_log_likelihood), outputs={"mean": lambda inputs: inputs.logprobs_N.mean()})
    with pytest.raises(UserError, match=r"mean: .* returned shape \(\) instead of shape \(2,\)"):
        engine.forward_backward([Sample(tokens, tokens > 2)], loss)
