"""A sample: its own targets, its ids, and what of it travels."""

from dataclasses import replace

import pytest
import torch

from isoloss.engine.batching.sample import (
    Sample,
    check_routes,
    check_tokens,
    grouped_by_prompt,
    known_routes,
    outline,
    sequence_numbers,
    target_shape,
)
from isoloss.parallel import UserError

TOKENS = torch.tensor([5, 6, 7, 8])
MASK = torch.tensor([False, False, True, True])
CUT = Sample(TOKENS, MASK, 3, {"advantages": TOKENS / 2}, "row:1", sequence=12, set=4, targets_T=TOKENS + 1,
             routes=torch.tensor([[[0, 1]], [[2, 1]], [[-1, -1]], [[0, 3]]], dtype=torch.int16))  # fmt: skip


@pytest.mark.parametrize("targets_T", [TOKENS[:3], TOKENS.float(), TOKENS[None], TOKENS[:, None][:, :0]])
def test_targets_of_another_shape_or_type_are_refused(targets_T):
    with pytest.raises(ValueError, match=r"targets_T must be int64 of shape \(4,\) or \(4, K\), not torch\."):
        Sample(TOKENS, MASK, targets_T=targets_T)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([5, 6], MASK), "tokens_T is a list: make it a tensor by torch.tensor"),
        ((TOKENS, [False] * 4), "mask_T is a list"),
        ((TOKENS.numpy(), MASK), "tokens_T is a ndarray"),
        ((TOKENS.float(), MASK), "tokens_T must be a non-empty int64 vector, not torch.float32 (4,)"),
        ((TOKENS.int(), MASK), "tokens_T must be a non-empty int64 vector, not torch.int32 (4,)"),
        ((TOKENS[:0], MASK[:0]), "tokens_T must be a non-empty int64 vector, not torch.int64 (0,)"),
        ((TOKENS, MASK[1:]), "mask_T must be bool of shape (4,), not torch.bool (3,)"),
        ((TOKENS, MASK.long()), "mask_T must be bool of shape (4,), not torch.int64 (4,)"),
        ((TOKENS, ~MASK), "mask_T[0] must be False"),
        ((TOKENS, MASK, 0, {"a": [0.5] * 4}), "fields['a'] must be a tensor of shape (4,), not a list"),
        ((TOKENS, MASK, 0, {"a": TOKENS[1:] / 2}), "fields['a'] must be a tensor of shape (4,), not (3,)"),
    ],
)
def test_what_is_no_sample_is_refused(given, message):
    with pytest.raises(ValueError) as refused:
        Sample(*given)
    assert message in str(refused.value)


@pytest.mark.parametrize("token", [9, -1])
def test_a_token_that_the_model_does_not_have_is_named_with_its_sample(token):
    good, bad = Sample(TOKENS, MASK, id="row:1"), Sample(torch.tensor([5, token, 7]), MASK[:3], id="row:2")
    check_tokens([good, good], 9)
    check_tokens([], 9)
    with pytest.raises(UserError, match=rf"sample 1 \('row:2'\) has the token {token}, and the model's are 0 to 8"):
        check_tokens([good, bad], 9)


def test_tokens_are_the_targets_unless_others_are_given():
    assert Sample(TOKENS, MASK).predicted_T is TOKENS and CUT.predicted_T.equal(TOKENS + 1)


@pytest.mark.parametrize("shape", [(3,), (4, 2), (4, 3, 1)])
def test_a_field_of_each_target_has_their_shape(shape):
    several = TOKENS[:, None].expand(4, 3)
    Sample(TOKENS, MASK, fields={"of each": several / 2, "of all": TOKENS / 2}, targets_T=several)
    with pytest.raises(ValueError, match=r"fields\['a'\] must be a tensor of shape \(4,\) or \(4, 3\), not \("):
        Sample(TOKENS, MASK, fields={"a": torch.zeros(shape)}, targets_T=several)


def test_samples_of_a_step_have_one_number_of_targets_a_position():
    one, two, three = (
        Sample(TOKENS, MASK, id=f"row:{k}", targets_T=TOKENS[:, None].expand(4, k), fields={"w": torch.zeros(4, k)})
        for k in (1, 2, 3)
    )
    plain, all_alike = Sample(TOKENS, MASK, id="row:0"), replace(two, fields={"w": TOKENS / 2})
    assert target_shape([]) == target_shape([plain, CUT]) == ()
    assert target_shape([three, three]) == (3,) and target_shape([outline(one)]) == (1,)
    for first, second, shapes in (
        (plain, one, r"targets_T is \[T\] in sample 'row:0' and \[T, 1\] in sample 'row:1'"),
        (three, outline(two), r"targets_T is \[T, 3\] in sample 'row:3' and \[T, 2\] in sample 'row:2'"),
        (two, all_alike, r"fields\['w'\] is \[T, 2\] in sample 'row:2' and \[T\] in sample 'row:2'"),
    ):
        with pytest.raises(UserError, match=shapes):
            target_shape([first, second])


