"""The code that runs on a GPU never mixes host and device, hands whole tensors of the device to every collective, and
waits and launches as often as is written in device_counts.json.

The Engine goes through its phases as one rank of four, with fake tensors on a device of their own: an op that takes a
tensor of the host and one of the device raises, as on a GPU.
"""

import pytest
from support.faults.device_faults import FAULTS
from support.plans import device_lint, dry_runs
from support.plans.asked import asked_for
from support.plans.device_lint import ROWS

from isoloss.tools.plan.report import RankReport

# What is recorded of a fault, and where.
REFUSED = {
    "a host tensor into an all-gather": (
        "allgather_ of a tensor of the host",
        "isoloss/engine/step/forward_backward.py",
    ),
    "a strided all-gather": ("_allgather_base_ of a tensor with gaps", "megatron/core/tensor_parallel/mappings.py"),
    "a strided send": ("send of a tensor with gaps", "isoloss/parallel/collectives.py"),
}
RAISES = "a host tensor beside a device tensor"
WAITS = "an item for every micro-batch"
# Runs with faults, and the rows that they show in.
PLANTED = {
    "two in collectives, and a wait": ("tp", "a host tensor into an all-gather", "a strided all-gather", WAITS),
    "a send": ("ulysses and ring", "a strided send"),
    "mixed": ("tp", RAISES),
}
RUN_OF = {fault: run for run, (_, *faults) in PLANTED.items() for fault in faults}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of the rows and faults that the tests of this session ask for: each takes seconds."""
    folder = tmp_path_factory.mktemp("runs")
    names = asked_for(request)
    planted = [run for run, (_, *faults) in PLANTED.items() if not names.isdisjoint((run, *faults))]
    rows = {name: device_lint.row(folder, name) for name in ROWS if name in names}
    rows |= {run: device_lint.row(folder, *PLANTED[run]) for run in planted}
    return dict(zip(rows, dry_runs.outcomes_in_a_process([*rows.values()], folder / "rows.json")))


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_refused_and_nothing_more_is_waited_for(outcomes, name):
    report = outcomes[name]
    assert isinstance(report, RankReport), report
    assert report.faults == []
    assert device_lint.differences(device_lint.pinned()[name], report) == []


@pytest.mark.parametrize(("adapter", "whole"), [("adapter", "tp"), ("adapters of experts", "experts")])
def test_a_step_of_an_adapter_waits_no_more_than_one_of_the_model(adapter, whole):
    """Of what is pinned, which dry runs are compared with."""

    def waits(name):
        phases = device_lint.pinned()[name]
        return {
            phase: sum(count for place, count in counts.items() if place.startswith("wait"))
            for phase, counts in phases.items()
            if phase.startswith(("forward and backward", "optimizer"))
        }

    assert waits(adapter).keys() == waits(whole).keys()
    assert all(count <= waits(whole)[phase] for phase, count in waits(adapter).items()), (waits(adapter), waits(whole))


@pytest.mark.parametrize("fault", REFUSED)
def test_a_tensor_that_a_collective_does_not_take_is_told(outcomes, fault):
    what, file = REFUSED[fault]
    report = outcomes[RUN_OF[fault]]
    assert isinstance(report, RankReport), report
    assert any(told == what and site.startswith(f"{file}:") for told, site, _ in report.faults)


@pytest.mark.parametrize("run", ["two in collectives, and a wait", "a send"])
def test_a_fault_is_all_that_is_told(outcomes, run):
    """Of several tensors of a collective only the host's, and of sound collectives nothing."""
    faults = [fault for fault in PLANTED[run][1:] if fault in REFUSED]
    assert {what for what, _, _ in outcomes[run].faults} == {REFUSED[fault][0] for fault in faults}


@pytest.mark.parametrize("fault", [RAISES])
def test_a_host_tensor_beside_a_device_tensor_raises(outcomes, fault):
    assert outcomes[RUN_OF[fault]].endswith("found at least two devices, gpu:0 and cpu!")


@pytest.mark.parametrize("fault", [WAITS])
def test_one_more_wait_of_a_micro_batch_is_told(outcomes, fault):
    told = device_lint.differences(device_lint.pinned()["tp"], outcomes[RUN_OF[fault]])
    place = "forward and backward, a micro-batch: wait, item: isoloss/engine/step/forward_backward.py _loss"
    at = [line for line in told if line.startswith(place)]
    assert len(at) == 1 and at[0].startswith(
        f"{place}: 1, more than the pinned 0: 1 at isoloss/engine/step/forward_backward.py:"
    )


def test_every_fault_is_planted():
    assert RUN_OF.keys() == FAULTS.keys()


def test_every_number_is_of_a_row():
    assert device_lint.pinned().keys() == ROWS.keys()
