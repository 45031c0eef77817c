"""The promise, for mixtures of experts: loss, gradients, choices of experts and selection biases are the same on every
layout, token budget and aggregation mode, with the losses of the routers and without.

Every layout is compared, parameter by parameter in fp64, with one rank and one micro-batch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.models import experts as world
from support.models.experts import MODELS
from support.models.families import VOCAB, published, write_config
from support.ranks import invariance
from support.ranks.grid import Grid

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.rl.config import RLConfig, RolloutConfig
from isoloss.parallel import Layout
from isoloss.parallel.aggregation import MODES
from isoloss.tools.prove.bugs import RunTraits
from isoloss.tools.prove.bugs.experts import EXPERTS
from isoloss.tools.prove.parity import TOLERANCE, Case, compare

LENGTHS = (37, 5, 1, 23, 2, 61, 11, 3, 47, 29)  # 219 tokens; the third and the fifth are shorter than some contexts
BUDGETS = (61, 110, 0)  # about one sequence a micro-batch, several, all in one
PAIRS = list(itertools.product(MODES, BUDGETS))
HALF, WHOLE = BatchConfig(max_tokens=110), BatchConfig(max_tokens=sum(LENGTHS))
cases = functools.partial(invariance.cases, norm_length=64)
SUM, BY_SEQUENCE = cases([("sum", 0), ("seq-mean-token-mean", 0)])
# Coefficients that give the losses of the routers a weight like that of the cross-entropy.
ROUTER_LOSSES = MoeConfig("sequence", 0.5, 0.1)
MOE = {
    "qwen3-moe": ROUTER_LOSSES,
    "mixtral": MoeConfig(),
    "glm-4.5": ROUTER_LOSSES,
    "glm-4.7-flash": MoeConfig("sequence", 0.3),
    "mistral-4": MoeConfig("sequence", 0.3),
    "qwen3.5-moe": MoeConfig("sequence", 0.3, 0.1),
    "minimax-m2": MoeConfig(z_loss_coef=0.1),
    "mimo-v2-flash": MoeConfig("sequence", 0.3),
}
FIRST_LAYER_DENSE = ("glm-4.5", "glm-4.7-flash", "mistral-4", "mimo-v2-flash")
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
    return invariance.random_targets(lengths, VOCAB, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One with config.json for each of MODELS."""
    path = tmp_path_factory.mktemp("experts")
    for name, sizes in MODELS.items():
        write_config(path / name, published(name, **sizes))
    return path


@pytest.fixture(scope="module")
def grid_of(pool, folder) -> Callable[..., Grid]:
    def make(model: str, moe: MoeConfig, samples: list[Sample]) -> Grid:
        config = Config(
            ModelConfig(str(folder / model), from_scratch=True),
            moe=moe,
            batch=BatchConfig(max_tokens=61),
            optim=OptimConfig(lr=1e-4, clip=1.0),
            train=TrainConfig(precision="fp64", seed=3),
        )
        return Grid(pool, config, samples, folder)

    return make


@pytest.fixture(scope="module")
def grids(grid_of) -> Callable[[str], Grid]:
    """A grid of each model, made when it is first asked for."""
    return functools.cache(lambda model: grid_of(model, MOE[model], batch()))


def covering(model: str, layout: str) -> list[tuple[str, int]]:
    """Two modes and budgets for a model and a layout; 5 is coprime to 18, so that neighbours see other pairs."""
    index = 2 * (list(MODELS).index(model) * len(LAYOUTS) + LAYOUTS.index(layout))
    return [PAIRS[5 * (index + k) % len(PAIRS)] for k in range(2)]


