"""What is still there of a step after it."""

import weakref
from unittest import mock

from torch import Tensor

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.mcore.moe.router import Router
from isoloss.tools.prove.parity import thaw


def router_outputs(config: Config, frozen: bytes) -> tuple[int, int]:
    """How many tensors the routers gave out in a step, and how many of them are alive after it."""
    engine, samples, given = Engine(config), thaw(frozen), []
    forward = Router.forward

    def watched(self: Router, *args):
        outputs = forward(self, *args)
        given.extend(weakref.ref(output) for output in outputs if isinstance(output, Tensor))
        return outputs

    with mock.patch.object(Router, "forward", watched):
        engine.forward_backward(samples, cross_entropy(LossConfig()))
    return len(given), sum(output() is not None for output in given)
