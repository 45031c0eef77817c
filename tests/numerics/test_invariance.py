"""The promise: loss and gradients are the same on every layout, token budget and aggregation mode.

Every layout of at most eight ranks is compared, parameter by parameter in fp64, with one rank and one micro-batch. The
batch has log-normal lengths, a sequence without a valid token, one with a single valid token and one of maximum length.
"""

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support import invariance as world
from support.invariance import MAX_LENGTH, QWEN3, VOCAB, loss_of
from support.thinned import covering_pairs, thinned

from isoloss.engine import legality
from isoloss.engine.batch import Sample
from isoloss.engine.config import BatchConfig, Config, LossConfig, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from isoloss.models import qwen3
from isoloss.models.registry import read_architecture
from isoloss.parallel import Layout, UserError
from isoloss.parallel.normalizer import MODES
from isoloss.tools.parity import TOLERANCE, Case, compare, freeze, measure, merge, reference_file
from isoloss.tools.plants import NONE
from isoloss.tools.prove import on_layout

# Two more shapes of the same problem: tied embeddings and biases; and fewer key/value heads than TP ranks.
QWEN2 = {k: v for k, v in QWEN3.items() if k != "head_dim"} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 48,  # 8 heads of 6
    "tie_word_embeddings": True,
    "num_key_value_heads": 2,
}


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


PLAIN = MemoryConfig()
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
                legality.check(Config(ModelConfig("anywhere")), arch, layout)
            except UserError:
                continue
            yield layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("invariance")
    for name, values in (("qwen3", QWEN3), ("qwen2", QWEN2)):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(values))
    return path


def config_of(path, **train) -> Config:
    return Config(
        ModelConfig(path=str(path), from_scratch=True),
        batch=BatchConfig(max_tokens=TOTAL),
        optim=OptimConfig(lr=1e-3, clip=1.0),
        train=TrainConfig(**{"precision": "fp64", "seed": 3} | train),
    )


class Grid:
    """References of one rank for every mode, and comparisons of other layouts with them."""

    def __init__(self, pool, folder, family: str, samples: list[Sample] | None = None):
        self.pool = pool
        self.config = config_of(folder / family)
        self.arch = read_architecture(folder / family)
        self.frozen = freeze(samples or batch())
        references = tempfile.mkdtemp(dir=folder)
        self.files = {mode: reference_file(references, mode) for mode in MODES}
        cases = [Case(0, loss_of(mode)) for mode in MODES]
        run = pool.run(1, measure, self.on(Layout()), self.frozen, cases, list(self.files.values()), NONE, True)
        self.references = dict(zip(MODES, merge(run)))

    def on(self, layout: Layout, precision: str = "fp64", stages: tuple[int, ...] = (), memory=PLAIN) -> Config:
        config = on_layout(dataclasses.replace(self.config, memory=memory), layout, precision)
        return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, stage_layers=stages))

    def check(self, layout: Layout, pairs, stages: tuple[int, ...] = (), memory=PLAIN) -> None:
        cases = [Case(budget, loss_of(mode)) for mode, budget in pairs]
        files = [self.files[mode] for mode, _ in pairs]
        config = self.on(layout, stages=stages, memory=memory)
        run = self.pool.run(layout.world_size, measure, config, self.frozen, cases, files)
        for (mode, budget), found in zip(pairs, merge(run), strict=True):
            against = compare(found, self.references[mode], TOLERANCE["fp64"])
            assert against.passed, f"{layout} {mode} budget {budget}: {against.reason}"
            assert found.canary is None
            assert found.parameters.keys() == self.references[mode].parameters.keys()


@pytest.fixture(scope="module")
def grid(pool, folder) -> Grid:
    return Grid(pool, folder, "qwen3")


@pytest.fixture(scope="module")
def tied_grid(pool, folder) -> Grid:
    return Grid(pool, folder, "qwen2")


