"""What torch's compiler makes of a kernel."""

from typing import Any
from unittest import mock

from torch._inductor import config, ir, metrics

from isoloss.parallel.ops.fused import Fused, compiled


def as_on_a_gpu(kernel: Fused, *args: Any) -> tuple[Any, int]:
    """What it gives, compiled for this CPU, and of how many kernels. What is computed once, and what again, is decided
    as for a GPU; whether it was is no part of the key of the compiler's cache."""
    metrics.reset()
    with mock.patch.object(ir, "is_cpu", lambda device: False), config.patch(fx_graph_cache=False):
        found = compiled(kernel.op_by_op)(*args)
    return found, metrics.generated_kernel_count
