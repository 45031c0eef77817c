"""Corrections of the mismatch between trainer and backend: what goes together, and what a batch's samples get."""

import pytest
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.config import AlgorithmConfig
from isoloss.engine.rl.experience import removed_fraction, with_importance
from isoloss.parallel import UserError

MASK = {"importance": "token", "importance_beyond": "mask"}
REFUSED = {
    "importance_beyond": ({"importance_beyond": "mask"}, "goes with importance weights"),
    "importance_low": ({"importance": "token", "importance_low": 0.5}, "goes with algorithm.importance_beyond=mask"),
    "importance_low above": (MASK | {"importance_low": 3.0}, "is above algorithm.importance_cap=2.0"),
    "rejection": ({"rejection": "geometric"}, "rejects nothing without bounds"),
    "rejection_high": ({"rejection_high": 2.0}, "goes with algorithm.rejection"),
    "rejection_low": (
        {"rejection": "sequence", "rejection_low": 2.0, "rejection_high": 0.5},
        "is above algorithm.rejection_high=0.5",
    ),
    "rejected": ({"rejected": "removed", "importance": "token"}, "removes nothing"),
    "veto": ({"veto": 0.1, "old_logprobs": "rollout"}, "set old_logprobs=train"),
    "rejected with the rollout's": (
        {"loss": "reinforce", "veto": 0.1, "old_logprobs": "rollout", "rejected": "removed"},
        "are those of the present policy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_do_not_go_together_are_refused_by_name(name):
    keys, reason = REFUSED[name]
    with pytest.raises(UserError, match=rf"algorithm\.{name.split()[0]}=.*{reason}"):
        AlgorithmConfig(**keys)


def cut(ratios: list[list[float]], sequences: list[int | None]) -> list[Sample]:
    """Samples with two tokens before their targets, which have these ratios of trainer to backend."""
    samples = []
    for of_sample, sequence in zip(ratios, sequences):
        ratio_T = torch.tensor([1.0, 1.0, *of_sample], dtype=torch.float64)
        mask_T = torch.arange(len(ratio_T)) >= 2
        fields = {"train_logprobs": ratio_T.log() - 3, "rollout_logprobs": torch.full_like(ratio_T, -3.0)}
        fields["advantages"] = torch.ones_like(ratio_T) * mask_T
        samples.append(Sample(torch.arange(len(ratio_T)), mask_T, fields=fields, sequence=sequence))
    return samples


def test_a_veto_in_one_turn_is_of_the_trajectory():
    samples = cut([[1.0, 0.001], [1.0, 1.5], [0.5]], [7, 7, None])
    weighted = with_importance(samples, AlgorithmConfig(veto=0.01))
    assert [s.fields["importance"].tolist() for s in weighted] == [[0] * 4, [0] * 4, [0, 0, 1]]
    assert [s.mask_T.tolist() for s in weighted] == [s.mask_T.tolist() for s in samples]


def test_removed_tokens_are_no_targets_and_have_no_fields():
    samples = cut([[1.0, 3.0, 1.5], [0.4]], [None, None])
    algorithm = AlgorithmConfig(**MASK, importance_low=0.5, rejected="removed")
    first, second = with_importance(samples, algorithm)
    assert first.mask_T.tolist() == [False, False, True, False, True] and not second.mask_T.any()
    assert first.fields["importance"].tolist() == pytest.approx([0, 0, 1, 0, 1.5])
    assert first.fields["advantages"].tolist() == [0, 0, 1, 0, 1]
    assert removed_fraction(samples, [first, second]) == 0.5


@pytest.mark.parametrize("sequences", ([None, None], [3, 4]))
def test_whole_trajectories_that_are_counted_are_left_to_the_loss(sequences):
    samples = cut([[1.0], [2.0]], sequences)
    for algorithm in (AlgorithmConfig(**MASK), AlgorithmConfig(veto=0.5), AlgorithmConfig()):
        assert all(found is sample for found, sample in zip(with_importance(samples, algorithm), samples, strict=True))