def test_a_target_of_several_that_is_no_token_is_named():
    targets = torch.tensor([[0, 9], [0, 9], [0, 8], [9, 1]])
    check_tokens([Sample(TOKENS, MASK & (TOKENS < 8), targets_T=targets)], 9)
    with pytest.raises(UserError, match="targets_T of sample 'row:5' has the target 9, "):
        check_tokens([Sample(TOKENS, MASK, id="row:5", targets_T=targets)], 9)


def test_everything_travels():
    again = Sample(*CUT.values())
    assert (again.group, again.id, again.sequence, again.set) == (3, "row:1", 12, 4)
    assert again.tokens_T is CUT.tokens_T and again.mask_T is CUT.mask_T and again.targets_T is CUT.targets_T
    assert again.fields.keys() == {"advantages"} and again.fields["advantages"] is CUT.fields["advantages"]
    assert again.routes is CUT.routes
    shape = outline(CUT)
    assert shape.routes is not None and shape.routes.is_meta and shape.routes.shape == (4, 1, 2)
    assert (shape.group, shape.id, shape.sequence, shape.set) == (3, "row:1", 12, 4)
    assert shape.targets_T is not None and shape.targets_T.is_meta and shape.targets_T.dtype == torch.int64
    (grouped,) = grouped_by_prompt([CUT])
    assert (grouped.group, grouped.sequence, grouped.set) == (0, 12, 4) and grouped.targets_T is CUT.targets_T


def test_what_an_older_checkpoint_holds_is_a_sample():
    """Five values, as before samples had other ids."""
    old = Sample(*CUT.values()[:5])
    assert old.id == "row:1" and old.sequence is old.set is old.targets_T is None


def samples(*ids: tuple[int | None, int, int | None]) -> list[Sample]:
    return [Sample(TOKENS, MASK, group, id=f"row:{i}", sequence=s, set=of) for i, (s, group, of) in enumerate(ids)]


def test_a_sample_without_a_number_is_a_trajectory_of_its_own():
    assert sequence_numbers(samples((None, 0, None), (7, 0, None), (None, 0, None), (0, 1, 2), (7, 0, None))) == [
        0, 1, 2, 3, 1
    ]  # fmt: skip
    assert sequence_numbers([]) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"group": 2}, "sequence=12 has group=3 (sample 'row:1') and group=2 (sample 'row:2'): give all samples"),
        ({"set": 5}, "sequence=12 has set=4 (sample 'row:1') and set=5 (sample 'row:2'): give all samples"),
        ({"set": None}, "sequence=12 has set=4 (sample 'row:1') and set=None (sample 'row:2'): give all samples"),
    ],
)
def test_a_trajectory_in_two_prompts_or_sets_is_refused_by_name(other, message):
    with pytest.raises(ValueError) as refused:
        sequence_numbers([*samples((None, 9, None)), CUT, replace(CUT, id="row:2", **other)])
    assert message in str(refused.value)


@pytest.mark.parametrize("routes", [torch.zeros(4, 1, 2), torch.zeros(3, 1, 2).short(), torch.zeros(4, 2).short()])
def test_routes_of_another_shape_or_type_are_refused(routes):
    with pytest.raises(
        ValueError, match=r"routes must be uint8 or int16 of shape \(4, layers with experts, experts of"
    ):
        Sample(TOKENS, MASK, routes=routes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 0, 0), "sample 'row:1' has routes, and the model has no experts"),
        ((2, 4, 2), "routes of sample 'row:1' are of 1 layers and 2 experts of a token, and the model has 2 layers"),
        ((1, 4, 3), "routes of sample 'row:1' are of 1 layers and 2 experts of a token, .* that choose 3"),
        ((1, 3, 2), "routes of sample 'row:1' name expert 3, and the model's are 0 to 2"),
    ],
)
def test_routes_of_another_model_are_refused(sizes, message):
    check_routes([Sample(TOKENS, MASK), CUT], 1, 4, 2)
    with pytest.raises(UserError, match=message):
        check_routes([Sample(TOKENS, MASK), CUT], *sizes)


def test_a_byte_marks_what_is_not_known_too():
    routes = torch.tensor([0, 254, 255], dtype=torch.uint8)
    assert known_routes(routes).tolist() == [0, 254, -1] and known_routes(routes).dtype == torch.int16
    assert known_routes(CUT.routes) is CUT.routes
