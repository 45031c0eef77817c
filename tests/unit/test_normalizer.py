"""GlobalLossNormalizer on one rank: every mode is its definition, and what cannot be weighed weighs nothing."""

import numpy as np
import pytest
import torch
from support.ranks.normalizer import (
    GROUPS,
    MASKS,
    NORM_LENGTH,
    NUM_GROUPS,
    NUM_SEQUENCES,
    SEQUENCES,
    norm_length,
    reference_loss,
    weights_of,
)

from isoloss.parallel import GlobalLossNormalizer, UserError
from isoloss.parallel.aggregation import MODES, Aggregation
from isoloss.parallel.normalizer import count_tokens, token_weights


@pytest.mark.parametrize("count_fully_masked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_weighted_sum_is_the_mode(mode, count_fully_masked, one_rank):
    weights, _ = weights_of(mode, range(len(MASKS)), one_rank, count_fully_masked)
    assert [w.shape for w in weights] == [m.shape for m in MASKS]
    assert all(w.dtype == torch.float64 for w in weights)
    random = np.random.default_rng(0)
    for _ in range(5):
        losses = [random.normal(size=len(mask)) for mask in MASKS]
        masks = [mask.numpy() for mask in MASKS]
        wanted = reference_loss(mode, losses, masks, GROUPS, NUM_GROUPS, count_fully_masked)
        got = sum(float((w * torch.from_numpy(loss)).sum()) for w, loss in zip(weights, losses))
        assert got == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize("count_fully_masked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_counts_and_the_sum_of_the_weights(mode, count_fully_masked, one_rank):
    weights, counts = weights_of(mode, range(len(MASKS)), one_rank, count_fully_masked)
    assert counts.tokens == sum(int(mask.sum()) for mask in MASKS) == 15
    assert counts.sequences == (8 if count_fully_masked else 6)
    if mode == "prompt-mean-token-mean":
        assert counts.prompts == (4 if count_fully_masked else 3)
    assert sum(float(w.sum()) for w in weights) == pytest.approx(counts.weight_sum, rel=1e-13)
    for mask, weight in zip(MASKS, weights):
        assert not weight[mask == 0].any()
        assert (weight[mask == 1] > 0).all()


def test_weights_of_a_step_worked_by_hand(one_rank):
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 0]), torch.tensor([0, 1])]
    for mode, fully, wanted in [
        ("token-mean", False, [1 / 3, 1 / 3]),
        ("seq-mean-token-mean", False, [1 / 4, 1 / 2]),
        ("seq-mean-token-mean", True, [1 / 6, 1 / 3]),
        ("seq-mean-token-sum", False, [1 / 2, 1 / 2]),
        ("seq-mean-token-sum", True, [1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", False, [1 / 14, 1 / 14]),
        ("prompt-mean-token-mean", False, [1 / 3, 1 / 3]),  # both sequences are of prompt 0
        ("prompt-mean-token-mean", True, [1 / 6, 1 / 6]),
        ("sum", False, [1.0, 1.0]),
    ]:
        normalizer = GlobalLossNormalizer(mode, one_rank, norm_length=norm_length(mode), count_fully_masked=fully)
        weights, _ = normalizer.weights(masks, [0, 1, 0], num_groups=2)
        first, second = wanted
        expected = [[0, first, first], [0, 0], [0, second]]
        assert [w.tolist() for w in weights] == [pytest.approx(e, rel=1e-15) for e in expected], (mode, fully)


@pytest.mark.parametrize("count_fully_masked", [False, True])
def test_a_prompt_that_no_sequence_has_does_not_count(count_fully_masked, one_rank):
    """Prompts 3 and 900 of a thousand numbers; the second has no valid token."""
    normalizer = GlobalLossNormalizer("prompt-mean-token-mean", one_rank, count_fully_masked=count_fully_masked)
    weights, counts = normalizer.weights([torch.tensor([0, 1, 1]), torch.tensor([0, 0])], [3, 900], num_groups=1000)
    half = 1 / 4 if count_fully_masked else 1 / 2
    assert [w.tolist() for w in weights] == [[0, half, half], [0, 0]]
    assert counts.prompts == (2 if count_fully_masked else 1) and counts.weight_sum == 2 * half


@pytest.mark.parametrize("group", [-1, 2])
def test_a_prompt_outside_the_number_of_prompts_is_refused(group, one_rank):
    with pytest.raises(ValueError, match=rf"group_ids .*0\.\.1.* {group}"):
        GlobalLossNormalizer("prompt-mean-token-mean", one_rank).weights([torch.ones(2)], [group], num_groups=2)


@pytest.mark.parametrize("masks", [[], [torch.zeros(3, dtype=torch.bool)], [torch.zeros(2), torch.zeros(5)]])
@pytest.mark.parametrize("count_fully_masked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_without_a_valid_token_every_weight_is_zero(mode, count_fully_masked, masks, one_rank):
    normalizer = GlobalLossNormalizer(
        mode, one_rank, norm_length=norm_length(mode), count_fully_masked=count_fully_masked
    )
    weights, counts = normalizer.weights(masks, [0] * len(masks), num_groups=1)
    assert [w.tolist() for w in weights] == [[0.0] * len(m) for m in masks]
    assert counts.tokens == 0 and counts.weight_sum == 0.0
    assert counts.sequences == (len(masks) if count_fully_masked else 0)


@pytest.mark.parametrize("count_fully_masked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_weighs_the_same_however_it_is_cut(mode, count_fully_masked, one_rank):
    """Its samples joined are what its tokens and prompt say, token by token."""
    weights, counts = weights_of(mode, range(len(MASKS)), one_rank, count_fully_masked, cut=True)
    members = [[i for i, of in enumerate(SEQUENCES) if of == number] for number in range(NUM_SEQUENCES - 1)]
    whole = [torch.cat([MASKS[i] for i in of]) for of in members]
    groups = [GROUPS[of[0]] for of in members]
    normalizer = GlobalLossNormalizer(
        mode, one_rank, norm_length=norm_length(mode), count_fully_masked=count_fully_masked
    )
    wanted, wanted_counts = normalizer.weights(whole, groups, num_groups=NUM_GROUPS)
    assert counts == wanted_counts and counts.sequences == (6 if count_fully_masked else 4)
    assert all(torch.cat([weights[i] for i in of]).equal(joined) for of, joined in zip(members, wanted, strict=True))


@pytest.mark.parametrize("arguments", [{"sequence_ids": [0]}, {"num_sequences": 1}])
def test_a_cut_sequence_needs_its_number_and_how_many_there_are(arguments, one_rank):
    with pytest.raises(ValueError, match="needs sequence_ids and num_sequences"):
        GlobalLossNormalizer("token-mean", one_rank).weights([torch.ones(2)], **arguments)
    with pytest.raises(ValueError, match=r"sequence_ids must be in 0\.\.1 \(num_sequences=2\), not 2"):
        GlobalLossNormalizer("sum", one_rank).weights([torch.ones(2)], sequence_ids=[2], num_sequences=2)


def test_counts_are_exact_beyond_what_fp32_holds(one_rank):
    """2^24 + 1 tokens: an fp32 count would round to 2^24."""
    masks = [torch.ones(2**24, dtype=torch.bool), torch.ones(1, dtype=torch.bool)]
    weights, counts = GlobalLossNormalizer("token-mean", one_rank).weights(masks)
    assert counts.tokens == 2**24 + 1
    assert float(weights[1]) == 1 / (2**24 + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mean"}, "loss.aggregation='mean' is not one of token-mean,"),
        ({"mode": "sum", "mask_placement": "split"}, "mask_placement='split' is not one of replicated, sharded"),
        ({"mode": "sum", "mask_placement": "sharded"}, "sp_group goes with 'sharded' masks"),
        ({"mode": "sum", "sp_group": "one_rank"}, "sp_group goes with 'sharded' masks"),
        ({"mode": "seq-mean-token-sum-norm"}, "loss.norm_length=None goes with"),
        ({"mode": "token-mean", "norm_length": NORM_LENGTH}, "loss.norm_length=7 goes with"),
        ({"mode": "seq-mean-token-sum-norm", "norm_length": 0}, "loss.norm_length=0 must be a positive"),
        ({"mode": "seq-mean-token-sum-norm", "norm_length": -7}, "loss.norm_length=-7 must be a positive"),
    ],
)
def test_mistakes_are_refused_by_name(arguments, message, one_rank):
    if "sp_group" in arguments:
        arguments = {**arguments, "sp_group": one_rank}
    with pytest.raises(UserError, match=message):
        GlobalLossNormalizer(dp_group=one_rank, **arguments)


def test_several_aggregations_share_the_counts(one_rank):
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 1])]
    counts = count_tokens(masks, one_rank)
    (mean, of_mean), (summed, of_sum) = (
        token_weights(masks, counts, Aggregation(mode)) for mode in ("token-mean", "sum")
    )
    assert [w.tolist() for w in mean] == [pytest.approx([0, 1 / 3, 1 / 3]), pytest.approx([0, 1 / 3])]
    assert [w.tolist() for w in summed] == [[0, 1, 1], [0, 1]]
    assert (of_mean.weight_sum, of_sum.weight_sum, of_mean.tokens, of_sum.tokens) == (1, 3, 3, 3)


@pytest.mark.parametrize("arguments", [{}, {"group_ids": [0]}, {"num_groups": 1}])
def test_a_prompt_mean_needs_to_know_the_prompts(arguments, one_rank):
    with pytest.raises(ValueError, match="needs group_ids and num_groups"):
        GlobalLossNormalizer("prompt-mean-token-mean", one_rank).weights([torch.ones(2)], **arguments)
