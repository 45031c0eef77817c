"""The promise, for mixtures of experts: loss, gradients, choices of experts and selection biases are the same on every
layout, token budget and aggregation mode, with the losses of the routers and without.

Every layout is compared, parameter by parameter in fp64, with one rank and one micro-batch.
"""

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support import experts as world
from support import invariance
from support.experts import MODELS
from support.invariance import VOCAB
from support.thinned import thinned

from isoloss.engine.batch import Sample
from isoloss.engine.config import (
    BatchConfig,
    Config,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.plan import CostModel
from isoloss.engine.rl.config import RLConfig, RolloutConfig
from isoloss.models.registry import read_architecture
from isoloss.parallel import Layout
from isoloss.parallel.normalizer import MODES
from isoloss.tools.parity import TOLERANCE, Case, Measurement, compare, freeze, measure, merge, reference_file
from isoloss.tools.plants import MOE_PLANTS, NONE, Plant, Run
from isoloss.tools.prove import on_layout

LENGTHS = (37, 5, 1, 23, 2, 61, 11, 3, 47, 29)  # 219 tokens; the third and the fifth are shorter than some contexts
KEPT = MemoryConfig()  # every activation
BUDGETS = (61, 110, 0)  # about one sequence a micro-batch, several, all in one
PAIRS = list(itertools.product(MODES, BUDGETS))
# Coefficients that give the losses of the routers a weight like that of the cross-entropy.
ROUTER_LOSSES = MoeConfig("sequence", 0.5, 0.1)
MOE = {"qwen3-moe": ROUTER_LOSSES, "mixtral": MoeConfig(), "glm-4.5": ROUTER_LOSSES}
LAYOUTS = (
    "dp2",
    "pp2",
    "pp2+vpp2",
    "ep2+dp2",
    "tp2+ep2",
    "tp2+etp2",
    "ulysses2+ep2",
    "ep4+dp4",
    "ep2+dp4",
    "tp2+ep2+etp2+dp2",
    "tp2+pp2+ep2",
    "pp2+vpp2+ep2+dp2",
    "tp2+pp2+ulysses2+ep2",
    "ring2+ep2",
    "ulysses2+ring2+ep2",
)


def batch(lengths=LENGTHS) -> list[Sample]:
    """Random targets; the fifth sequence of five or more has none."""
    rng = np.random.default_rng(7)
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.from_numpy(rng.random(length) < 0.7)
        mask[0] = False
        samples.append(Sample(torch.from_numpy(rng.integers(0, VOCAB, length)), mask & (index != 4), index // 2))
    return samples


def loss_of(mode: str) -> LossConfig:
    return LossConfig(mode, 64 if mode == "seq-mean-token-sum-norm" else None)


class Grid:
    """References of one rank for every mode, and comparisons of other layouts with them."""

    def __init__(self, pool, folder, model: str, moe: MoeConfig, samples: list[Sample] | None = None):
        self.pool = pool
        self.config = Config(
            ModelConfig(path=str(folder / model), from_scratch=True),
            moe=moe,
            optim=OptimConfig(lr=1e-4, clip=1.0),
            train=TrainConfig(precision="fp64", seed=3),
        )
        self.arch = read_architecture(folder / model)
        self.frozen = freeze(samples or batch())
        references = tempfile.mkdtemp(dir=folder)
        self.files = {mode: reference_file(references, mode) for mode in MODES}
        cases = [Case(0, loss_of(mode)) for mode in MODES]
        run = pool.run(1, measure, self.on("1"), self.frozen, cases, list(self.files.values()), NONE, True)
        self.references: Mapping[str, Measurement] = dict(zip(MODES, merge(run)))

    def on(self, layout: str, precision: str = "fp64", max_tokens: int = 61) -> Config:
        config = on_layout(self.config, Layout.parse(layout), precision)
        return dataclasses.replace(config, batch=BatchConfig(max_tokens=max_tokens))

    def run(self, layout: str, pairs, plant: Plant = NONE, memory: MemoryConfig = KEPT) -> list[Measurement]:
        cases = [Case(budget, loss_of(mode)) for mode, budget in pairs]
        files = [self.files[mode] for mode, _ in pairs]
        config = dataclasses.replace(self.on(layout), memory=memory)
        world_size = Layout.parse(layout).world_size
        return merge(self.pool.run(world_size, measure, config, self.frozen, cases, files, plant))

    def check(self, layout: str, pairs, memory: MemoryConfig = KEPT) -> None:
        for (mode, budget), found in zip(pairs, self.run(layout, pairs, memory=memory), strict=True):
            against = compare(found, self.references[mode], TOLERANCE["fp64"])
            assert against.passed, f"{layout} {mode} budget {budget}: {against.reason}"
            assert found.canary is None
            assert found.parameters.keys() == self.references[mode].parameters.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    for name, values in MODELS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def grids(pool, folder):
    """A grid of each model, made when it is first asked for."""
    made: dict[str, Grid] = {}

    def grid(model: str) -> Grid:
        if model not in made:
            made[model] = Grid(pool, folder, model, MOE[model])
        return made[model]

    return grid


def covering(model: str, layout: str) -> list[tuple[str, int]]:
    """Two modes and budgets for a model and a layout; 5 is coprime to 18, so that neighbours see other pairs."""
    index = 2 * (list(MODELS).index(model) * len(LAYOUTS) + LAYOUTS.index(layout))
    return [PAIRS[5 * (index + k) % len(PAIRS)] for k in range(2)]


def test_the_grid_is_what_it_says(grids):
    """Every mode and budget is run, and every expert, router and shared expert of every layer is compared."""
    assert {pair for model in MODELS for layout in LAYOUTS for pair in covering(model, layout)} == set(PAIRS)
    for model in MODELS:
        grid = grids(model)
        compared = grid.references["token-mean"].parameters.keys()
        sparse = [layer for layer in range(grid.arch.num_layers) if grid.arch.has_experts(layer)]
        assert len(sparse) == 4 - (model == "glm-4.5")
        wanted = {f"decoder.layers.{layer}.mlp.router.weight" for layer in sparse}
        for layer, expert, part in itertools.product(sparse, range(grid.arch.experts.count), (1, 2)):
            wanted.add(f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{part}.weight")
        if grid.arch.experts.shared_size:
            wanted |= {f"decoder.layers.{k}.mlp.shared_experts.linear_fc{n}.weight" for k in sparse for n in (1, 2)}
        assert wanted <= compared
        assert {layer.tokens for layer in grid.references["sum"].routing.values()} == {sum(LENGTHS)}
        assert list(grid.references["sum"].routing) == [layer + 1 for layer in sparse]
        assert grid.references["sum"].flips == 0 and grid.references["sum"].smallest_margin > 1e-9


def test_the_losses_of_the_routers_matter(grids):
    """Enough of them is in loss and gradient that the comparison would see it if they went wrong."""
    terms = grids("glm-4.5").references["seq-mean-token-mean"].details
    assert 3 <= terms["moe_aux_loss"] < 6  # 3 layers, each at least 1 but for sequences of few tokens
    assert terms["moe_z_loss"] > 1
    total = terms["loss"] + 0.5 * terms["moe_aux_loss"] + 0.1 * terms["moe_z_loss"]
    assert grids("glm-4.5").references["seq-mean-token-mean"].loss == pytest.approx(total, rel=1e-14)
    assert set(grids("mixtral").references["sum"].details) == {"loss"}


ROWS = list(itertools.product(MODELS, LAYOUTS))


# In `make test-all` each layout with one model, and with all three where every axis is split.
@pytest.mark.parametrize(
    ("model", "layout"),
    thinned(
        ROWS,
        lambda row: (
            (list(MODELS).index(row[0]) + LAYOUTS.index(row[1])) % len(MODELS) == 0 or row[1] == "tp2+pp2+ulysses2+ep2"
        ),
    ),
)
def test_every_layout(grids, model, layout):
    grids(model).check(layout, covering(model, layout))


def test_every_mode_and_budget(grids):
    grids("qwen3-moe").check("ep4+dp4", PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_whole_product(grids, model, layout):
    grids(model).check(layout, PAIRS)


@pytest.mark.parametrize("layout", ("ep4+dp4", "tp2+ep4+dp4", "ulysses4+ep4", "pp2+vpp2+ep2+dp2"))
def test_fewer_sequences_than_ranks(pool, folder, layout):
    """Ranks with dummy rows only, whose tokens go to experts and count nowhere."""
    pairs = [("token-mean", 0), ("seq-mean-token-sum", 0), ("sum", 0)]
    Grid(pool, folder, "qwen3-moe", ROUTER_LOSSES, batch((67, 59))).check(layout, pairs)


FASTER = OptimConfig(lr=1e-3, clip=1.0)
ORDINARY_RUNS = (("pp2+vpp2", True), ("ep4+dp4", True), ("tp2+ep2+etp2+dp2", False))
FP32_RUNS = ("pp2+vpp2", "ep4+dp4", "tp2+ep2+etp2+dp2", "tp2+pp2+ulysses2+ep2", "ulysses2+ring2+ep2")


@pytest.fixture(scope="module")
def twenty_steps(pool, grids):
    config = dataclasses.replace(grids("qwen3-moe").on("1", "fp32", 219), optim=FASTER)
    return pool.run(1, invariance.losses, config, grids("qwen3-moe").frozen, 20)[0]


@pytest.mark.parametrize(
    ("layout", "distributed_optimizer"),
    thinned(list(itertools.product(FP32_RUNS, (True, False))), lambda row: row in ORDINARY_RUNS),
)
def test_twenty_fp32_steps(pool, grids, twenty_steps, layout, distributed_optimizer):
    config = grids("qwen3-moe").on(layout, "fp32", 110)
    parallel = dataclasses.replace(config.parallel, distributed_optimizer=distributed_optimizer)
    config = dataclasses.replace(config, parallel=parallel, optim=FASTER)
    found = pool.run(Layout.parse(layout).world_size, invariance.losses, config, grids("qwen3-moe").frozen, 20)[0]
    assert found[0] == pytest.approx(twenty_steps[0], rel=1e-6)
    assert found[-1] == pytest.approx(twenty_steps[-1], rel=1e-4)
    assert twenty_steps[-1] < 0.9 * twenty_steps[0]  # the weights did move


RECOMPUTE = {
    "full": MemoryConfig("full"),
    "first-layers": MemoryConfig("full", recompute_layers=1),
    "moe": MemoryConfig("selective", ("moe",)),
    "all-parts": MemoryConfig("selective", ("core_attn", "mlp", "moe", "shared_experts", "layernorm")),
}


@pytest.mark.parametrize("layout", ("1", "pp2+vpp2", "tp2+ep2+dp2"))
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_is_computed_again_counts_once(grids, layout, recompute):
    """Of the first layer of each stage as well, behind which Megatron's own padding mask is lost."""
    grids("glm-4.5").check(layout, [("seq-mean-token-mean", 61)], RECOMPUTE[recompute])


def test_the_gradient_is_the_slope_of_the_logged_loss(pool, grids):
    """By a finite difference along the gradient, the losses of the routers included."""
    for layout in ("1", "tp2+ep2"):
        world_size = Layout.parse(layout).world_size
        for claimed, measured in pool.run(
            world_size, world.slope, grids("glm-4.5").on(layout), grids("glm-4.5").frozen
        ):
            assert measured == pytest.approx(claimed, rel=1e-6)


@pytest.mark.parametrize("layout", ("1", "ulysses2+ep2", "tp2+pp2+ep2"))
def test_one_all_reduce_of_counts_a_step(pool, grids, layout):
    config = grids("glm-4.5").on(layout)
    calls = pool.run(Layout.parse(layout).world_size, invariance.count_reductions, config, grids("glm-4.5").frozen)
    assert {count for count, _ in calls} == {1} and all(micro_batches > 1 for _, micro_batches in calls)


def test_evaluation_is_without_the_losses_of_the_routers(pool, grids):
    for layout in ("1", "ep2+dp2"):
        config = grids("glm-4.5").on(layout)
        for trained, term, evaluated in pool.run(
            Layout.parse(layout).world_size, world.loss_without_gradients, config, grids("glm-4.5").frozen
        ):
            assert evaluated == pytest.approx(term, rel=1e-14)
            assert trained > 1.1 * evaluated


@pytest.mark.parametrize("critic", (False, True), ids=("policy", "critic"))
def test_reinforcement_learning(pool, folder, tmp_path, critic):
    """A policy's step has the losses of the routers, by the same path; its critic's has not, and both are invariant."""
    rng = np.random.default_rng(11)
    samples = []
    for sample in batch():
        near = -np.log(VOCAB) + rng.normal(0, 0.3, (2, len(sample)))
        values = {"advantages": rng.normal(0, 1, len(sample)), "train_logprobs": near[0], "rollout_logprobs": near[1]}
        values |= {"returns": rng.normal(0, 0.3, len(sample)), "old_values": rng.normal(0, 0.2, len(sample))}
        fields = {name: torch.from_numpy(value) * sample.mask_T for name, value in values.items()}
        samples.append(dataclasses.replace(sample, fields=fields))
    config = RLConfig(
        ModelConfig(path=str(folder / "qwen3-moe"), from_scratch=True),
        moe=ROUTER_LOSSES,
        train=TrainConfig(precision="fp64", seed=3),
        rollout=RolloutConfig(max_new_tokens=64),
    )
    frozen, file = freeze(samples), reference_file(tmp_path, "rl")

    def run(layout: str, budget: int, *more) -> Measurement:
        layout = Layout.parse(layout)
        case = Case(budget, loss_of("seq-mean-token-mean"), config, critic)
        return merge(
            pool.run(layout.world_size, measure, on_layout(config, layout, "fp64"), frozen, [case], [file], *more)
        )[0]

    reference = run("1", 0, NONE, True)
    assert ("moe_aux_loss" in reference.details) != critic
    for layout in ("ep2+dp2", "tp2+pp2+ulysses2+ep2"):
        against = compare(run(layout, 61), reference, TOLERANCE["fp64"])
        assert against.passed, f"{layout}: {against.reason}"


# ---- selection biases -----------------------------------------------------------------------------------------------

BALANCED_BY_BIAS = MoeConfig("sequence", 1e-3, 1e-4, bias_update_rate=0.003)
STEPS = {"fp32": 20, "fp64": 6}


@pytest.fixture(scope="module")
def biased(pool, folder) -> Grid:
    return Grid(pool, folder, "glm-4.5", BALANCED_BY_BIAS)


def all_biases(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of all stages; ranks that have the same one agree."""
    biases: dict[str, list[float]] = {}
    for of_rank in of_ranks:
        assert all(biases.setdefault(name, values) == values for name, values in of_rank.items())
    return biases


@pytest.fixture(scope="module")
def expected_biases(pool, biased):
    """Of one rank with everything in one micro-batch."""
    return {
        precision: pool.run(1, world.selection_biases, biased.on("1", precision, 219), biased.frozen, steps)[0]
        for precision, steps in STEPS.items()
    }


LONG_RUNS = ("1", "pp2+vpp2", "ep4+dp4", "tp2+ep2+etp2+dp2", "tp2+pp2+ulysses2+ep2")
BIAS_RUNS = [*(("fp64", layout) for layout in ("1", *LAYOUTS)), *(("fp32", layout) for layout in LONG_RUNS)]


@pytest.mark.parametrize(
    ("precision", "layout"),
    thinned(
        BIAS_RUNS, lambda row: row[1] in LONG_RUNS[:4] if row[0] == "fp32" else row[1] in (*LONG_RUNS, LAYOUTS[-1])
    ),
)
def test_selection_biases_are_bit_equal(pool, biased, expected_biases, precision, layout):
    config = biased.on(layout, precision, 110)
    run = (world.selection_biases, config, biased.frozen, STEPS[precision])
    found = all_biases(pool.run(Layout.parse(layout).world_size, *run))
    assert found == expected_biases[precision]
    assert len(found) == 3 and all(len(set(bias)) > 2 for bias in found.values())  # they did move


def test_a_bias_moves_by_its_definition(pool, biased):
    """Algorithm 1 of arXiv:2408.15664, of the choices that the proof recorded; without any loss of the routers."""
    with safe_open(biased.files["token-mean"], "pt") as file:
        counts_LE = torch.stack([file.get_tensor(f"routing.{layer}.chosen").sum(0) for layer in (2, 3, 4)])
    assert counts_LE.sum(1).tolist() == [3 * sum(LENGTHS)] * 3
    wanted_LE = 0.003 * torch.sign(counts_LE.double().mean(1, keepdim=True) - counts_LE)
    config = dataclasses.replace(biased.on("ep2+dp2"), moe=MoeConfig(bias_update_rate=0.003))
    found = all_biases(pool.run(2, world.selection_biases, config, biased.frozen, 1))
    assert list(found.values()) == wanted_LE.float().tolist()


def test_calls_before_a_step_count_together(pool, biased):
    whole = pool.run(1, world.biases_by_calls, biased.on("1"), biased.frozen, [range(10)])[0]
    parts = [(3, 1, 9), (0, 2, 4, 5), (6, 7, 8)]
    assert all_biases(pool.run(2, world.biases_by_calls, biased.on("ep2+dp2"), biased.frozen, parts)) == whole
    assert any(any(bias) for bias in whole.values())


def test_steps_that_are_not_taken_do_not_count(pool, biased):
    for bias in pool.run(1, world.biases_of_steps_not_taken, biased.on("1"), biased.frozen)[0].values():
        assert not any(bias)


def test_biases_survive_a_checkpoint(pool, biased, tmp_path):
    config = biased.on("ep2+dp2", "fp32")
    ranks = pool.run(2, world.biases_resumed, config, biased.frozen, str(tmp_path / "checkpoint"), 3)
    went_on, resumed = (all_biases(list(of_ranks)) for of_ranks in zip(*ranks))
    assert resumed == went_on
    assert any(any(bias) for bias in resumed.values())


# ---- the tests can fail ---------------------------------------------------------------------------------------------

PLANTED_LAYOUTS = ("dp2", "tp2+ep2", "ep2+dp4", "ulysses2+ep2", "pp2")
BIAS_PLANTS = ("padding-counted", "loads-of-its-own-rank")


def seen(grid: Grid, layout: str, mode: str, budget: int) -> Run:
    """A run as a plant sees it."""
    return Case(budget, loss_of(mode)).run(Layout.parse(layout), batch(), CostModel.of(grid.arch), grid.config.moe)


@pytest.mark.parametrize("layout", PLANTED_LAYOUTS)
@pytest.mark.parametrize("name", sorted(MOE_PLANTS.keys() - {"loads-of-its-own-rank"}))
def test_a_planted_bug_fails_where_it_shows_and_only_there(grids, name, layout):
    grid, plant = grids("qwen3-moe"), MOE_PLANTS[name]
    pairs = [("token-mean", 0), ("seq-mean-token-mean", 110)]
    for (mode, budget), found in zip(pairs, grid.run(layout, pairs, plant), strict=True):
        against = compare(found, grid.references[mode], TOLERANCE["fp64"])
        spoiled = plant.spoils(seen(grid, layout, mode, budget))
        assert against.passed != spoiled, f"{mode}: {against}"
        assert not spoiled or against.gradient_error > 1e-6


@pytest.mark.parametrize("layout", PLANTED_LAYOUTS)
@pytest.mark.parametrize("name", BIAS_PLANTS)
def test_a_bug_planted_into_the_counts_fails_where_it_shows(pool, biased, expected_biases, name, layout):
    run = (world.selection_biases, biased.on(layout, max_tokens=219), biased.frozen, STEPS["fp64"], MOE_PLANTS[name])
    ranks = pool.run(Layout.parse(layout).world_size, *run)
    wrong = any(values != expected_biases["fp64"][key] for of_rank in ranks for key, values in of_rank.items())
    assert wrong == MOE_PLANTS[name].spoils(dataclasses.replace(seen(biased, layout, "token-mean", 0), biases=True))


def test_a_routing_flip_is_a_failure_of_its_own(grids):
    """A token near a tie chose otherwise: said with layer, number and margin, whatever loss and gradients are."""
    reference = grids("qwen3-moe").references["sum"]
    layer = dataclasses.replace(reference.routing[2], flips=2, flip_margin=3e-15)
    against = compare(
        dataclasses.replace(reference, routing={**reference.routing, 2: layer}), reference, TOLERANCE["fp64"]
    )
    assert not against.passed and against.flips == 2
    assert against.reason == "routing flip: layer 2, 2 tokens, smallest margin 3.0e-15"
    lost = compare(dataclasses.replace(reference, routing={}), reference, TOLERANCE["fp64"])
    assert "routing: layer 1 chose experts for 0 tokens, not 219" in lost.reason
