"""The presets for clusters fit their GPUs: on every pipeline stage, by dry runs, and as their first lines claim."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.plans import dry_runs
from support.plans.planned_presets import H100, MODELS, Plan, Preset, architecture, cluster_presets

from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.memory.limits import GIB, room
from isoloss.engine.rl.config import RLConfig
from isoloss.tools.plan.estimate import estimate

pytestmark = pytest.mark.xdist_group("counting")  # one process counts for all of it, and keeps the counts
MOST = 74  # GiB of an H100's 79.6: the rest is for the CUDA context, NCCL, workspaces and the allocator's gaps
BESIDE_A_SERVER = 69  # a server that sleeps keeps five
LEFT_TO_THE_TRAINER = 2  # GiB that it may keep while servers on its GPUs generate
PLANNED = cluster_presets("sft", "grpo")  # DAPO's presets are GRPO's: tests/unit/test_presets.py
# Presets whose dry runs share a process.
QUICK = ("sft/8b_h100", "grpo/32b_colocated_h100")
EXPERTS = tuple(str(preset) for preset in PLANNED if preset.size in ("30b_a3b", "26b_a4b"))
GROUPS = {
    "quick": QUICK,
    "experts": EXPERTS,
    "70b": tuple(str(preset) for preset in PLANNED if preset.size == "70b"),
    "others": tuple(
        str(preset) for preset in PLANNED if preset.size in ("8b", "27b", "32b") and str(preset) not in QUICK
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_every_stage_fits(group, tmp_path):
    """The peak that is claimed is what dry runs count, of the stage that has most."""
    presets = [Preset(*name.split("/")) for name in GROUPS[group]]
    plans = [Plan(preset, tmp_path / preset.size) for preset in presets]
    reports = iter(dry_runs.in_a_process([row for plan in plans for row in plan.rows()], tmp_path / "rows.json"))
    for plan in plans:
        of_plan = [next(reports) for _ in plan.depths()]
        peaks = plan.peaks(of_plan)
        for claim in plan.preset.claims:
            stages = plan.on(claim.gpus, peaks)
            assert max(stages) == pytest.approx(claim.peak, abs=0.06), (plan.preset, stages)
            assert max(stages) <= most(plan.preset), (plan.preset, stages)
        if isinstance(plan.config, RLConfig) and plan.config.rollout.colocated:
            assert 0 < max(plan.while_servers_generate(of_plan)) <= LEFT_TO_THE_TRAINER


def most(preset: Preset) -> float:
    return BESIDE_A_SERVER if "_colocated_" in preset.name else MOST


@pytest.mark.parametrize("preset", cluster_presets(), ids=str)
def test_what_a_preset_claims_is_what_the_search_says(preset, tmp_path):
    """Its seconds, and its peak to 3 %; tests/numerics/test_memory_estimate.py holds the estimate to less."""
    plan = Plan(preset, tmp_path / preset.size)
    for claim in preset.claims:
        found = plan.candidate(claim.gpus)
        assert f"{found.seconds:.1f}" == f"{claim.seconds:.1f}", found
        assert max(found.peaks) / GIB == pytest.approx(claim.peak, rel=0.03)
        assert max(claim.peak, max(found.peaks) / GIB) <= most(preset)
        assert max(found.peaks) <= room(found.config, H100.memory)


def test_a_model_of_all_layers_peaks_where_few_layers_say(tmp_path):
    """What `Plan` reckons with, and its time: the layers of a model are alike."""
    plan = Plan(Preset("sft", "8b_h100"), tmp_path / "8b")
    claim = plan.preset.claims[0]
    row = dry_runs.Row("sft", plan.preset.overrides(plan.folder), claim.gpus, 0, micro_batches=1)
    (report,) = dry_runs.in_a_process([row], tmp_path / "rows.json")
    assert report.peak.peak / GIB == pytest.approx(claim.peak, abs=0.06)
    step = estimate(plan.config, plan.arch, plan.layout, [report], H100)
    assert step.seconds == pytest.approx(claim.seconds, rel=0.05)


def test_a_plan_knows_what_is_kept_in_cpu_memory(tmp_path):
    """Half of 12 bytes a parameter, split over the ranks that share it, is not on the device; all else is as it was."""
    plan = Plan(Preset("sft", "32b_offload_h100"), tmp_path / "32b")
    row = next(plan.rows())
    assert row.overrides[-1] == "memory.offload_optimizer=0"
    offloaded = replace(row, overrides=[*row.overrides[:-1], "memory.offload_optimizer=0.5"])
    on_device, half = dry_runs.in_a_process([row, offloaded], tmp_path / "rows.json")
    assert on_device.parameters == half.parameters and half.peak.name == "forward and backward"
    assert on_device.peak.peak - half.peak.peak == pytest.approx(6 * half.parameters, rel=0.001)
    assert sum(half.peak.peak_kinds.values()) == pytest.approx(half.peak.peak, rel=0.001)


@pytest.mark.parametrize("preset", [p for p in PLANNED if len(p.claims) > 1], ids=str)
def test_more_gpus_never_take_more_memory(preset, tmp_path):
    """Data-parallel ranks share the optimizer: the fewest GPUs are those to dry-run."""
    config, arch = preset.config(tmp_path), architecture(tmp_path)
    resident = []
    for claim in preset.claims:
        stages = step_memory(config, arch, config.parallel.layout().with_world(claim.gpus))
        resident.append([stage.peak for stage in stages])
    assert all(b <= a for fewer, more in pairwise(resident) for a, b in zip(fewer, more, strict=True))


def test_every_preset_is_planned():
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(map(str, PLANNED))
    assert {preset.size for preset in PLANNED} == MODELS.keys()