@pytest.fixture(scope="module")
def short_grid(pool, folder) -> Grid:
    return Grid(pool, folder, "qwen3", [Sample(torch.tensor([5, 306, 17]), torch.tensor([False, True, True]))])


PAIRS = list(itertools.product(MODES, BUDGETS))
LAYOUTS = list(all_layouts(qwen3.architecture(QWEN3)))
FULL_PRODUCT = ("pp2+vpp2", "dp4", "tp2+pp2+ulysses2")


def test_the_grid_is_what_it_says():
    """Every combination that the model admits is in the list: a rule that refuses too much would shorten it. The
    covering array uses every mode and budget."""
    assert sorted(str(layout) for layout in LAYOUTS) == sorted(world.BY_HAND.split())
    assert {pair for index, _ in enumerate(LAYOUTS) for pair in covering(index)} == set(PAIRS)
    assert len(LAYOUTS) == 97 and 10 < len(PAIRWISE) < 50
    assert {layout.ulysses for layout in LAYOUTS} == {1, 2, 4, 8}
    assert {layout.ring for layout in LAYOUTS} == {1, 2, 4}
    assert {layout.tp for layout in LAYOUTS} == {layout.pp for layout in LAYOUTS} == {1, 2, 4}


def covering(index: int):
    """One mode and budget for layout number `index`; 5 is coprime to 18, so 18 layouts in a row see every pair."""
    return [PAIRS[5 * index % len(PAIRS)]]


# In `make test-all` every two degrees that go together do so in some layout.
PAIRWISE = covering_pairs([dataclasses.astuple(layout) for layout in LAYOUTS])


@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: dataclasses.astuple(layout) in PAIRWISE), ids=str)
def test_every_layout(grid, layout):
    grid.check(layout, covering(LAYOUTS.index(layout)))


