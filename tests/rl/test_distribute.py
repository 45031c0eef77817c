"""Rank 0 holds the samples of a batch. Another rank is sent what the plan places there, and steps and log-probabilities
are those of samples that every rank has, bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch
from rl import scatter
from support.models.families import VOCAB, published, write_config
from support.ranks.invariance import FOUR_LAYERS

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, ModelConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.parallel import Layout
from isoloss.tools.prove.proof import on_layout, rollout_fields

LAYOUTS = ("1", "dp2", "dp4", "tp2+dp2", "pp2+dp2", "ulysses2+dp2", "tp2+pp2")


def made(lengths=(9, 14, 5, 30, 7, 12, 3)) -> list[Sample]:
    """Samples of two prompts in turn; one has no target, three have targets of their own."""
    rng, samples = np.random.default_rng(2), []
    prompts = [torch.from_numpy(rng.integers(0, VOCAB, size)) for size in (8, 2)]
    for index, length in enumerate(lengths):
        prompt = prompts[index % 2]
        tokens = torch.cat([prompt, torch.from_numpy(rng.integers(0, VOCAB, length))])
        mask = (torch.arange(len(tokens)) >= len(prompt)) & (index != 3)
        fields = rollout_fields(rng.normal(-np.log(VOCAB), 0.3, len(tokens)), mask, rng)
        targets = torch.from_numpy(rng.integers(0, VOCAB, len(tokens))) if index in (1, 2, 4) else None
        ids = {"sequence": index % 2 if index > 4 else None, "set": 7 if index == 2 else None}
        samples.append(Sample(tokens, mask, index % 2, fields, f"row:{index}", targets_T=targets, **ids))
    return samples


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RLConfig:
    folder = write_config(tmp_path_factory.mktemp("scatter") / "model", published("qwen3", **FOUR_LAYERS))
    return RLConfig(
        ModelConfig(str(folder), from_scratch=True),
        train=TrainConfig(precision="fp64", seed=3),
        batch=BatchConfig(max_tokens=40),
        rollout=RolloutConfig(max_new_tokens=64),
        algorithm=AlgorithmConfig(kl_coef=0.2),
    )


def run(pool, config: RLConfig, layout: str, samples: list[Sample], function=scatter.scattered) -> list:
    parsed = Layout.parse(layout)
    return pool.run(parsed.world_size, function, on_layout(config, parsed, "fp64"), samples)


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_what_it_computes(pool, config, layout, shared):
    samples = made()
    config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, share_prefixes=shared))
    first, *others = run(pool, config, layout, samples)
    everything = list(range(len(samples)))
    assert first.before == first.after == everything and not any(rank.before for rank in others)
    assert all(rank.after == rank.placed for rank in others)
    assert [rank.differences for rank in (first, *others)] == [[]] * (1 + len(others))
    if Layout.parse(layout).dp > 1:
        assert all(len(rank.placed) < len(samples) for rank in others)


def test_routes_travel(pool, config, tmp_path):
    """Of samples that have any."""
    folder = write_config(tmp_path / "moe", published("qwen3-moe", **FOUR_LAYERS))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))
    samples, rng = made(), np.random.default_rng(4)
    for index, sample in enumerate(samples[:-2]):
        rows = torch.from_numpy(rng.random((len(sample), 4, 6)).argsort(2)[..., :3])
        samples[index] = dataclasses.replace(sample, routes=rows.to(torch.int16))
    for layout in ("dp2", "pp2+dp2"):
        assert not any(rank.differences for rank in run(pool, config, layout, samples))


def test_several_targets_of_a_position_travel(pool, config):
    samples = [
        Sample(
            each.tokens_T,
            each.mask_T,
            targets_T=each.tokens_T[:, None] // torch.arange(1, 4),
            fields={"weights": each.tokens_T[:, None] / torch.arange(2, 5)},
        )
        for each in made()
    ]
    assert [rank.differences for rank in run(pool, config, "pp2+dp2", samples)] == [[]] * 4


def test_a_replica_without_samples(pool, config):
    """Fewer samples than replicas."""
    ranks = run(pool, config, "dp4", made((5, 9)))
    assert [rank.differences for rank in ranks] == [[]] * 4
    assert sorted(len(rank.after) for rank in ranks[1:]) == [0, 0, 1]


def test_a_mistake_of_rank_0_is_everybodys(pool, config):
    first, second = run(pool, config, "dp2", [], scatter.refused)
    assert first == "tokens_T must be a non-empty int64 vector, not torch.float32 (0,)"
    assert second == f"rank 0 failed: {first}"