def test_the_grid_is_what_it_says(grids):
    """Every mode and budget is run, and every expert, router and shared expert of every layer is compared."""
    assert {pair for model in MODELS for layout in LAYOUTS for pair in covering(model, layout)} == set(PAIRS)
    for model in MODELS:
        grid = grids(model)
        reference = grid.reference(SUM)
        compared = reference.parameters.keys()
        sparse = [layer for layer, sparse in enumerate(grid.arch.sparse) if sparse]
        assert len(sparse) == 4 - (model in FIRST_LAYER_DENSE)
        wanted = {f"decoder.layers.{layer}.mlp.router.weight" for layer in sparse}
        for layer, expert, part in itertools.product(sparse, range(grid.arch.experts.count), (1, 2)):
            wanted.add(f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{part}.weight")
        if grid.arch.experts.shared_size:
            wanted |= {f"decoder.layers.{k}.mlp.shared_experts.linear_fc{n}.weight" for k in sparse for n in (1, 2)}
        assert wanted <= compared
        assert {layer.tokens for layer in reference.routing.values()} == {sum(LENGTHS)}
        assert list(reference.routing) == [layer + 1 for layer in sparse]
        assert reference.flips == 0 and reference.smallest_margin > 1e-9


def test_the_losses_of_the_routers_matter(grids):
    """Enough of them is in loss and gradient that the comparison would see it if they went wrong."""
    reference = grids("glm-4.5").reference(BY_SEQUENCE)
    terms = reference.details
    assert 3 <= terms["moe_aux_loss"] < 6  # 3 layers, each at least 1 but for sequences of few tokens
    assert terms["moe_z_loss"] > 1
    total = terms["loss"] + 0.5 * terms["moe_aux_loss"] + 0.1 * terms["moe_z_loss"]
    assert reference.loss == pytest.approx(total, rel=1e-14)
    assert set(grids("mixtral").reference(SUM).details) == {"loss"}


@pytest.mark.parametrize(("model", "layout"), itertools.product(MODELS, LAYOUTS))
def test_every_layout(grids, model, layout):
    grids(model).check(layout, cases(covering(model, layout)))


@pytest.mark.slow
def test_every_mode_and_budget(grids):
    grids("qwen3-moe").check("ep4+dp4", cases(PAIRS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_whole_product(grids, model, layout):
    grids(model).check(layout, cases(PAIRS))


@pytest.mark.parametrize("layout", ("ep4+dp4", "tp2+ep4+dp4", "ulysses4+ep4", "pp2+vpp2+ep2+dp2"))
def test_fewer_sequences_than_ranks(grid_of, layout):
    """Ranks with dummy rows only, whose tokens go to experts and count nowhere."""
    pairs = [("token-mean", 0), ("seq-mean-token-sum", 0), ("sum", 0)]
    grid_of("qwen3-moe", ROUTER_LOSSES, batch((67, 59))).check(layout, cases(pairs))


FASTER = OptimConfig(lr=1e-3, clip=1.0)
FP32_RUNS = ("pp2+vpp2", "ep4+dp4", "tp2+ep2+etp2+dp2", "tp2+pp2+ulysses2+ep2", "ulysses2+ring2+ep2")


@pytest.fixture(scope="module")
def twenty_steps(grids):
    grid = grids("qwen3-moe")
    config = grid.on("1", "fp32", batch=WHOLE, optim=FASTER)
    return grid.on_ranks("1", invariance.losses, config, grid.frozen, 20)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "distributed_optimizer"), itertools.product(FP32_RUNS, (True, False)))
def test_twenty_fp32_steps(grids, twenty_steps, layout, distributed_optimizer):
    grid, parallel = grids("qwen3-moe"), {"distributed_optimizer": distributed_optimizer}
    config = grid.on(layout, "fp32", parallel, batch=HALF, optim=FASTER)
    found = grid.on_ranks(layout, invariance.losses, config, grid.frozen, 20)[0]
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
    grids("glm-4.5").check(layout, cases([("seq-mean-token-mean", 61)]), memory=RECOMPUTE[recompute])


def test_the_gradient_is_the_slope_of_the_logged_loss(grids):
    """By a finite difference along the gradient, the losses of the routers included."""
    grid = grids("glm-4.5")
    for layout in ("1", "tp2+ep2"):
        for claimed, measured in grid.on_ranks(layout, world.slope, grid.on(layout), grid.frozen):
            assert measured == pytest.approx(claimed, rel=1e-6)


@pytest.mark.parametrize("layout", ("1", "ulysses2+ep2", "tp2+pp2+ep2"))
def test_one_all_reduce_of_counts_a_step(grids, layout):
    grid = grids("glm-4.5")
    calls = grid.on_ranks(layout, invariance.count_reductions, grid.on(layout), grid.frozen)
    assert {count for count, _ in calls} == {1} and all(micro_batches > 1 for _, micro_batches in calls)


def test_evaluation_is_without_the_losses_of_the_routers(grids):
    grid = grids("glm-4.5")
    for layout in ("1", "ep2+dp2"):
        for trained, term, evaluated in grid.on_ranks(
            layout, world.loss_without_gradients, grid.on(layout), grid.frozen
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
    grid = Grid(pool, config, samples, tmp_path)
    case = dataclasses.replace(BY_SEQUENCE, max_tokens=61, policy=config, critic=critic)
    assert ("moe_aux_loss" in grid.reference(case).details) != critic
    for layout in ("ep2+dp2", "tp2+pp2+ulysses2+ep2"):
        grid.check(layout, [case])


# ---- selection biases -----------------------------------------------------------------------------------------------

BALANCED_BY_BIAS = MoeConfig("sequence", 1e-3, 1e-4, bias_update_rate=0.003)
STEPS = {"fp32": 20, "fp64": 6}


@pytest.fixture(scope="module")
def biased(grid_of) -> Grid:
    return grid_of("glm-4.5", BALANCED_BY_BIAS, batch())


def all_biases(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of all stages; ranks that have the same one agree."""
    biases: dict[str, list[float]] = {}
    for of_rank in of_ranks:
        assert all(biases.setdefault(name, values) == values for name, values in of_rank.items())
    return biases


@pytest.fixture(scope="module")
def expected_biases(biased):
    """Of one rank with everything in one micro-batch."""
    return {
        precision: biased.on_ranks(
            "1", world.selection_biases, biased.on("1", precision, batch=WHOLE), biased.frozen, steps
        )[0]
        for precision, steps in STEPS.items()
    }


LONG_RUNS = ("1", "pp2+vpp2", "ep4+dp4", "tp2+ep2+etp2+dp2", "tp2+pp2+ulysses2+ep2")
BIAS_RUNS = [*(("fp64", layout) for layout in ("1", *LAYOUTS)), *(("fp32", layout) for layout in LONG_RUNS)]


@pytest.mark.parametrize(("precision", "layout"), BIAS_RUNS)
def test_selection_biases_are_bit_equal(biased, expected_biases, precision, layout):
    config = biased.on(layout, precision, batch=HALF)
    found = all_biases(biased.on_ranks(layout, world.selection_biases, config, biased.frozen, STEPS[precision]))
    assert found == expected_biases[precision]
    assert len(found) == 3 and all(len(set(bias)) > 2 for bias in found.values())  # they did move


def test_a_bias_moves_by_its_definition(biased):
    """Algorithm 1 of arXiv:2408.15664, of the choices that the proof recorded; without any loss of the routers."""
    biased.refer([SUM])
    with safe_open(*biased.files_of([SUM]), "pt") as file:
        counts_LE = torch.stack([file.get_tensor(f"routing.{layer}.chosen").sum(0) for layer in (2, 3, 4)])
    assert counts_LE.sum(1).tolist() == [3 * sum(LENGTHS)] * 3
    wanted_LE = 0.003 * torch.sign(counts_LE.double().mean(1, keepdim=True) - counts_LE)
    config = biased.on("ep2+dp2", moe=MoeConfig(bias_update_rate=0.003))
    found = all_biases(biased.on_ranks("ep2+dp2", world.selection_biases, config, biased.frozen, 1))
    assert list(found.values()) == wanted_LE.float().tolist()


def test_calls_before_a_step_count_together(biased):
    whole = biased.on_ranks("1", world.biases_by_calls, biased.on("1"), biased.frozen, [range(10)])[0]
    parts = [(3, 1, 9), (0, 2, 4, 5), (6, 7, 8)]
    of_ranks = biased.on_ranks("ep2+dp2", world.biases_by_calls, biased.on("ep2+dp2"), biased.frozen, parts)
    assert all_biases(of_ranks) == whole
    assert any(any(bias) for bias in whole.values())


def test_steps_that_are_not_taken_do_not_count(biased):
    for bias in biased.on_ranks("1", world.biases_of_steps_not_taken, biased.on("1"), biased.frozen)[0].values():
        assert not any(bias)


def test_biases_survive_a_checkpoint(biased, tmp_path):
    config = biased.on("ep2+dp2", "fp32")
    ranks = biased.on_ranks("ep2+dp2", world.biases_resumed, config, biased.frozen, str(tmp_path / "checkpoint"), 3)
    went_on, resumed = (all_biases(list(of_ranks)) for of_ranks in zip(*ranks))
    assert resumed == went_on
    assert any(any(bias) for bias in resumed.values())


# ---- the tests can fail ---------------------------------------------------------------------------------------------

PLANTED_LAYOUTS = ("dp2", "tp2+ep2", "ep2+dp4", "ulysses2+ep2", "pp2")
BUGS = {bug.name: bug for bug in EXPERTS}
OF_ONE_STEP = BUGS.keys() - {"loads-of-its-own-rank"}
OF_BIASES = ("padding-counted", "loads-of-its-own-rank")


def seen(grid: Grid, layout: str, case: Case) -> RunTraits:
    """A run as a planted bug sees it."""
    return case.run(Layout.parse(layout), batch(), grid.arch, grid.config.moe)


@pytest.mark.parametrize("layout", PLANTED_LAYOUTS)
@pytest.mark.parametrize("name", sorted(OF_ONE_STEP))
def test_a_planted_bug_fails_where_it_shows_and_only_there(grids, name, layout):
    grid, bug = grids("qwen3-moe"), BUGS[name]
    planted = cases([("token-mean", 0), ("seq-mean-token-mean", 110)])
    for case, found in zip(planted, grid.run(layout, planted, bug), strict=True):
        against = compare(found, grid.reference(case), TOLERANCE["fp64"])
        spoiled = bug.must_fail_on(seen(grid, layout, case))
        assert against.passed != spoiled, f"{case}: {against}"
        assert not spoiled or against.gradient_error > 1e-6


@pytest.mark.parametrize("layout", PLANTED_LAYOUTS)
@pytest.mark.parametrize("name", OF_BIASES)
def test_a_bug_planted_into_the_counts_fails_where_it_shows(biased, expected_biases, name, layout):
    config = biased.on(layout, batch=WHOLE)
    ranks = biased.on_ranks(layout, world.selection_biases, config, biased.frozen, STEPS["fp64"], BUGS[name])
    wrong = any(values != expected_biases["fp64"][key] for of_rank in ranks for key, values in of_rank.items())
    assert wrong == BUGS[name].must_fail_on(dataclasses.replace(seen(biased, layout, SUM), biases=True))


def test_a_routing_flip_is_a_failure_of_its_own(grids):
    """A token near a tie chose otherwise: said with layer, number and margin, whatever loss and gradients are."""
    reference = grids("qwen3-moe").reference(SUM)
    layer = dataclasses.replace(reference.routing[2], flips=2, flip_margin=3e-15)
    against = compare(
        dataclasses.replace(reference, routing={**reference.routing, 2: layer}), reference, TOLERANCE["fp64"]
    )
    assert not against.passed and against.flips == 2
    assert against.reason == "routing flip: layer 2, 2 tokens, smallest margin 3.0e-15"
    lost = compare(dataclasses.replace(reference, routing={}), reference, TOLERANCE["fp64"])
    assert "routing: layer 1 chose experts for 0 tokens, not 219" in lost.reason
