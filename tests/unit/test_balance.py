"""The plan: what must hold for every input, and how even it is on realistic lengths. Never its time."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models.decoders import decoder, sparse, with_attentions, with_windows

from isoloss.engine.batching.balance import CostModel, Plan, imbalance, make_plan
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.latent import Latent
from isoloss.models.lora.config import LoraConfig
from isoloss.models.rope import Rope
from isoloss.tools.plan.rollout_batch import cache_bytes

TOKENS = CostModel(linear=1.0, quadratic=0.0)
SQUARES = CostModel(linear=0.0, quadratic=1.0)
DECODER_7B = CostModel.of(decoder(28, 3584, (28, 4, 128), 18944, 152064))

cost_models = st.sampled_from([TOKENS, SQUARES, DECODER_7B, CostModel(24576.0, 1.0)])
lengths_and_budget = st.integers(1, 300).flatmap(  # some lengths are over the budget
    lambda budget: st.tuples(st.lists(st.integers(1, budget + budget // 8), max_size=60), st.just(budget))
)


def indices(plan: Plan) -> list[int]:
    return [i for rank in plan.micro_batches for micro_batch in rank for i in micro_batch]


def as_lengths(plan: Plan, lengths: list[int]) -> list:
    return [[[lengths[i] for i in micro_batch] for micro_batch in rank] for rank in plan.micro_batches]


@settings(deadline=None, max_examples=300)
@given(lengths_and_budget, st.integers(1, 9), st.integers(1, 5), cost_models)
def test_places_every_sample_once_within_the_budget(data, dp_size, multiple_of, cost_model):
    lengths, budget = data
    plan = make_plan(lengths, dp_size, budget, cost_model, multiple_of)
    assert len(plan.micro_batches) == dp_size
    assert sorted(indices(plan)) == list(range(len(lengths)))
    assert all(type(i) is int for i in indices(plan))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches > 0 and plan.num_micro_batches % multiple_of == 0
    assert all(len(m) == 1 or sum(lengths[i] for i in m) <= budget for rank in plan.micro_batches for m in rank)
    assert make_plan(np.array(lengths, dtype=np.int32), dp_size, budget, cost_model, multiple_of) == plan


@settings(deadline=None, max_examples=200)
@given(lengths_and_budget, st.integers(1, 5), cost_models, st.randoms(use_true_random=False))
def test_order_of_the_samples_only_renames_them(data, dp_size, cost_model, random):
    lengths, budget = data
    shuffled = random.sample(lengths, len(lengths))
    plan, other = (make_plan(x, dp_size, budget, cost_model) for x in (lengths, shuffled))
    assert as_lengths(plan, lengths) == as_lengths(other, shuffled)


@settings(deadline=None, max_examples=200)
@given(lengths_and_budget, st.integers(1, 5), cost_models)
def test_costliest_rank_is_within_the_bound_of_the_greedy(data, dp_size, cost_model):
    """A rank that got a second sample was the least loaded before its last one, so it is above the mean by no more than
    that sample; and the first `dp_size` samples each go to a rank of their own."""
    lengths, budget = data
    costs = sorted(cost_model.cost(lengths).tolist(), reverse=True)
    plan = make_plan(lengths, dp_size, budget, cost_model)
    heaviest = max(sum(cost_model.cost(lengths)[i] for m in rank for i in m) for rank in plan.micro_batches)
    mean, longest = sum(costs) / dp_size, max(costs, default=0.0)
    last = costs[dp_size] if len(costs) > dp_size else 0.0
    assert heaviest <= max(longest, mean + last) * (1 + 1e-12)


@settings(deadline=None, max_examples=200)
@given(lengths_and_budget, cost_models)
def test_one_rank_needs_no_more_micro_batches_than_best_fit_decreasing(data, cost_model):
    """Against a plain twin of the packing: look at every bin, take the fullest that has room."""
    lengths, budget = data
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b in range(len(bins)) if bins[b] + length <= budget]
        if fitting:
            bins[max(fitting, key=lambda b: (bins[b], -b))] += length
        else:
            bins.append(length)
    assert make_plan(lengths, 1, budget, cost_model).num_micro_batches == max(1, len(bins))


@settings(deadline=None, max_examples=300)
@given(lengths_and_budget, cost_models, st.integers(1, 4))
@example(([7, 6, 3, 3, 1], 10), SQUARES, 1)  # the cheapest has no room for the second 3, but it has for the 1
def test_micro_batches_are_those_of_a_plain_search(data, cost_model, multiple_of):
    """Against a plain twin of the spreading: look at every micro-batch, take the cheapest that has room."""
    lengths, budget = data
    costs = cost_model.cost(lengths)
    (rank,) = make_plan(lengths, 1, budget, cost_model, multiple_of).micro_batches
    bins: list[list[int]] = [[] for _ in rank]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in bins if not b or sum(lengths[j] for j in b) + lengths[i] <= budget]
        if not fitting:
            return  # the other way out, tested below
        min(fitting, key=lambda b: sum(costs[j] for j in b)).append(i)
    assert sorted(rank) == sorted(map(tuple, bins))


@pytest.mark.parametrize("cost_model", [TOKENS, SQUARES, DECODER_7B], ids=["tokens", "squares", "decoder"])
@pytest.mark.parametrize(("samples", "ranks", "target"), [(4096, 64, 1.001), (65536, 512, 1.0005)])
def test_ranks_are_even_on_log_normal_lengths(samples, ranks, target, cost_model):
    lengths = np.clip(np.random.default_rng(7).lognormal(np.log(256), 0.9, samples), 64, 2048).astype(int)
    plan = make_plan(lengths, ranks, 4096, cost_model)
    assert imbalance(plan, lengths, cost_model) <= target
    assert sorted(indices(plan)) == list(range(samples))
    if cost_model is not SQUARES:  # a pure square starves some ranks of tokens: more micro-batches than tokens ask for
        assert plan.num_micro_batches == -(-lengths.sum() // (ranks * 4096))


def test_micro_batches_of_a_rank_are_even_and_descend_in_cost():
    lengths = np.clip(np.random.default_rng(3).lognormal(np.log(256), 0.9, 512), 64, 2048).astype(int)
    for rank in make_plan(lengths, 8, 4096, DECODER_7B).micro_batches:
        costs = [DECODER_7B.cost(lengths[list(m)]).sum() for m in rank]
        assert costs == sorted(costs, reverse=True)
        assert max(costs) <= 1.05 * np.mean(costs)


def test_budget_too_tight_for_even_costs_falls_back_to_the_packing():
    # 7+3 and 6+2+2 fill two micro-batches of 10 exactly. Even costs put 3 with 6, which leaves no place for the last 2.
    lengths = [7, 6, 3, 2, 2]
    (rank,) = make_plan(lengths, 1, 10, TOKENS).micro_batches
    assert rank == ((0, 2), (1, 3, 4))
    # With a third micro-batch to fill nothing is tight, and the samples spread.
    (rank,) = make_plan(lengths, 1, 10, TOKENS, multiple_of=3).micro_batches
    assert rank == ((0,), (2, 3, 4), (1,))


def test_giant_and_many_small():
    lengths = [32768] + [16] * 1000
    plan = make_plan(lengths, 4, 32768, DECODER_7B)
    assert plan.micro_batches[0][0] == (0,)
    small = [sum(len(m) for m in rank) for rank in plan.micro_batches[1:]]
    assert sum(small) == 1000 and max(small) - min(small) <= 1
    costs = DECODER_7B.cost(lengths)
    assert imbalance(plan, lengths, DECODER_7B) == pytest.approx(costs.max() * 4 / costs.sum())


def test_ranks_of_unequal_tokens_get_the_same_number_of_micro_batches():
    # By squares one sample of 100 outweighs all the small ones, whose rank alone needs three micro-batches.
    plan = make_plan([100] + [10] * 30, 2, 100, SQUARES)
    assert plan.micro_batches[0] == ((0,), (), ())
    assert [len(m) for m in plan.micro_batches[1]] == [10, 10, 10]


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_without_samples_every_rank_has_empty_micro_batches(multiple_of):
    for nothing in ([], np.array([], dtype=np.int64)):
        plan = make_plan(nothing, 3, 64, TOKENS, multiple_of)
        assert plan.micro_batches == (((),) * multiple_of,) * 3
        assert imbalance(plan, nothing, TOKENS) == 1.0


def test_imbalance_is_the_costliest_rank_over_the_mean():
    plan = Plan.apart((((0,), ()), ((1,), (2,))), [1, 1, 1])
    assert imbalance(plan, [3, 1, 1], TOKENS) == pytest.approx(3 / 2.5)
    assert imbalance(plan, [3, 1, 1], SQUARES) == pytest.approx(9 / 5.5)


def test_a_sample_over_the_budget_runs_alone_and_the_others_stay_even():
    # Two samples over the budget of 10, and 24 tokens that three more micro-batches hold.
    (rank,) = make_plan([4, 11, 4, 4, 30, 4, 4, 4], 1, 10, TOKENS).micro_batches
    assert rank == ((4,), (1,), (0, 5), (2, 6), (3, 7))
    assert make_plan([5, 6], 2, 1, TOKENS).micro_batches == (((1,),), ((0,),))


@pytest.mark.parametrize("arguments", [([0, 3], 1), ([-1], 1), ([1.5], 1), ([[1, 2]], 1), ([1], 0)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError):
        make_plan(*arguments, 64, TOKENS)
    with pytest.raises(ValueError):
        make_plan([1], 1, 64, TOKENS, multiple_of=0)
    with pytest.raises(ValueError, match="max_tokens=0"):
        make_plan([1], 1, 0, TOKENS)


@pytest.mark.parametrize("coefficients", [(0, 0), (-1, 1), (1, -1), (float("nan"), 1), (float("inf"), 1)])
def test_cost_model_refuses_coefficients_that_do_not_grow(coefficients):
    with pytest.raises(ValueError, match="coefficients"):
        CostModel(*coefficients)


def test_cost_counts_every_matrix():
    # Two layers: q 8x8, k and v 8x4 each, o 8x8, three 8x16 of the MLP; the head 8x32. Attention: 2 heads of 4.
    arch = decoder(2, 8, (2, 1, 4), 16, 32)
    model = CostModel.of(arch)
    assert model.linear == 2 * (2 * (64 + 32 + 32 + 64 + 3 * 128) + 256)
    assert model.quadratic == 2 * (2 * 2 * 2 * 4) / 2
    assert model.cost([[1, 10]]).tolist() == [
        [model.linear + model.quadratic, 10 * model.linear + 100 * model.quadratic]
    ]


def test_cost_of_adapters_counts_a_step():
    """A third of it: 4 FLOPs a number of the frozen matrices, 6 a number of the factors, of experts those chosen."""
    arch = decoder(2, 8, (2, 1, 4), 16, 32)
    frozen, heads = 2 * (64 + 32 + 32 + 64 + 3 * 128) + 256, 2 * (2 * 2 * 2 * 4) / 2
    of_layer = 3 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 16))
    model = CostModel.of(arch, LoraConfig(rank=3))
    assert model.linear == pytest.approx((4 * frozen + 6 * 2 * of_layer) / 3) and model.quadratic == heads
    assert CostModel.of(arch, LoraConfig()) == CostModel.of(arch)

    experts = sparse(arch, 6, 2, 12, "softmax", True, shared_size=0, dense_layers=1)
    both = [CostModel.of(experts, LoraConfig(rank=rank, targets=("experts",))).linear for rank in (1, 3)]
    assert both[1] - both[0] == pytest.approx(2 * (3 - 1) * 2 * 3 * (8 + 12))  # two of six, three matrices each


def asymmetric(kv_heads: int, head_dim: int, value_dim: int, **more) -> Asymmetric:
    own = {"heads": 2, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim, "value_dim": value_dim}
    return Asymmetric(rope=Rope(1e4), **{**own, **more})


def test_cost_counts_what_a_token_meets():
    plain = decoder(2, 8, (2, 1, 4), 16, 32)
    some_sparse = sparse(plain, 6, 2, 12, "softmax", True, shared_size=5, dense_layers=1)
    moe = 6 * 8 + 2 * 3 * 8 * 12 + 3 * 8 * 5  # router, two of six experts, the shared one
    assert CostModel.of(some_sparse).linear == pytest.approx(CostModel.of(plain).linear + 2 * (moe - 3 * 8 * 16))

    rope = Rope(1e4, interleaved=True)
    latent = with_attentions(
        plain, [Latent(heads=2, q_rank=7, kv_rank=6, nope_dim=3, rope_dim=2, value_dim=4, rope=rope)]
    )
    attention = 8 * 7 + 7 * 2 * 5 + 8 * (6 + 2) + 6 * 2 * (3 + 4) + 2 * 4 * 8
    assert CostModel.of(latent).linear == 2 * (2 * (attention + 3 * 8 * 16) + 256)
    assert CostModel.of(latent).quadratic == 2 * (2 * 2 * (5 + 4)) / 2

    kinds = with_attentions(plain, [asymmetric(1, 4, 3), asymmetric(2, 4, 3, window=10)])
    attention = 8 * (2 * 4 + 1 * 4 + 1 * 3) + 8 * (2 * 4 + 2 * 4 + 2 * 3) + 2 * 2 * 3 * 8
    assert CostModel.of(kinds).linear == 2 * (attention + 2 * 3 * 8 * 16 + 256)
    assert CostModel.of(kinds).quadratic == CostModel.of(kinds).windowed == 2 * 2 * (4 + 3) / 2
    assert cache_bytes(kinds) == 2 * (1 + 2) * (4 + 3)

    kinds = with_attentions(plain, [asymmetric(1, 4, 4, keys_as_values=True), asymmetric(2, 6, 6, window=10)])
    attention = 8 * (2 * 4 + 1 * 4) + 2 * 4 * 8 + 8 * (2 * 6 + 2 * 6 + 2 * 6) + 2 * 6 * 8
    assert CostModel.of(kinds).linear == 2 * (attention + 2 * 3 * 8 * 16 + 256)
    assert (CostModel.of(kinds).quadratic, CostModel.of(kinds).windowed) == (2 * 2 * 4, 2 * 2 * 6)
    assert cache_bytes(kinds) == 2 * (1 * 2 * 4 + 2 * 2 * 6)

    windowed = CostModel.of(with_windows(plain, None, 10))
    assert windowed.cost([10])[0] == CostModel.of(plain).cost([10])[0]
    pairs = [sum(min(t + 1, 10) for t in range(n)) for n in (1000, 1001)]
    slope = windowed.linear + (2 * 2 * 2 * 4) * (1000 + 0.5 + pairs[1] - pairs[0] - 1)  # a half square and a strip
    assert np.diff(windowed.cost([1000, 1001]))[0] == pytest.approx(slope, rel=2e-3)


# ---- samples that begin alike ----------------------------------------------------------------------------------------


def computed(
    plan: Plan, lengths: list[int], groups: dict[tuple[int, ...], int], cost_model: CostModel
) -> list[list[tuple]]:
    """(tokens, cost) of each micro-batch of each rank, what its samples share counted once."""
    group_of = {i: samples for samples in groups for i in samples}

    def of(micro_batch: tuple[int, ...]) -> tuple[int, float]:
        beginnings = {group_of[i]: groups[group_of[i]] for i in micro_batch if i in group_of}
        tokens = sum(beginnings.values()) + sum(
            lengths[i] - (groups[group_of[i]] if i in group_of else 0) for i in micro_batch
        )
        cost = sum(float(cost_model.cost(shared)) for shared in beginnings.values())
        for i in micro_batch:
            before = groups[group_of[i]] if i in group_of else 0
            cost += float(cost_model.cost(lengths[i])) - (float(cost_model.cost(before)) if before else 0.0)
        return tokens, cost

    return [[of(m) for m in rank] for rank in plan.micro_batches]


def costliest(found: list[list[tuple]]) -> float:
    return max(sum(cost for _, cost in rank) for rank in found)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9)), max_size=9),
    st.integers(20, 200), st.integers(1, 6), st.integers(1, 3), cost_models,
)  # fmt: skip
def test_groups_are_placed_once_within_the_budget_and_never_cost_more(
    prompts, budget, dp_size, multiple_of, cost_model
):
    lengths, groups = [], {}
    for prompt, completions in prompts:
        members = range(len(lengths), len(lengths) + len(completions))
        lengths += [prompt + completion for completion in completions]
        if len(members) > 1:
            groups[tuple(members)] = prompt
    plan = make_plan(lengths, dp_size, budget, cost_model, multiple_of, groups)
    assert sorted(indices(plan)) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple_of == 0
    found = computed(plan, lengths, groups, cost_model)
    for rank, of_rank in zip(plan.micro_batches, found):
        assert all(len(m) == 1 or tokens <= budget for m, (tokens, _) in zip(rank, of_rank))
    alone = computed(make_plan(lengths, dp_size, budget, cost_model, multiple_of), lengths, {}, cost_model)
    assert costliest(found) <= costliest(alone) * (1 + 1e-12)


def test_a_pipeline_wants_small_micro_batches():
    """Eight completions of 8 tokens behind a prompt of 16: 80 tokens in one micro-batch, or 72 and 40 in two. Eight
    stages take the time of the largest seven times more: 640 or 616."""
    groups = {tuple(range(8)): 16}
    plans = [make_plan([24] * 8, 1, 80, CostModel(1.0, 0.0), 1, groups, stages) for stages in (1, 8)]
    assert [[len(m) for m in plan.micro_batches[0]] for plan in plans] == [[8], [5, 3]]


@pytest.mark.parametrize(
    ("prompts", "ranks", "budget", "prompt", "completion", "gain"),
    [
        (64, 1, 16384, 512, 512, 1.65),
        (64, 8, 16384, 512, 512, 1.6),
        (64, 64, 16384, 512, 512, 1.3),
        (64, 64, 32768, 8192, 512, 2.6),  # the longest prompt decides
        (64, 128, 16384, 512, 512, 1.05),  # fewer groups than ranks
    ],
)
def test_what_sharing_saves_of_the_costliest_rank(prompts, ranks, budget, prompt, completion, gain):
    """Eight completions a prompt, lengths drawn log-normally around these."""
    rng = np.random.default_rng(7)
    lengths, groups = [], {}
    for _ in range(prompts):
        shared = int(rng.lognormal(np.log(prompt), 0.4))
        groups[tuple(range(len(lengths), len(lengths) + 8))] = shared
        lengths += [shared + max(1, int(length)) for length in rng.lognormal(np.log(completion), 0.5, 8)]
    plan = make_plan(lengths, ranks, budget, DECODER_7B, 1, groups)
    alone = computed(make_plan(lengths, ranks, budget, DECODER_7B), lengths, {}, DECODER_7B)
    assert costliest(alone) / costliest(computed(plan, lengths, groups, DECODER_7B)) > gain
    assert plan.num_micro_batches <= len(alone[0])
