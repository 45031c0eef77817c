"""Messages between experts of one size: the numbers of messages of the sizes that are needed, whatever the size.

Places that nobody needs hold nan on their way to experts and back, in both directions (`support.ranks.grouped`).
"""

from dataclasses import replace

import numpy as np
import pytest
from support.models.families import VOCAB
from support.models.transformers_parity import make_samples
from support.plans import device_lint, dry_runs
from support.ranks import grouped

from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.run.metrics import metrics_row
from isoloss.engine.step.engine import OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.models.lora.config import LoraConfig
from isoloss.tools.prove.parity import freeze

SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), VOCAB))
ALIGNED = {"hidden_size": 48, "moe_intermediate_size": 32}
KEEP, FULL = MemoryConfig(), MemoryConfig("full")
EXPERTS, MOE = MemoryConfig("selective", ("experts",)), MemoryConfig("selective", ("moe",))
# A share with which no message can be too small, where two ranks share experts; and one with which some are.
ENOUGH, TOO_SMALL = 2.0, 1.0
TIGHT = 1.5  # is enough here
LAYOUTS = {
    "ep2+dp2": (2, {"ep": 2}),
    "tp2+ep2+etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp2+ep2": (4, {"pp": 2, "ep": 2}),
    "tp4+ep2": (4, {"tp": 4, "ep": 2}),
}
ROWS = (
    [(layout, KEEP, bound) for layout in LAYOUTS for bound in (ENOUGH, TOO_SMALL)]
    + [("ep2+dp2", KEEP, TIGHT)]
    + [("ep2+dp2", memory, bound) for memory in (FULL, EXPERTS, MOE) for bound in (ENOUGH, TOO_SMALL)]
)


def config(folder, layout, memory, bound=None, **moe) -> Config:
    return Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=64),
        parallel=ParallelConfig(**LAYOUTS[layout][1], overlap_grad_reduce=True),
        memory=memory,
        moe=MoeConfig(dispatch_bound=bound, **moe),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(precision="fp64"),
    )


def assert_same(found, wanted):
    """On every rank: each step, and the weights after the last."""
    for (steps, weights), (wanted_steps, wanted_weights) in zip(found, wanted, strict=True):
        for one, other in zip(steps, wanted_steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-12)
            assert one.terms == pytest.approx(other.terms, rel=1e-12)
            assert one.norm == pytest.approx(other.norm, rel=1e-12)
            assert_close(one.gradients, other.gradients)
        assert_close(weights, wanted_weights)


def assert_close(arrays, wanted):
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        assert np.linalg.norm(array - wanted[name]) <= 1e-12 * np.linalg.norm(wanted[name]), name


def assert_run_again(found, bound):
    """On no rank or on all of them; and the host waits only for sizes of a step that is run again."""
    for steps, _ in found:
        for step in steps:
            assert step.reruns == (bound == TOO_SMALL)
            assert (step.counts["waits"] > 0) == (bound == TOO_SMALL)
            assert step.counts["free"] > 0


@pytest.mark.parametrize(("layout", "memory", "bound"), ROWS, ids=lambda value: getattr(value, "recompute", str(value)))
def test_a_bound_changes_no_number(pool, tiny_hf, layout, memory, bound):
    world, folder = LAYOUTS[layout][0], tiny_hf("qwen3-moe", **ALIGNED)
    wanted = pool.run(world, grouped.steps, config(folder, layout, memory), SAMPLES, "token-mean", 2, False)
    case = config(folder, layout, memory, bound)
    found = pool.run(world, grouped.steps, case, SAMPLES, "token-mean", 2, True)
    assert_same(found, wanted)
    assert_run_again(found, bound)


