"""Tokens go to the experts that their samples name, with the weights of the live scores: loss, log-probabilities and
gradients of transformers' model whose routers are told the same, and those of live routing where its own choices are
given."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples
from support.ranks import routes
from support.runs.optimizer_steps import fp64_model
from torch.nn.functional import cross_entropy, linear

from isoloss.engine.batching.sample import Sample, known_routes
from isoloss.engine.config.schema import MemoryConfig

LENGTHS = (40, 17, 29, 33, 2, 9)
SIZES = 2, 6, 3  # of qwen3-moe: layers, experts, and experts of a token


def given(layers: int, experts: int, top_k: int) -> list[Sample]:
    """Samples with random routes, some in one byte each. The last token has none, as from a sampler, nor have some
    others; a row of padding is zeros; and the third sample has no routes at all."""
    rng = np.random.default_rng(8)
    samples = make_samples(LENGTHS, VOCAB)
    for index, sample in enumerate(samples):
        rows = rng.random((len(sample), layers, experts)).argsort(2)[..., :top_k]
        found = torch.from_numpy(rows).to(torch.int16)
        found[-1] = found[rng.random(len(sample)) < 0.2] = -1
        found[0] = 0
        samples[index] = replace(sample, routes=None if index == 2 else found.to(torch.uint8) if index % 2 else found)
    return samples


def told(gate, routes_TX: torch.Tensor, hidden: torch.Tensor):
    """The forward of transformers' router of Qwen3 with this choice, where there is one."""
    logits = linear(hidden, gate.weight)
    scores = logits.softmax(-1)
    live = scores.topk(gate.top_k).indices
    known = [len({*row}) == len(row) and min(row) >= 0 for row in routes_TX.tolist()]
    chosen = torch.where(torch.tensor(known)[:, None], routes_TX.long(), live)
    weights = torch.stack([scores[token, row] for token, row in enumerate(chosen)])
    return logits, weights / weights.sum(1, keepdim=True), chosen


def by_expert(gradients: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients by the names of files, where each expert has its own tensors."""
    for name, gradient in gradients:
        module, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            yield name, gradient
            continue
        for expert, of_expert in enumerate(gradient):
            parts = of_expert.chunk(2) if last == "gate_up_proj" else (of_expert,)
            for part, projection in zip(parts, ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)):
                yield f"{module}.{expert}.{projection}.weight", part


def test_loss_and_gradients_are_those_of_transformers_told_the_same(pool, tiny_hf, monkeypatch):
    folder = tiny_hf("qwen3-moe")
    with fp64_model(folder) as model:
        samples = given(*SIZES)
        router = sys.modules[type(model).__module__].Qwen3MoeTopKRouter
        gates = [module for module in model.modules() if isinstance(module, router)]
        plain, logprobs = router.forward, []
        for sample in samples:

            def forward(gate, hidden, sample=sample):
                if sample.routes is None:
                    return plain(gate, hidden)
                return told(gate, known_routes(sample.routes)[:, gates.index(gate)], hidden)

            monkeypatch.setattr(router, "forward", forward)
            logits = model(sample.tokens_T[None]).logits[0, :-1]
            of_tokens = -cross_entropy(logits, sample.tokens_T[1:], reduction="none")
            logprobs.append(torch.where(sample.mask_T, torch.cat([of_tokens.new_zeros(1), of_tokens]), 0.0))
        loss = -torch.cat(logprobs).sum() / sum(int(sample.mask_T.sum()) for sample in samples)
        loss.backward()
        wanted = dict(by_expert((name, p.grad) for name, p in model.named_parameters() if p.grad is not None))
    (found,) = pool.run(1, routes.step, folder, samples)
    assert wanted.keys() == found.gradients.keys()
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    for one, other in zip(found.logprobs, logprobs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-11, atol=1e-12)
    routed = [name for name in wanted if name.endswith("gate.weight")]
    assert len(routed) == len(gates)
    for name, gradient in wanted.items():
        assert (gradient - found.gradients[name]).norm() <= 1e-10 * gradient.norm(), name
    known = [known_routes(s.routes[1:]) >= 0 for s in samples if s.routes is not None]
    rows = sum(int(each.all(2).sum()) for each in known)
    assert found.replayed == pytest.approx(rows / (len(gates) * sum(LENGTHS)), rel=1e-15)


@pytest.mark.parametrize("model", ("qwen3-moe", "qwen3-moe-unnormalized", "deepseek-v3", "gpt-oss"))
def test_live_choices_given_change_no_bit(pool, tiny_hf, model):
    """In models with a dense first layer too, which no row is of; and any other choice would change something."""
    folder, samples = tiny_hf(model), make_samples(LENGTHS, VOCAB)
    (live,) = pool.run(1, routes.step, folder, samples)
    asked = [replace(sample, routes=each) for sample, each in zip(samples, live.live, strict=True)]
    (replayed,) = pool.run(1, routes.step, folder, asked)
    assert live.replayed is None and replayed.replayed == 1
    assert replayed.loss == live.loss
    assert all(map(torch.equal, replayed.logprobs, live.logprobs))
    assert all(torch.equal(replayed.gradients[name], gradient) for name, gradient in live.gradients.items())
    asked[0] = replace(asked[0], routes=(live.live[0] + 1) % 4)
    (other,) = pool.run(1, routes.step, folder, asked)
    assert abs(other.loss - live.loss) > 1e-6


RECOMPUTE = {
    "full": MemoryConfig("full"),
    "moe": MemoryConfig("selective", ("moe",)),
    "experts": MemoryConfig("selective", ("experts",)),
}


def test_recomputation_chooses_the_same(pool, tiny_hf):
    folder, samples = tiny_hf("qwen3-moe"), given(*SIZES)
    (wanted,) = pool.run(1, routes.recomputed, folder, samples, MemoryConfig())
    for memory in RECOMPUTE.values():
        (found,) = pool.run(1, routes.recomputed, folder, samples, memory)
        assert found[:2] == wanted[:2]
        for name, gradient in wanted[2].items():
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-12, atol=1e-15)
