"""Functions that are one kernel on a GPU: which of the two a call takes, and that all are tried on a GPU."""

from types import SimpleNamespace

import pytest
from support.models import kernel_cases

from isoloss.parallel.ops import fused
from isoloss.parallel.ops.fused import Fused


def test_a_gpu_gets_what_was_compiled_and_a_cpu_the_function(monkeypatch):
    asked = []
    monkeypatch.setattr(fused, "compiled", lambda function: asked.append(function) or (lambda *_: "one"))
    kernel = Fused(several := lambda first, second: "several")
    on = {where: SimpleNamespace(is_cuda=where == "gpu") for where in ("cpu", "gpu")}
    assert kernel(on["cpu"], 1) == "several" and asked == []
    assert [kernel(on["gpu"], 1) for _ in range(2)] == ["one", "one"]
    assert asked == [several]  # once, however often it is called


def test_every_kernel_has_a_case_for_a_gpu():
    """tests/gpu/test_kernels.py runs them there."""
    cases = {id(kernel) for kernel, _ in kernel_cases.CASES.values()}
    assert {kernel.__name__ for kernel in kernel_cases.of_the_product() if id(kernel) not in cases} == set()


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_op_by_op_a_case_gives_its_numbers_to_rounding(name):
    kernel, make = kernel_cases.CASES[name]
    inputs = make()
    right = kernel.op_by_op(*kernel_cases.exact(inputs))
    assert max(kernel_cases.errors(kernel.op_by_op(*inputs), right)) <= 1e-2
