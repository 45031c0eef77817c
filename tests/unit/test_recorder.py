"""What a dry run counts of single ops, on meta tensors, and how it is told."""

from collections import Counter

import pytest
import torch
from support.plans import device_lint
from torch import nn

from isoloss.engine.step.forward_backward import run_steps, run_targets
from isoloss.parallel import sequence
from isoloss.parallel.runtime.versions import SUPPORTED_MEGATRON
from isoloss.tools.plan.phases import HALF
from isoloss.tools.plan.recorder import Recorder, site
from isoloss.tools.plan.report import Exchange, PhaseReport, RankReport, kind_of

KIB = 1024


def empty(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")


@pytest.fixture
def recorder():
    with Recorder("meta", 8) as recorder:
        yield recorder


def test_a_peak_is_of_what_lives_at_a_time(recorder):
    with recorder.phase("first") as first:
        kept = empty(3 * KIB)
        empty(5 * KIB)
        empty(2 * KIB)
    with recorder.phase("second") as second:
        more = empty(KIB)
        del kept
        more = torch.cat([more, more])
    assert (first.before, first.peak, first.after) == (0, 8 * KIB, 3 * KIB)
    assert (second.before, second.peak, second.after) == (3 * KIB, 4 * KIB, 2 * KIB)
    assert sum(second.at_peak.values()) == second.peak
    assert {phase for phase, _ in second.at_peak} == {"first", "second"}


def test_bytes_are_those_of_the_allocator_and_each_once(recorder):
    with recorder.phase("only") as phase:
        x = empty(700)
        views = [x.view(7, 100), x[3:], x.detach()]
    assert phase.peak == phase.after == KIB
    assert not phase.launches and len(views) == 3


def test_a_copy_of_pinned_memory_goes_alone_if_it_may(recorder):
    pinned, pageable, here = torch.empty(8), torch.empty(8), torch.empty(8, device="meta")
    recorder.pin(pinned)
    with recorder.phase("alone") as alone:
        here.copy_(pinned, non_blocking=True)
        pinned.copy_(here, non_blocking=True)
    with recorder.phase("waits") as waits:
        here.copy_(pinned)
        here.copy_(pageable, non_blocking=True)
        pinned.copy_(here)
        pageable.copy_(here, non_blocking=True)
    assert not alone.waits
    assert Counter(kind for kind, _ in waits.waits.elements()) == {"to the device": 2, "to the host": 2}


def test_a_storage_that_is_given_back_is_gone(recorder):
    with recorder.phase("only") as phase:
        x = empty(4 * KIB)
        recorder.resized(x.untyped_storage(), 0)
        y = empty(KIB)
        recorder.resized(x.untyped_storage(), 2 * KIB)
    assert (phase.peak, phase.after) == (4 * KIB, 3 * KIB)
    assert x.shape and y.shape


def test_products_are_counted_by_their_formula_and_all_else_by_its_bytes(recorder):
    with recorder.phase("only") as phase:
        product = torch.empty(3, 5, device="meta") @ torch.empty(5, 7, device="meta")
        product.add_(1)
        heads = torch.empty(1, 2, 11, 4, device="meta")
        torch.ops.aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, True, 0.0, True)
        torch.ops.aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, True, 0.0, False)
    assert phase.flops["aten.mm"] == 2 * 3 * 5 * 7
    attention = 2 * (2 * 2 * 11 * 11 * 4)  # two products of two heads
    causal = phase.flops["aten._scaled_dot_product_efficient_attention"] - attention
    assert causal == attention / 2
    assert phase.traffic == {"aten.add_": 2 * 3 * 7 * 4}
    assert sum(phase.launches.values()) == sum(phase.launch_sites.values()) == 4


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right", "pairs"),
    [
        (12, 12, -1, 0, 2 * 6 * 6 // 2),  # causal: half of the squares of two documents
        (12, 6, -1, -1, 2 * 6 * 3),  # what ring ranks have in common: all of it, and as many keys as there are
        (6, 12, -1, -1, 2 * 3 * 6),
        (12, 12, 2, 0, 2 * (1 + 2 + 3 + 3 + 3 + 3)),  # a window of three tokens
    ],
)
def test_attention_over_segments_counts_the_pairs_that_see_each_other(recorder, queries, keys, left, right, pairs):
    heads, starts = 4, torch.empty(3, dtype=torch.int32, device="meta")
    q, k = torch.empty(queries, heads, 8, device="meta"), torch.empty(keys, 2, 8, device="meta")
    with recorder.phase("only") as phase:
        torch.ops.aten._flash_attention_forward(
            q, k, k, starts, starts, queries // 2, keys // 2, 0.0, (left, right) == (-1, 0), False,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
    assert phase.flops["aten._flash_attention_forward"] == 2 * 2 * pairs * heads * 8


def test_the_host_waits_for_numbers_of_the_device_alone(recorder):
    with recorder.phase("only") as phase:
        x, mask = torch.empty(6, device="meta"), torch.empty(6, dtype=torch.bool, device="meta")
        assert x.sum().item() == 2.0 and bool(mask.any()) and torch.equal(x, x)
        assert x.cpu().tolist() == [2.0] * 6
        assert torch.ones(6).sum().item() == 6.0
        recorder.share_selected = 0.5
        assert x.masked_select(mask).shape == (3,) and mask.nonzero().shape == (6, 1)
        torch.ones(6).to("meta")
    kinds = {"item": 2, "equal": 1, "to the host": 1, "masked_select": 1, "nonzero": 1, "to the device": 1}
    assert {kind: count for (kind, _), count in phase.waits.items()} == kinds


def test_the_host_does_not_wait_for_a_copy_from_pinned_memory(recorder):
    with recorder.phase("only") as phase:
        pinned, pageable = torch.ones(6), torch.ones(6)
        recorder.pin(pinned)
        pinned.to("meta", non_blocking=True)
    assert not phase.waits and phase.launches == {"aten._to_copy": 1}
    with recorder.phase("that wait") as phase:
        pageable.to("meta", non_blocking=True)
        pinned.to("meta")
        del pinned
        [torch.ones(6).to("meta", non_blocking=True) for _ in range(4)]  # one of them where the pinned one was
    assert sum(phase.waits.values()) == 6


def test_a_site_is_the_innermost_line_of_ours(recorder):
    class Group:
        size = staticmethod(lambda: 1)

    values, documents = torch.ones(3, device="meta"), empty(24, torch.int64)
    with recorder.phase("only") as phase:
        sequence.sum_over_documents(values, documents, 2, Group())
    file = "isoloss/parallel/sequence.py"
    assert {where.partition(":")[0] for where in phase.launch_sites} == {file}
    assert {device_lint.place("wait", where) for where in phase.launch_sites} == {f"{file} sum_over_documents"}
    assert site() == "torch"


def test_a_backward_is_told_by_its_node(recorder):
    layer = nn.Linear(3, 3, bias=False, device="meta")
    with recorder.phase("only") as phase:
        layer(torch.empty(2, 3, device="meta")).sum().backward()
    assert "torch MmBackward0" in phase.launch_sites


# ---- how it is told --------------------------------------------------------------------------------------------------


def told(name: str, waits=(), launches=None, exchanges=()) -> PhaseReport:
    launches = launches or {}
    return PhaseReport(name, 0, 0, "", {}, {}, {}, {}, launches, {}, waits, exchanges)


def test_a_report_comes_back_from_json_as_it_was():
    exchange = Exchange("send", "pp", 2, 1, "bfloat16", "isoloss/parallel/ring.py:1", 3, 4)
    phase = told("optimizer", [("item", "torch", 1)], {"torch": 2}, [exchange])
    report = RankReport(1, 0, 5, 2, 512, [phase], [("send of a tensor with gaps", "torch", 1)])
    back = RankReport.loads(report.dumps())
    assert back.phase("optimizer").exchanges == [exchange]
    assert back.dumps() == report.dumps()


def test_what_lives_at_a_peak_is_told_by_kind(recorder):
    with recorder.phase("build"):
        weights = empty(8 * KIB)
    with recorder.phase("build critic"):
        critic = empty(4 * KIB)
    with recorder.phase("forward") as phase:
        activations = empty(2 * KIB)
    report = PhaseReport.of(phase, {"weights": 8 * KIB})
    assert report.peak_kinds == {"weights": 8 * KIB, "critic": 4 * KIB, "activations": 2 * KIB}
    assert report.peak_sites == {"torch": 14 * KIB}
    assert (
        kind_of("isoloss/parallel/loss_head.py:66") == "loss head"
        and kind_of("isoloss/parallel/ring.py:1") == "exchange"
    )
    assert weights.nbytes + critic.nbytes + activations.nbytes == report.peak


@pytest.fixture
def two_micro_batches():
    """Two items of each, and one of the step."""
    where = f"isoloss/engine/step/forward_backward.py:{run_steps.__code__.co_firstlineno + 1}"
    launches = {"isoloss/parallel/ring.py:1": 10, "isoloss/parallel/ring.py:9": 4}
    phases = [told("pass", [("item", where, 5)], launches), told(f"pass{HALF}", [("item", where, 3)], launches)]
    return RankReport(0, 0, 0, 2, 512, phases)


ITEM = "wait, item: isoloss/engine/step/forward_backward.py run_steps"
COUNTED = {
    "pass, a micro-batch": {ITEM: 2},
    "pass, once": {ITEM: 1, "launches: isoloss/parallel/ring.py": 14},
}


def test_what_a_micro_batch_does_is_told_from_what_a_step_does_once(two_micro_batches):
    assert device_lint.counts(two_micro_batches) == COUNTED
    assert device_lint.differences(COUNTED, two_micro_batches) == []


def test_a_number_that_is_not_the_pinned_one_is_told_by_its_lines(two_micro_batches, monkeypatch):
    monkeypatch.setattr(device_lint, "version", lambda package: SUPPORTED_MEGATRON)
    fell, rose = COUNTED["pass, a micro-batch"] | {ITEM: 3}, {ITEM: 1, "launches: isoloss/parallel/ring.py": 12}
    pinned = {"pass, a micro-batch": fell, "pass, once": rose, "gone": {"launches: torch": 1}}
    lower, higher, gone = device_lint.differences(pinned, two_micro_batches)
    assert lower.startswith(f"pass, a micro-batch: {ITEM}: 2, fewer than the pinned 3: lower the number")
    assert "14, more than the pinned 12: 10 at isoloss/parallel/ring.py:1, 4 at isoloss/parallel/ring.py:9" in higher
    assert gone.startswith("gone: launches: torch: 0, fewer than the pinned 1")
    monkeypatch.setattr(device_lint, "version", lambda package: "0.17.1")
    assert device_lint.differences(pinned, two_micro_batches) == [higher]
    table = device_lint.lowered({"row": pinned}, {"row": two_micro_batches})
    assert table["row"] == COUNTED | {"pass, once": rose}
    assert device_lint.lowered({}, {"row": two_micro_batches}) == {"row": COUNTED}


def test_what_does_not_grow_with_the_micro_batches_is_refused(two_micro_batches):
    two_micro_batches.phases[0].waits[0] = ("nonzero", "torch", 1)
    report = RankReport(0, 0, 0, 4, 512, two_micro_batches.phases)
    with pytest.raises(ValueError, match="of half the micro-batches"):
        device_lint.counts(report)


def test_a_place_is_the_function_around_a_line():
    inner = next(c for c in run_targets.__code__.co_consts if getattr(c, "co_name", "") == "collect")
    assert (
        device_lint.function_at("isoloss/engine/step/forward_backward.py", inner.co_firstlineno + 1)
        == "run_targets.collect"
    )
    assert device_lint.function_at("isoloss/engine/step/forward_backward.py", 1) == "module"
