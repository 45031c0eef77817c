"""Complete the state of an optimizer before it is saved and after it is loaded."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def complete_state(optimizer: ChainedOptimizer) -> None:
    """Give every parameter without a state the one that torch's AdamW makes at its first step; choose its fused kernel.

    Called after building, so that a checkpoint can be written before the first applied step and read into a new
    optimizer: Megatron's distributed one asserts that it has a step count. Called after loading, as Megatron gives all
    parameters one tensor of a step count, which AdamW would increment once per parameter, or none if it is 0.
    """
    inners = [getattr(part, "optimizer", None) for part in optimizer.chained_optimizers]
    hybrids = [inner for inner in inners if isinstance(inner, HybridDeviceOptimizer)]
    adams = [inner for inner in inners if isinstance(inner, torch.optim.Adam)]  # others: none on this rank
    for inner in (*adams, *hybrids):
        for group in inner.param_groups:
            # One pass over memory instead of six. Loading a checkpoint overwrites this with the saved value.
            group["fused"] = True
    adams += [inner for hybrid in hybrids for inner in hybrid.sub_optimizers]
    for inner in adams:
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                step = state["step"] if "step" in state else torch.zeros(())
                state["step"] = step.to(parameter.device, copy=True)
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)
    # On a pipeline stage without experts the experts' optimizer is empty, and gets the dense optimizer's step count.
    steps = [state["step"] for inner in adams for state in inner.state.values()]
    for inner in adams:
        if not inner.state:
            state: Any = inner.state  # a key that is no parameter is saved and loaded unchanged
            state["empty"] = {"step": steps[0]}
    for hybrid in hybrids:
        hybrid._sync_sub_optimizers_state_to_hdo()
