"""Weights that a forward waits for: after a step they may still be on their way from other ranks
(engine/step/optimizer.py, `Gather`), and a module's forward pre-hook waits for its own."""

from torch import nn


def wait_for_weights(*modules: nn.Module) -> None:
    """For whoever reads a module's weights in a forward pass without calling the module."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
