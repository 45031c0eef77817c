"""What the ranks of the tests of the Python API run."""

import numpy as np

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.step.engine import Engine
from isoloss.tools.prove.parity import thaw

Arrays = dict[str, np.ndarray]


def calls_before_a_step(config: RLConfig, frozen: bytes) -> tuple[Arrays, Arrays]:
    """Gradients of a policy loss after three calls of forward_backward, and after one with the same samples."""
    engine, samples, loss = Engine(config), thaw(frozen), policy_loss(config)

    def after(*calls) -> Arrays:
        engine.zero_grad()
        for part in calls:
            engine.forward_backward(part, loss)
        return {name: gradient.numpy(force=True).copy() for name, gradient in engine.gradients()}

    return after(samples[:3], samples[3:11], samples[11:]), after(samples)