def test_adapters_of_experts_are_computed_at_once(pool, tiny_hf):
    """B leaves 0 with the first step."""
    folder = tiny_hf("qwen3-moe", **ALIGNED)
    case = replace(config(folder, "ep2+dp2", KEEP), lora=LoraConfig(rank=8, alpha=64.0))
    wanted = pool.run(2, grouped.steps, case, SAMPLES, "token-mean", 3, False)
    found = pool.run(2, grouped.steps, case, SAMPLES, "token-mean", 3, True)
    assert_same(found, wanted)
    assert all(step.counts["layers"] > 0 for steps, _ in found for step in steps)


@pytest.mark.parametrize("bound", (ENOUGH, TOO_SMALL))
def test_balance_counts_once(pool, tiny_hf, bound):
    """Losses of the routers and selection biases, which move with the loads of a step."""
    folder = tiny_hf("deepseek-v3-plain", **ALIGNED)
    moe = {"aux_loss": "sequence", "aux_loss_coef": 0.01, "z_loss_coef": 0.01, "bias_update_rate": 0.001}
    wanted_of = config(folder, "ep2+dp2", KEEP, **moe)
    wanted = pool.run(2, grouped.steps, wanted_of, SAMPLES, "sum", 2, False)
    found = pool.run(2, grouped.steps, config(folder, "ep2+dp2", KEEP, bound, **moe), SAMPLES, "sum", 2, True)
    assert_same(found, wanted)
    assert_run_again(found, bound)


@pytest.mark.parametrize(("layout", "losing"), [("ep2+dp2", 1), ("pp2+ep2", 0), ("pp2+ep2", 3), ("tp4+ep2", 3)])
def test_a_row_that_one_rank_lost_is_known_to_all(pool, tiny_hf, layout, losing):
    """Ranks of other stages, and of tensor parallelism, see it in no message of theirs."""
    case = config(tiny_hf("qwen3-moe", **ALIGNED), layout, KEEP, ENOUGH)
    found = pool.run(LAYOUTS[layout][0], grouped.steps, case, SAMPLES, "sum", 1, True, losing)
    assert [step.reruns for (step,), _ in found] == [1] * len(found)


def test_what_earlier_calls_accumulated_is_kept(pool, tiny_hf):
    """A step that would be forgotten takes no bound then."""
    case = config(tiny_hf("qwen3-moe", **ALIGNED), "ep2+dp2", KEEP, TOO_SMALL)
    found = pool.run(2, grouped.step_after_a_call, case, SAMPLES)
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-12)


def test_nothing_is_waited_for(tmp_path):
    """On a GPU, in any layer and micro-batch; and no collective is given what it does not take."""
    row = device_lint.row(tmp_path, "experts")
    row = replace(row, overrides=[*row.overrides, "moe.dispatch_bound=1.5"], files=None)
    (report,) = dry_runs.in_a_process([row], tmp_path / "rows.json")
    assert report.faults == []
    of_a_micro_batch = device_lint.sites_by_phase(report)["forward and backward, a micro-batch"]
    assert of_a_micro_batch and not [what for what, _ in of_a_micro_batch if "wait" in what]


def test_a_run_tells_of_steps_that_were_run_again():
    """And has no such number without a bound."""
    metrics = StepMetrics(1.0, 1.0, 1.0, 1, 1, 1, 1, 1)
    rows = [
        metrics_row(replace(metrics, reruns=reruns), OptimResult(1.0, 1.0, True), 1.0, 0.5) for reruns in (None, 0, 1)
    ]
    assert [row.get("dispatch_reruns") for row in rows] == [None, 0, 1]


def test_on_a_cpu_a_bound_does_nothing(pool, tiny_hf):
    folder = tiny_hf("qwen3-moe", **ALIGNED)
    wanted = pool.run(2, grouped.steps, config(folder, "ep2+dp2", KEEP), SAMPLES, "sum", 1, False)
    case = config(folder, "ep2+dp2", KEEP, TOO_SMALL)
    found = pool.run(2, grouped.steps, case, SAMPLES, "sum", 1, False)
    for ((one,), _), ((other,), _) in zip(found, wanted, strict=True):
        assert one.reruns == 0 and other.reruns is None
        assert one.loss == other.loss and one.norm == other.norm
