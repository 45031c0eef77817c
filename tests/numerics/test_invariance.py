"""The promise: loss and gradients are the same on every layout, token budget and aggregation mode.

Every layout of at most eight ranks is compared, parameter by parameter in fp64, with one rank and one micro-batch. The
batch has log-normal lengths, a sequence without a valid token, one with a single valid token and one of maximum length.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.models.families import VOCAB, published, write_config
from support.ranks import invariance as world
from support.ranks.grid import Grid
from support.ranks.invariance import MAX_LENGTH, QWEN3, WIDE, cases

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config import rules
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.models.families import qwen3
from isoloss.parallel import Layout, UserError
from isoloss.parallel.aggregation import MODES
from isoloss.tools.prove.parity import TOLERANCE, compare, freeze, measure, merge

# Two more shapes of the same problem: tied embeddings and biases; and fewer key/value heads than TP ranks.
QWEN2 = WIDE | {"num_key_value_heads": 2}


def batch() -> list[Sample]:
    """16 sequences of 8 prompts; the last two are shorter than the context degree of most layouts."""
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(math.log(24), 0.9, 11).astype(int), 4, MAX_LENGTH).tolist()
    samples = []
    for index, length in enumerate([*lengths, MAX_LENGTH, 17, 9, 2, 3]):
        tokens = torch.from_numpy(rng.integers(0, VOCAB, length))
        mask = torch.from_numpy(rng.random(length) < 0.7)
        mask[0] = False
        samples.append(Sample(tokens, mask, group=index // 2))
    samples[11].mask_T[1:] = True  # of maximum length, every token a target
    samples[12].mask_T[:] = False  # fully masked
    samples[13].mask_T[:] = False
    samples[13].mask_T[5] = True  # one valid token
    samples[14].mask_T[1] = samples[15].mask_T[2] = True
    return samples


TOTAL = sum(len(sample) for sample in batch())
BUDGETS = (MAX_LENGTH, 160, 0)  # about one sequence a micro-batch, several, all in one


def all_layouts(arch) -> Iterator[Layout]:
    """Every layout of 2 to 8 ranks that the model admits, with TP sequence parallelism on and off."""
    degrees = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4))
    for tp, pp, vpp, ulysses, ring, dp in degrees:
        if not 2 <= tp * pp * ulysses * ring * dp <= 8 or (vpp > 1 and pp == 1):
            continue
        for sequence_parallel in (True, False) if tp > 1 else (False,):
            layout = Layout(tp, pp, vpp, ulysses, ring, dp=dp, sequence_parallel=sequence_parallel)
            try:
                rules.check(Config(ModelConfig("anywhere")), arch, layout)
            except UserError:
                continue
            yield layout


@pytest.fixture(scope="module")
def grid_of(pool, tmp_path_factory) -> Callable[..., Grid]:
    def make(name: str, sizes: dict[str, int], samples: list[Sample]) -> Grid:
        folder = tmp_path_factory.mktemp("invariance")
        config = Config(
            ModelConfig(str(write_config(folder / "model", published(name, **sizes))), from_scratch=True),
            batch=BatchConfig(max_tokens=TOTAL),
            optim=OptimConfig(lr=1e-3, clip=1.0),
            train=TrainConfig(precision="fp64", seed=3),
        )
        return Grid(pool, config, samples, folder)

    return make


@pytest.fixture(scope="module")
def grid(grid_of) -> Grid:
    return grid_of("qwen3", QWEN3, batch())


@pytest.fixture(scope="module")
def tied_grid(grid_of) -> Grid:
    return grid_of("qwen2", QWEN2, batch())


@pytest.fixture(scope="module")
def short_grid(grid_of) -> Grid:
    return grid_of("qwen3", QWEN3, [Sample(torch.tensor([5, 306, 17]), torch.tensor([False, True, True]))])


PAIRS = list(itertools.product(MODES, BUDGETS))
LAYOUTS = list(all_layouts(qwen3.architecture(published("qwen3", **QWEN3))))
FULL_PRODUCT = ("pp2+vpp2", "dp4")


def test_the_grid_is_what_it_says():
    """Every combination that the model admits is in the list: a rule that refuses too much would shorten it. The
    covering array uses every mode and budget."""
    assert sorted(str(layout) for layout in LAYOUTS) == sorted(world.BY_HAND.split())
    assert {pair for index, _ in enumerate(LAYOUTS) for pair in covering(index)} == set(PAIRS)
    assert len(LAYOUTS) == 97
    assert {layout.ulysses for layout in LAYOUTS} == {1, 2, 4, 8}
    assert {layout.ring for layout in LAYOUTS} == {1, 2, 4}
    assert {layout.tp for layout in LAYOUTS} == {layout.pp for layout in LAYOUTS} == {1, 2, 4}


def covering(index: int):
    """One mode and budget for layout number `index`; 5 is coprime to 18, so 18 layouts in a row see every pair."""
    return [PAIRS[5 * index % len(PAIRS)]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(grid, layout):
    grid.check(layout, cases(covering(LAYOUTS.index(layout))))


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL_PRODUCT)  # the others: test_whole_product
def test_every_mode_and_budget(grid, layout):
    grid.check(layout, cases(PAIRS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_product(grid, layout):
    grid.check(layout, cases(PAIRS))


UNEVEN = (("pp2", (3, 5)), ("pp3", (1, 4, 3)), ("pp2+vpp2", (1, 3, 2, 2)), ("pp4", (1, 2, 2, 3)), ("pp4+vpp2+dp2", ()))


@pytest.mark.parametrize(("layout", "stages"), UNEVEN, ids=[layout for layout, _ in UNEVEN])
def test_uneven_stages(grid, layout, stages):
    pairs = [("token-mean", MAX_LENGTH), ("seq-mean-token-mean", 160)]
    grid.check(layout, cases(pairs), parallel={"stage_layers": stages})


def test_batched_messages_between_two_interleaved_stages_are_wrong(grid_of):
    """Megatron's default. "Previous" and "next" are the same rank, and it confuses them: silently, where all messages
    have one shape."""
    rng = np.random.default_rng(0)
    rows = [Sample(torch.from_numpy(rng.integers(0, VOCAB, 32)), torch.arange(32) > 3) for _ in range(8)]
    grid, (case,) = grid_of("qwen3", QWEN3, rows), cases([("token-mean", 32)])
    reference = grid.reference(case)
    arguments = grid.on("pp2+vpp2"), grid.frozen, [case], grid.files_of([case])
    (found,) = merge(grid.on_ranks("pp2+vpp2", world.with_batched_messages, *arguments))
    against = compare(found, reference, TOLERANCE["fp64"])
    assert against.loss_error > 1e-6 and against.gradient_error > 1e-2
    grid.check("pp2+vpp2", [case])


RECOMPUTE = {
    "full": MemoryConfig("full"),
    "first-layer": MemoryConfig("full", recompute_layers=1),
    "core_attn": MemoryConfig("selective"),
    "mlp+layernorm": MemoryConfig("selective", ("mlp", "layernorm")),
    "all": MemoryConfig("selective", ("core_attn", "mlp", "layernorm")),
}


RECOMPUTED_ON = ("1", "tp2", "pp2+vpp2", "ulysses2", "ring2", "tp2+pp2+ulysses2")
RECOMPUTED = list(itertools.product(RECOMPUTE, RECOMPUTED_ON))


@pytest.mark.parametrize(("memory", "layout"), RECOMPUTED)
def test_recomputed_activations(grid, layout, memory):
    """Collectives of TP, Ulysses and the pipeline are entered again in the backward."""
    pairs = [("token-mean", MAX_LENGTH), ("prompt-mean-token-mean", 0)]
    grid.check(layout, cases(pairs), memory=RECOMPUTE[memory])


@pytest.mark.parametrize(
    "layout", ("tp2+pp2", "tp4+nosp", "tp4+ulysses2", "pp2+ulysses2+dp2", "tp2+pp2+vpp2+dp2", "tp4+ring2")
)
def test_tied_embeddings_biases_and_few_kv_heads(tied_grid, layout):
    tied_grid.check(layout, cases([("token-mean", 0), ("seq-mean-token-mean", 160)]))


@pytest.mark.parametrize(
    "layout", ("dp4", "ulysses8", "tp4+dp2", "pp2+vpp2", "tp2+pp2+ulysses2", "ring4", "ulysses2+ring4")
)
def test_fewer_tokens_than_ranks(short_grid, layout):
    """One sequence of three tokens: ranks without a sample, slices of padding only, and nobody waits for anybody."""
    short_grid.check(layout, cases([("token-mean", 0), ("seq-mean-token-sum", 0)]))


@pytest.mark.parametrize("ulysses", (2, 8))
def test_sequence_parallel_1_2_and_8_give_the_same_numbers(grid, ulysses):
    """SP = 1, 2 and 8, as its own statement: fp64 loss, gradient norm and every gradient; fp32 loss."""
    layout = Layout(ulysses=ulysses)
    grid.check(layout, cases((mode, 0) for mode in MODES))
    one, many = (grid.on_ranks(size, world.losses, grid.on(size, "fp32"), grid.frozen, 1)[0] for size in ("1", layout))
    assert many == pytest.approx(one, rel=1e-6)


LONG_RUNS = ("tp2", "tp2+nosp", "pp2", "pp2+vpp2", "ulysses2", "ulysses8", "dp2", "tp2+pp2+ulysses2")
RING_RUNS = ("ring2", "ring4", "ulysses2+ring2", "ulysses2+ring4", "tp2+ring2+dp2", "pp2+vpp2+ring2")
# The ring ends where the optimizer begins: with both kinds of that, the layouts without one.
TWENTY_STEPS = [*itertools.product(LONG_RUNS, (True, False)), *((layout, True) for layout in RING_RUNS)]


@pytest.fixture(scope="module")
def twenty_steps(grid):
    return grid.on_ranks("1", world.losses, grid.on("1", "fp32"), grid.frozen, 20)[0]


@pytest.mark.parametrize(("layout", "distributed_optimizer"), TWENTY_STEPS)
def test_twenty_fp32_steps(grid, twenty_steps, layout, distributed_optimizer):
    parallel = {"distributed_optimizer": distributed_optimizer}
    config = grid.on(layout, "fp32", parallel, batch=BatchConfig(max_tokens=160))
    found = grid.on_ranks(layout, world.losses, config, grid.frozen, 20)[0]
    assert found[0] == pytest.approx(twenty_steps[0], rel=1e-6)
    assert found[-1] == pytest.approx(twenty_steps[-1], rel=1e-4)
    assert twenty_steps[-1] < 0.9 * twenty_steps[0]  # the weights did move


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stages", "memory"),
    (
        ("1", (), "full"),
        ("pp2", (3, 5), "first-layer"),
        ("pp2+vpp2", (1, 3, 2, 2), "full"),
        ("tp2+pp2+ulysses2", (3, 5), "all"),
    ),
)
def test_twenty_fp32_steps_with_uneven_stages_and_recomputation(grid, twenty_steps, layout, stages, memory):
    changes = {"batch": BatchConfig(max_tokens=160), "memory": RECOMPUTE[memory]}
    config = grid.on(layout, "fp32", {"stage_layers": stages}, **changes)
    found = grid.on_ranks(layout, world.losses, config, grid.frozen, 20)[0]
    assert found[0] == pytest.approx(twenty_steps[0], rel=1e-6)
    assert found[-1] == pytest.approx(twenty_steps[-1], rel=1e-4)


@pytest.mark.parametrize("layout", ("1", "dp4", "ulysses2+dp2", "tp2+pp2+vpp2"))
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_all_reduce_of_counts_a_step(grid, layout, budget):
    config = grid.on(layout, batch=BatchConfig(max_tokens=budget or TOTAL))
    for calls, micro_batches in grid.on_ranks(layout, world.count_reductions, config, grid.frozen):
        assert calls == 1
        assert micro_batches > 1 or budget != MAX_LENGTH


@pytest.mark.parametrize("count_fully_masked", (False, True))
def test_numbers_of_prompts_are_names(grid, count_fully_masked):
    """Any whole numbers, however far apart: what counts is which samples share one."""
    loss = LossConfig("prompt-mean-token-mean", count_fully_masked=count_fully_masked)
    dense, sparse = batch(), [dataclasses.replace(s, group=5000 - 7 * s.group) for s in batch()]
    one, two = (
        grid.on_ranks("1", world.evaluated, grid.on("1"), freeze(samples), loss)[0] for samples in (dense, sparse)
    )
    assert one == two


def test_the_order_of_the_samples_does_not_matter(grid):
    frozen = freeze([batch()[index] for index in np.random.default_rng(0).permutation(len(batch()))])
    for layout, budget in (("1", 160), ("dp2", 160), ("ulysses2", 0)):
        all_modes = cases((mode, budget) for mode in MODES)
        grid.refer(all_modes)
        run = grid.on_ranks(layout, measure, grid.on(layout), frozen, all_modes, grid.files_of(all_modes))
        for case, found in zip(all_modes, merge(run), strict=True):
            against = compare(found, grid.reference(case), TOLERANCE["fp64"])
            assert against.passed, f"{layout} {case}: {against.reason}"


def by_definition(mode: str, negative_logprobs: list[list[float]], groups: list[int]) -> float:
    """The table of docs/normalization.md, sequence by sequence, without weights."""
    valid = [(terms, group) for terms, group in zip(negative_logprobs, groups) if terms]
    sums = [sum(terms) for terms, _ in valid]
    tokens = sum(len(terms) for terms, _ in valid)
    if mode == "token-mean":
        return sum(sums) / tokens
    if mode == "seq-mean-token-mean":
        return sum(total / len(terms) for total, (terms, _) in zip(sums, valid)) / len(valid)
    if mode == "prompt-mean-token-mean":
        of_prompt = {group: [t for terms, g in valid if g == group for t in terms] for _, group in valid}
        return sum(sum(terms) / len(terms) for terms in of_prompt.values()) / len(of_prompt)
    divisor = {"seq-mean-token-sum": len(valid), "seq-mean-token-sum-norm": len(valid) * MAX_LENGTH, "sum": 1}
    return sum(sums) / divisor[mode]


@pytest.mark.parametrize("layout", ("1", "tp2+pp2+ulysses2", "dp4"))
def test_the_loss_is_its_definition(grid, layout):
    """Log-probabilities, taken through another path, put into the plain formula of each mode."""
    values = grid.on_ranks(layout, world.logprobs, grid.on(layout, batch=BatchConfig(max_tokens=160)), grid.frozen)
    assert all(v == values[0] for v in values)  # every rank has them all
    samples = batch()
    terms = [[-p for p, m in zip(row, s.mask_T.tolist()) if m] for row, s in zip(values[0], samples, strict=True)]
    for mode in MODES:
        expected = by_definition(mode, terms, [s.group for s in samples])
        (case,) = cases([(mode, 0)])
        assert grid.reference(case).loss == pytest.approx(expected, rel=1e-12), mode
