"""Megatron's HybridDeviceOptimizer, which keeps and steps a share of the optimizer's state in host memory, with what it
leaves open closed."""

from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Group = dict[str, Any]


def switch_on(settings: OptimizerConfig, share: float) -> None:
    """Let Megatron put `share` of the state (moments and fp32 weights) into host memory.

    Only what it calls precision-aware leaves the fp32 weights to this optimizer; else they stay on the device. Both
    flags of that are set here, because the check of a new OptimizerConfig asks for Transformer Engine's version, also
    where there is none.
    """
    settings.optimizer_cpu_offload = True
    settings.optimizer_offload_fraction = share
    settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False


def complete(part: DistributedOptimizer) -> None:
    """Close what Megatron leaves open in an optimizer just built, if a share of it is on the host.

    - Its groups carry its settings, classes among them, into checkpoints, which other machines cannot read.
    - Where torch's AdamW steps both shares, loading moves the device's share of the state to the host.
    - Without a GPU it offloads nothing, and then misses the copies that it did not make.
    - On a pipeline stage without experts that of the experts has nothing to step, and no state to describe.
    """
    hybrid = part.optimizer
    if not isinstance(hybrid, HybridDeviceOptimizer):
        return
    for group in hybrid.param_groups:
        for key in hybrid.defaults.keys() - hybrid.sub_optimizer_kwargs.keys():
            del group[key]
    if not any(group["params"] for group in hybrid.param_groups):
        part.optimizer = torch.optim.AdamW(hybrid.param_groups)
        return
    hybrid._move_new_state_to_right_device = partial(_move_state, hybrid)
    if not torch.cuda.is_available():
        hybrid._get_sub_optimizer_param_groups = partial(_split, hybrid)
    hybrid._init_sub_optimizers()


def _move_state(hybrid: HybridDeviceOptimizer) -> None:
    """Each parameter's state to where the parameter is stepped."""
    for optimizer in hybrid.sub_optimizers:
        for inner, state in optimizer.state.items():
            for name, value in state.items():
                state[name] = value.to(inner.device)


def _split(
    hybrid: HybridDeviceOptimizer, share: float
) -> tuple[list[Group], list[Group], dict[Tensor, Tensor], dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """What Megatron's `_get_sub_optimizer_param_groups` returns, where the host is the device as well.

    Parameters go to the host in order, until `share` of all their elements are there. Returns the groups of the host
    and of the device, the copy of each parameter that went to the host and the way back, and every parameter's fp32
    weights.
    """
    left = share * sum(parameter.numel() for group in hybrid.param_groups for parameter in group["params"])
    host_groups: list[Group] = []
    device_groups: list[Group] = []
    copies: dict[Tensor, Tensor] = {}
    weights: dict[Tensor, Tensor] = {}
    for group in hybrid.param_groups:
        host: list[Tensor] = []
        device: list[Tensor] = []
        for parameter in group["params"]:
            weights[parameter] = parameter.detach().clone().float()
            if left > 0:
                copies[parameter] = weights[parameter]
            (host if left > 0 else device).append(weights[parameter])
            left -= parameter.numel()
        for groups, parameters in ((host_groups, host), (device_groups, device)):
            if parameters:
                groups.append({**group, "params": parameters})
    return host_groups, device_groups, copies, {inner: parameter for parameter, inner in copies.items()}, weights
