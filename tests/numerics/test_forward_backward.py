"""Samples with targets of their own are those of torch's cross-entropy with these labels, and a training pass returns
their log-probabilities, on every kind of layout."""

from dataclasses import replace

import pytest
import torch
from numerics.step_outputs import of_several_targets, outputs
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


def several() -> list[Sample]:
    """Four targets of each position, of which the first and the last are often the same, with weights of any sign."""
    random, samples = torch.Generator().manual_seed(5), []
    for sample in labelled():
        targets = torch.randint(VOCAB, (len(sample), 4), generator=random)
        targets[::2, 3] = targets[::2, 0]
        weights = torch.randn(len(sample), 4, generator=random, dtype=torch.float64)
        samples.append(replace(sample, targets_T=targets, fields={"weights": weights}))
    return samples


@pytest.fixture(scope="module")
def wanted_of_several(folder):
    """Loss, gradients and log-probabilities of K targets a position, by transformers and torch."""
    with fp64_model(folder) as model:
        losses, logprobs = [], []
        for sample in several():
            assert sample.targets_T is not None
            logp = model(sample.tokens_T[None]).logits[0, :-1].log_softmax(1).gather(1, sample.targets_T[1:])
            logp = torch.where(sample.mask_T[:, None], torch.cat([logp.new_zeros(1, 4), logp]), 0.0)
            losses.append(-(sample.fields["weights"] * logp).sum(1))
            logprobs.append(logp.detach())
        loss = torch.cat(losses).sum()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss.item(), gradients, logprobs, [each.detach() for each in losses]


@pytest.mark.parametrize("row", ROWS)
def test_several_targets_of_a_position(pool, folder, wanted_of_several, row):
    world, parallel, shared = ROWS[row]
    loss, gradients, logprobs, losses = wanted_of_several
    ranks = pool.run(world, of_several_targets, folder, several(), parallel, shared)
    for of_rank in ranks:
        assert of_rank.losses == pytest.approx([loss, loss], rel=1e-12)
        for name, gradient in of_rank.gradients[0].items():
            assert (gradient - gradients[name]).norm() <= 1e-12 * gradients[name].norm(), name
        for returned in of_rank.outputs:
            all_values = [*(returned[n] for n in ("logprobs", "loss", "twice")), of_rank.logprobs, logprobs, losses]
            for values, of_loss, twice, asked, right, right_loss in zip(*all_values, strict=True):
                assert values.equal(asked) and twice.equal(2 * asked)
                torch.testing.assert_close(asked, right, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(of_loss, right_loss, rtol=1e-12, atol=1e-12)
    assert {name for of_rank in ranks for name in of_rank.gradients[0]} == gradients.keys()


def test_several_targets_ask_for_one_number_a_position(inputs, one_rank):
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    tokens = torch.arange(1, 5)
    sample = Sample(tokens, tokens > 2, targets_T=tokens[:, None].expand(4, 3))
    with pytest.raises(UserError, match=r"loss: .* returned shape \(2, 3\) instead of shape \(2,\)"):
        engine.forward_backward([sample], Loss.of(negative_log_likelihood))
    with pytest.raises(UserError, match=r"targets_T is \[T, 3\] in .* and \[T\] in .*: a step has one number of"):
        engine.logprobs([sample, Sample(tokens, tokens > 2)])


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
