"""The state of an optimizer, complete whenever it is saved or loaded."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def complete_state(optimizer: ChainedOptimizer) -> None:
    """Give every parameter the state that torch's AdamW makes at its first step, where it has none yet.

    After building: a checkpoint can then be written before the first applied step, and read into a new optimizer;
    Megatron's distributed one asserts that it knows a step count. After loading: Megatron gives all parameters one
    tensor for a step count, which AdamW would increment once for each of them, or none if the count was 0. Both times
    torch's fused kernel is chosen.
    """
    inners = [getattr(part, "optimizer", None) for part in optimizer.chained_optimizers]
    hybrids = [inner for inner in inners if isinstance(inner, HybridDeviceOptimizer)]
    adams = [inner for inner in inners if isinstance(inner, torch.optim.Adam)]  # no other: none on this rank
    for inner in (*adams, *hybrids):
        for group in inner.param_groups:
            # One pass over memory instead of six; a checkpoint brings the value that it was saved with.
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
    # On a pipeline stage without experts their optimizer is empty; it counts the steps of the other one.
    steps = [state["step"] for inner in adams for state in inner.state.values()]
    for inner in adams:
        if not inner.state:
            state: Any = inner.state  # a key that is no parameter is kept as it is
            state["empty"] = {"step": steps[0]}
    for hybrid in hybrids:
        hybrid._sync_sub_optimizers_state_to_hdo()
