"""Build Megatron's optimizer (distributed or not); set the learning rate, and clip by an fp64 norm."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
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
from torch import Tensor

from isoloss.engine.checkpoint.optimizer_state import complete_state
from isoloss.engine.config.schema import Config, OptimConfig
from isoloss.models.mcore import patches
from isoloss.models.mcore.compat import gradients_for_norm
from isoloss.parallel import Mesh
from isoloss.parallel.mesh import reuse_world_group

OPTIMIZER = "torch.optim.AdamW, fused"  # what run.json calls it
BLOCK = 1 << 16  # gradients that a CPU has in fp64 at a time
patches.use_torch_adamw()
patches.reduce_among_ranks()


def wrap_ddp(chunks: Sequence[Any], config: Config, mesh: Mesh, *, on_gpu: bool) -> list[DistributedDataParallel]:
    """Wrap each chunk with Megatron's gradient buffers, which sum over DP x context, in fp32 (fp64, bf16). Of several a
    chunk may have no parameters."""
    ddp_config = DistributedDataParallelConfig(
        # Else sums are in the type of the weights.
        grad_reduce_in_fp32=config.train.precision != "fp64" and config.parallel.grad_reduce_dtype == "fp32",
        overlap_grad_reduce=config.overlaps_grad_reduce(on_gpu=on_gpu),
        use_distributed_optimizer=config.distributed_optimizer,
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(
            chunk.config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=mesh.megatron
        )
        for index, chunk in enumerate(chunks)
    ]


class Overlap:
    """Reduces gradients during the last backward, where configured: within `reduce_during_backward()`, and only there.

    Megatron's hooks ask one object of all chunks at every gradient; its buckets are those of an overlap in any case.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        self._chunks, self._asked = chunks, chunks[0].ddp_config
        self._configured, self._asked.overlap_grad_reduce = self._asked.overlap_grad_reduce, False

    @contextlib.contextmanager
    def reduce_during_backward(self) -> Iterator[None]:
        self._asked.overlap_grad_reduce = self._configured
        try:
            yield
        finally:
            self._asked.overlap_grad_reduce = False
            for chunk in self._chunks:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    if group.grad_reduce_handle is not None:  # left by a failed step: the next one starts anew
                        group.grad_reduce_handle.wait()
                        group.grad_reduce_handle = None


class Gather:
    """All-gather of the weights that a step of the distributed optimizer leaves in pieces, once a step. It is deferred
    to the next pass where configured: a module's forward pre-hook then waits for the buckets of its own weights.

    Collectives are entered by `defer` or `launch` only, never by a hook: some ranks may run no micro-batch. Code that
    reads weights elsewhere than in a forward pass calls `wait` before.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, put_off: bool):
        self._asked, self._put_off = chunks[0].ddp_config, put_off
        self._in_pieces = False
        # Megatron's buckets begin at the end of the model.
        self._buckets = [
            bucket
            for chunk in chunks
            for bucket in (*reversed(chunk.bucket_groups), *reversed(chunk.expert_parallel_bucket_groups))
        ]
        if not put_off:
            return
        for chunk in chunks:
            bucket_of: dict[Any, Any] = chunk.param_to_bucket_group
            for module in chunk.module.modules():
                own = {bucket_of[weight] for weight in module.parameters(recurse=False) if weight in bucket_of}
                if own:
                    module.register_forward_pre_hook(partial(_arrive, [*own]))

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Defer the gather during the optimizer's step: Megatron would gather all weights once for each optimizer."""
        if not self._asked.use_distributed_optimizer:
            yield
            return
        self._in_pieces = True
        with self._asynchronous(True):
            yield
        if not self._put_off:
            self.launch()

    def launch(self) -> None:
        """Gather weights that are in pieces. Collectives: an all-gather of every bucket over dp x context, or
        expert_dp; no more than once after a step."""
        if not self._in_pieces:
            return
        with self._asynchronous(self._put_off):
            for bucket in self._buckets:
                if bucket.intra_distributed_optimizer_instance_size > 1:
                    bucket.start_param_sync()
        self._in_pieces = False

    def wait(self) -> None:
        """Make every weight whole. Collectives as `launch`."""
        self.launch()
        self.wait_for_launched()

    def wait_for_launched(self) -> None:
        """Wait for launched gathers. Enters no collective."""
        _arrive(self._buckets)

    @contextlib.contextmanager
    def _asynchronous(self, asked: bool) -> Iterator[None]:
        self._asked.overlap_param_gather = asked
        try:
            yield
        finally:
            self._asked.overlap_param_gather = False