@pytest.mark.parametrize("layout", FULL_PRODUCT)  # the others: test_whole_product
def test_every_mode_and_budget(grid, layout):
    grid.check(Layout.parse(layout), PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_product(grid, layout):
    grid.check(layout, PAIRS)


UNEVEN = (("pp2", (3, 5)), ("pp3", (1, 4, 3)), ("pp2+vpp2", (1, 3, 2, 2)), ("pp4", (1, 2, 2, 3)), ("pp4+vpp2+dp2", ()))


@pytest.mark.parametrize(("layout", "stages"), UNEVEN, ids=[layout for layout, _ in UNEVEN])
def test_uneven_stages(grid, layout, stages):
    grid.check(Layout.parse(layout), [("token-mean", MAX_LENGTH), ("seq-mean-token-mean", 160)], stages)


def test_batched_messages_between_two_interleaved_stages_are_wrong(pool, folder):
    """Megatron's default. "Previous" and "next" are the same rank, and it confuses them: silently, where all messages
    have one shape."""
    rng = np.random.default_rng(0)
    rows = [Sample(torch.from_numpy(rng.integers(0, VOCAB, 32)), torch.arange(32) > 3) for _ in range(8)]
    grid, layout = Grid(pool, folder, "qwen3", rows), Layout.parse("pp2+vpp2")
    arguments = grid.on(layout), grid.frozen, [Case(32, loss_of("token-mean"))], [grid.files["token-mean"]]
    (found,) = merge(pool.run(2, world.with_batched_messages, *arguments))
    against = compare(found, grid.references["token-mean"], TOLERANCE["fp64"])
    assert against.loss_error > 1e-6 and against.gradient_error > 1e-2
    grid.check(layout, [("token-mean", 32)])


RECOMPUTE = {
    "full": MemoryConfig("full"),
    "first-layer": MemoryConfig("full", recompute_layers=1),
    "core_attn": MemoryConfig("selective"),
    "mlp+layernorm": MemoryConfig("selective", ("mlp", "layernorm")),
    "all": MemoryConfig("selective", ("core_attn", "mlp", "layernorm")),
}


RECOMPUTED_ON = ("1", "tp2", "pp2+vpp2", "ulysses2", "ring2", "tp2+pp2+ulysses2")
RECOMPUTED = list(itertools.product(RECOMPUTE, RECOMPUTED_ON))


@pytest.mark.parametrize(("memory", "layout"), thinned(RECOMPUTED, lambda row: RECOMPUTED.index(row) % 5 < 2))
def test_recomputed_activations(grid, layout, memory):
    """Collectives of TP, Ulysses and the pipeline are entered again in the backward."""
    pairs = [("token-mean", MAX_LENGTH), ("prompt-mean-token-mean", 0)]
    grid.check(Layout.parse(layout), pairs, memory=RECOMPUTE[memory])


@pytest.mark.parametrize(
    "layout", ("tp2+pp2", "tp4+nosp", "tp4+ulysses2", "pp2+ulysses2+dp2", "tp2+pp2+vpp2+dp2", "tp4+ring2")
)
def test_tied_embeddings_biases_and_few_kv_heads(tied_grid, layout):
    tied_grid.check(Layout.parse(layout), [("token-mean", 0), ("seq-mean-token-mean", 160)])


@pytest.mark.parametrize(
    "layout", ("dp4", "ulysses8", "tp4+dp2", "pp2+vpp2", "tp2+pp2+ulysses2", "ring4", "ulysses2+ring4")
)
def test_fewer_tokens_than_ranks(short_grid, layout):
    """One sequence of three tokens: ranks without a sample, slices of padding only, and nobody waits for anybody."""
    short_grid.check(Layout.parse(layout), [("token-mean", 0), ("seq-mean-token-sum", 0)])


@pytest.mark.parametrize("ulysses", (2, 8))
def test_sequence_parallel_1_2_and_8_give_the_same_numbers(pool, folder, grid, ulysses):
    """SP = 1, 2 and 8, as its own statement: fp64 loss, gradient norm and every gradient; fp32 loss."""
    layout = Layout(ulysses=ulysses)
    grid.check(layout, [(mode, 0) for mode in MODES])
    one, many = (
        pool.run(size.world_size, world.losses, grid.on(size, "fp32"), grid.frozen, 1)[0] for size in (Layout(), layout)
    )
    assert many == pytest.approx(one, rel=1e-6)


LONG_RUNS = ("tp2", "tp2+nosp", "pp2", "pp2+vpp2", "ulysses2", "ulysses8", "dp2", "tp2+pp2+ulysses2")
RING_RUNS = ("ring2", "ring4", "ulysses2+ring2", "ulysses2+ring4", "tp2+ring2+dp2", "pp2+vpp2+ring2")
# The ring ends where the optimizer begins: with both kinds of that, the layouts without one.
ORDINARY_RUNS = ("pp2", "ulysses2", "dp2", "tp2+nosp", "tp2+pp2+ulysses2", "ring2", "pp2+vpp2+ring2")
TWENTY_STEPS = [*itertools.product(LONG_RUNS, (True, False)), *((layout, True) for layout in RING_RUNS)]


@pytest.fixture(scope="module")
def twenty_steps(pool, grid):
    return pool.run(1, world.losses, grid.on(Layout(), "fp32"), grid.frozen, 20)[0]


@pytest.mark.parametrize(
    ("layout", "distributed_optimizer"),
    thinned(TWENTY_STEPS, lambda row: row[0] in ("tp2", "pp2+vpp2") or (row[1] and row[0] in ORDINARY_RUNS)),
)
def test_twenty_fp32_steps(pool, grid, twenty_steps, layout, distributed_optimizer):
    config = grid.on(Layout.parse(layout), "fp32")
    parallel = dataclasses.replace(config.parallel, distributed_optimizer=distributed_optimizer)
    config = dataclasses.replace(config, parallel=parallel, batch=BatchConfig(max_tokens=160))
    found = pool.run(Layout.parse(layout).world_size, world.losses, config, grid.frozen, 20)[0]
    assert found[0] == pytest.approx(twenty_steps[0], rel=1e-6)
    assert found[-1] == pytest.approx(twenty_steps[-1], rel=1e-4)
    assert twenty_steps[-1] < 0.9 * twenty_steps[0]  # the weights did move


@pytest.mark.parametrize(
    ("layout", "stages", "memory"),
    (
        ("1", (), "full"),
        ("pp2", (3, 5), "first-layer"),
        ("pp2+vpp2", (1, 3, 2, 2), "full"),
        ("tp2+pp2+ulysses2", (3, 5), "all"),
    ),
)
def test_twenty_fp32_steps_with_uneven_stages_and_recomputation(pool, grid, twenty_steps, layout, stages, memory):
    config = grid.on(Layout.parse(layout), "fp32", stages, RECOMPUTE[memory])
    config = dataclasses.replace(config, batch=BatchConfig(max_tokens=160))
    found = pool.run(Layout.parse(layout).world_size, world.losses, config, grid.frozen, 20)[0]
    assert found[0] == pytest.approx(twenty_steps[0], rel=1e-6)
    assert found[-1] == pytest.approx(twenty_steps[-1], rel=1e-4)


@pytest.mark.parametrize("layout", ("1", "dp4", "ulysses2+dp2", "tp2+pp2+vpp2"))
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_all_reduce_of_counts_a_step(pool, grid, layout, budget):
    config = dataclasses.replace(grid.on(Layout.parse(layout)), batch=BatchConfig(max_tokens=budget or TOTAL))
    world_size = Layout.parse(layout).world_size
    for calls, micro_batches in pool.run(world_size, world.count_reductions, config, grid.frozen):
        assert calls == 1
        assert micro_batches > 1 or budget != MAX_LENGTH


@pytest.mark.parametrize("count_fully_masked", (False, True))
def test_numbers_of_prompts_are_names(pool, grid, count_fully_masked):
    """Any whole numbers, however far apart: what counts is which samples share one."""
    loss = LossConfig("prompt-mean-token-mean", count_fully_masked=count_fully_masked)
    dense, sparse = batch(), [dataclasses.replace(s, group=5000 - 7 * s.group) for s in batch()]
    one, two = (
        pool.run(1, world.evaluated, grid.on(Layout()), freeze(samples), loss)[0] for samples in (dense, sparse)
    )
    assert one == two


def test_the_order_of_the_samples_does_not_matter(pool, grid):
    frozen = freeze([batch()[index] for index in np.random.default_rng(0).permutation(len(batch()))])
    for layout, budget in (("1", 160), ("dp2", 160), ("ulysses2", 0)):
        cases = [Case(budget, loss_of(mode)) for mode in MODES]
        config = grid.on(Layout.parse(layout))
        run = pool.run(Layout.parse(layout).world_size, measure, config, frozen, cases, list(grid.files.values()))
        for mode, found in zip(MODES, merge(run), strict=True):
            against = compare(found, grid.references[mode], TOLERANCE["fp64"])
            assert against.passed, f"{layout} {mode}: {against.reason}"


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
def test_the_loss_is_its_definition(pool, grid, layout):
    """Log-probabilities, taken through another path, put into the plain formula of each mode."""
    config = dataclasses.replace(grid.on(Layout.parse(layout)), batch=BatchConfig(max_tokens=160))
    values = pool.run(Layout.parse(layout).world_size, world.logprobs, config, grid.frozen)
    assert all(v == values[0] for v in values)  # every rank has them all
    samples = batch()
    terms = [[-p for p, m in zip(row, s.mask_T.tolist()) if m] for row, s in zip(values[0], samples, strict=True)]
    for mode in MODES:
        expected = by_definition(mode, terms, [s.group for s in samples])
        assert grid.references[mode].loss == pytest.approx(expected, rel=1e-12), mode
