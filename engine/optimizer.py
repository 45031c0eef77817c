"""Megatron's optimizer (distributed or not), the learning-rate schedule, and clipping by an fp64 norm."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from isoloss.engine.config import Config, OptimConfig
from isoloss.models.mcore import patches
from isoloss.models.mcore.compat import gradients_for_norm
from isoloss.models.mcore.gpt import unwrap
from isoloss.models.model import Model
from isoloss.parallel import Mesh

OPTIMIZER = "torch.optim.AdamW, fused"  # what run.json calls it
patches.use_torch_adamw()


def wrap_ddp(chunks: Sequence[nn.Module], config: Config, mesh: Mesh) -> list[DistributedDataParallel]:
    """Megatron's gradient buffers around each chunk; gradients are plain sums over DP x context, in fp32 (fp64)."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.train.precision != "fp64",
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.distributed_optimizer,
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(
            unwrap(chunk).config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=mesh.megatron
        )
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: Config, dtype: torch.dtype) -> ChainedOptimizer:
    """AdamW over this rank's parameters. Megatron's own clipping is off: see `global_grad_norm`."""
    optim = config.optim
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    if config.memory.offload_optimizer > 0:
        patches.offload(settings, config.memory.offload_optimizer)
    # Megatron's standard overrides mark biases and norms, which have no weight decay: see `set_hyperparameters`.
    overrides = get_standard_config_overrides(settings)
    optimizer = get_megatron_optimizer(settings, list(chunks), overrides, use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in parts:
        patches.complete_offload(part)
    complete_state(optimizer)
    for part in parts:
        patches.save_own_part(part)
    return optimizer


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
            group["fused"] = (
                True  # one pass over memory instead of six; a checkpoint brings the value that it was saved with
            )
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


def state_tensors(optimizer: ChainedOptimizer, model: Model) -> list[Tensor]:
    """Main weights and moments, wherever they are; not the weights that the optimizer steps where they stand."""
    weights = {tensor.untyped_storage()._cdata for tensor in model.tensors()}
    found: list[Any] = []
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)  # a pipeline stage without experts has none for them
        hybrid = isinstance(inner, HybridDeviceOptimizer)
        for adam in (*inner.sub_optimizers, inner) if hybrid else (inner,) if inner else ():
            found += [parameter for group in adam.param_groups for parameter in group["params"]]
            found += [value for state in adam.state.values() for value in state.values()]
    return [each for each in found if isinstance(each, Tensor) and each.untyped_storage()._cdata not in weights]


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """What every gradient of this rank is a view of."""
    wrapped: Sequence[Any] = chunks  # whose buffers are not those of torch's method of that name
    return [buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule down to min_lr."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    shape = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * shape


def set_hyperparameters(optimizer: ChainedOptimizer, lr: float) -> None:
    """Those of the next step: the configured ones, whatever a checkpoint brought. `wd_mult` is 0 for biases and norms;
    Megatron leaves it to the training loop to multiply with it."""
    for part in optimizer.chained_optimizers:
        settings = part.config
        for group in part.param_groups:
            group["lr"], group["eps"] = lr, settings.adam_eps
            group["betas"] = (settings.adam_beta1, settings.adam_beta2)
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]


@torch.no_grad()
def global_grad_norm(optimizer: ChainedOptimizer) -> float:
    """Norm of the whole gradient, each parameter once, accumulated in fp64 (an fp32 norm is off by 5e-4 on a CPU).

    After `optimizer.prepare_grads()`. Collectives: an all-reduce over tp x pp for the dense parameters and one over
    etp x ep x pp for experts, or over the world with the distributed optimizer, whose ranks each hold a piece.
    """
    total = 0.0
    for part in optimizer.chained_optimizers:
        square = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for grad in gradients_for_norm(part):
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total += square.item()
    return math.sqrt(total)


@torch.no_grad()
def clip_gradients(optimizer: ChainedOptimizer, norm: float, clip: float) -> None:
    """Scale all gradients by clip / norm where the norm exceeds clip (0: never)."""
    if clip == 0 or norm <= clip:
        return
    for part in optimizer.chained_optimizers:
        for parameter in part.get_parameters():
            grad = getattr(parameter, "decoupled_grad", parameter.grad)  # the former with an optimizer in CPU memory
            if grad is not None:
                grad.mul_(clip / norm)