def _arrive(buckets: Sequence[Any], *_: Any) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.param_gather_handle.wait()
            bucket.param_gather_handle = None


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: Config, dtype: torch.dtype) -> ChainedOptimizer:
    """Build AdamW over this rank's parameters. Megatron's own clipping is off: see `global_grad_norm`."""
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
    # Where no rank trains any but experts, Megatron makes one more without parameters, which it cannot save.
    trained = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    if len(trained) < len(optimizer.chained_optimizers):
        optimizer = ChainedOptimizer(trained)
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in parts:
        patches.complete_offload(part)
    complete_state(optimizer)
    for part in parts:
        patches.save_own_part(part)
    return optimizer


def state_tensors(optimizer: ChainedOptimizer, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return main weights and moments, on host or device; not those of `trained` that the optimizer steps in place."""
    weights = {tensor.untyped_storage()._cdata for tensor in trained}
    found: list[Any] = []
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)  # a pipeline stage without experts has none for them
        hybrid = isinstance(inner, HybridDeviceOptimizer)
        for adam in (*inner.sub_optimizers, inner) if hybrid else (inner,) if inner else ():
            found += [parameter for group in adam.param_groups for parameter in group["params"]]
            found += [value for state in adam.state.values() for value in state.values()]
    return [each for each in found if isinstance(each, Tensor) and each.untyped_storage()._cdata not in weights]


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the buffers of which every gradient of this rank is a view."""
    wrapped: Sequence[Any] = chunks  # Megatron's lists `buffers`, not torch's method of that name
    return [buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule down to min_lr."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    shape = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * shape


def set_hyperparameters(optimizer: ChainedOptimizer, optim: OptimConfig) -> None:
    """Set AdamW's numbers for the next step, in place of those of the last step or a checkpoint. `wd_mult` is 0 for
    biases and norms; Megatron leaves it to the training loop to multiply with it."""
    for part in optimizer.chained_optimizers:
        for group in part.param_groups:
            group["lr"], group["eps"], group["betas"] = optim.lr, optim.eps, optim.betas
            group["weight_decay"] = optim.weight_decay * group["wd_mult"]


@torch.no_grad()
def global_grad_norm(optimizer: ChainedOptimizer) -> float:
    """Return the norm of the whole gradient, each parameter once, in fp64 (an fp32 norm is off by 5e-4 on a CPU).

    After `optimizer.prepare_grads()`. Collectives: an all-reduce over tp x pp for the dense parameters and one over
    etp x ep x pp for experts, or over the world with the distributed optimizer, whose ranks each hold a piece. The host
    waits once.
    """
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for part in optimizer.chained_optimizers:
        square, grads = torch.zeros_like(total), [*gradients_for_norm(part)]
        if grads:
            square = _squares(grads).cumsum(0)[-1]  # one after the other
        dist.all_reduce(square, group=reuse_world_group(part.get_grad_stats_parallel_group()))
        total += square
    return math.sqrt(total.item())


def _squares(grads: list[Tensor]) -> Tensor:
    """Return sums of squares that add up to that of the gradients, in fp64."""
    if all(grad.is_cpu for grad in grads):  # an fp64 norm of fp32 numbers takes three times as long there
        room, squares = torch.empty(BLOCK, dtype=torch.float64), []
        for block in (block for grad in grads for block in grad.flatten().split(BLOCK)):
            double = room[: len(block)].copy_(block)
            squares.append(torch.dot(double, double))
        return torch.stack(squares)
    # A GPU sums squares in fp64 as it reads; one norm alone would write the whole gradient in fp64 before.
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square()


@torch.no_grad()
def clip_gradients(optimizer: ChainedOptimizer, norm: float, clip: float) -> None:
    """Scale all gradients by clip / norm where the norm exceeds clip (0: never)."""
    if clip == 0 or norm <= clip:
        return
    parameters = [parameter for part in optimizer.chained_optimizers for parameter in part.get_parameters()]
    # The former with an optimizer in CPU memory.
    grads = [getattr(parameter, "decoupled_grad", parameter.grad) for parameter in parameters]
    if grads := [grad for grad in grads if grad is not None]:
        torch._foreach_mul_(grads, clip / norm)
