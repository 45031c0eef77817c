"""What the ranks of the tests of weight gradients run."""

from unittest import mock

import numpy as np
from megatron.core.tensor_parallel import layers

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.prove.parity import thaw


def gradients(config: Config, frozen: bytes) -> tuple[int, dict[str, np.ndarray]]:
    """How many products added to the buffer themselves, and the reduced gradients of the second of two equal steps: the
    first is where an overlapped reduction learns in which order they come."""
    engine, samples = Engine(config), thaw(frozen)
    kernels = layers.fused_weight_gradient_mlp_cuda
    calls = 0
    found = {}

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return add(*arguments)

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    add = getattr(kernels, names[0])
    with mock.patch.multiple(kernels, **dict.fromkeys(names, counted)):
        for _ in range(2):
            engine.zero_grad()
            with engine.overlap.reduce_during_backward():
                engine.forward_backward(samples, cross_entropy(LossConfig()))
                engine.reduce_gradients()
            found = {name: each.double().numpy(force=True).copy() for name, each in engine.gradients()}
    return calls, found
