"""Every change that isoloss makes to Megatron-Core's own classes and objects; nothing else patches them.

What stands in for CUDA on a CPU changes torch, not Megatron: `isoloss.parallel.runtime.cuda_stubs`.
"""

# A patch puts another thing where the type says what stood there.
# pyright: reportAttributeAccessIssue=false

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core import optimizer
from megatron.core.dist_checkpointing import state_dict_utils, validation
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers, random
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import attention
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isoloss.models.mcore import optimizer_shards
from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.rotary import rotate
from isoloss.parallel.ops.embedding import embed
from isoloss.parallel.ops.matmul import add_product, main_grad_to_add_to, onednn_is_faster, product
from isoloss.parallel.ops.prepacked import PackedMatrix

ParamGroup = dict[str, Any]


def recompute_without_transformer_engine() -> None:
    """Let `CheckpointWithoutOutput` work without Transformer Engine: the default of its argument `fp8`, False, counts
    as "in fp8", and it then asks Transformer Engine, also where there is none."""
    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def recompute_by_copying() -> None:
    """Let what `CheckpointWithoutOutput` computes again be copied into the memory of the first time, as 0.16.1 does;
    0.17 has the two share memory by a C++ extension, which it compiles in the first backward: on every machine, with a
    compiler and ninja."""
    random._get_share_storage = lambda: _copy_storage


def _copy_storage(output: Tensor, again: Tensor) -> None:
    source, target = again.untyped_storage(), output.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)


def rotate_by_table() -> None:
    """Let the attention of a model of isoloss rotate queries and keys by a table of cosines and sines, which all layers
    share: Megatron takes them again of the angles in each, twice, and keeps them until its backward."""
    of_angles = attention.apply_rotary_pos_emb

    def rotated(x: Tensor, angles_or_table: Tensor, config: TransformerConfig, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(config, LayerConfig):
            return rotate(x, angles_or_table, one_kernel=config.kernels.rope)
        return of_angles(x, angles_or_table, config, *args, **kwargs)

    attention.apply_rotary_pos_emb = rotated


def embed_into_main_grad() -> None:
    """Let an embedding with that flag (`build.accumulate_in_embedding`) add its gradient to Megatron's buffer."""
    with_autograd = layers.VocabParallelEmbedding.forward

    def forward(self: Any, tokens_R: Tensor) -> Tensor:
        main_grad = main_grad_to_add_to(self)
        if main_grad is None:
            return with_autograd(self, tokens_R)
        return embed(tokens_R, self.weight, main_grad, shared=self.is_output_matrix)

    layers.VocabParallelEmbedding.forward = forward


def multiply_with_adapters() -> None:
    """Let Megatron's linear layers multiply by an adapter as well, where their attribute `adapter`, a `lora.Slot`, has
    an active one."""

    def with_adapter(of_megatron: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(self: Any, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
            adapter = self.adapter and self.adapter.active
            if adapter is None:
                return of_megatron(self, input, weight, *args, **options)
            return adapter.multiply(input, weight, *args, **options)

        return forward

    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        linear.adapter = None
        linear._forward_impl = with_adapter(linear._forward_impl)


@contextmanager
def multiply_by(matrices: Mapping[Any, PackedMatrix]) -> Iterator[None]:
    """Let linear layers of Megatron multiply by these matrices in place of their weights, without gradients."""

    def product_with(layer: Any, matrix: PackedMatrix):
        def forward(input: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
            output = matrix.product(input, bias)
            adapter = layer.adapter and layer.adapter.active
            return output if adapter is None else adapter.add_to(output, input)

        return forward

    for layer, matrix in matrices.items():
        layer._forward_impl = product_with(layer, matrix)
    try:
        yield
    finally:
        for layer in matrices:
            del layer._forward_impl


def accumulate_without_apex() -> None:
    """Let Megatron's layers add weight gradients to its buffer by a product of torch's. Megatron calls a module of
    NVIDIA's apex for that, by this name, with one function for each type of the buffer."""
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
    )


def _add_weight_gradient(inputs_RD: Tensor, grad_output_RU: Tensor, main_grad_UD: Tensor) -> None:
    add_product(main_grad_UD, grad_output_RU.T, inputs_RD)


class _OurProducts(TorchFunctionMode):
    """Products of activations with a matrix are those of `isoloss.parallel.ops.matmul`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, Tensor.matmul) and not kwargs:
            rows, matrix = args
            return product(rows.flatten(0, -2), matrix).view(*rows.shape[:-1], matrix.shape[1])
        return func(*args, **(kwargs or {}))


def multiply_by_onednn() -> None:
    """Let Megatron's linear layers, forward and backward, take their products on a CPU of oneDNN where that is
    faster."""

    def with_products(of_megatron: Callable[..., Any]) -> Any:
        def computed(ctx: Any, tensor: Tensor, *rest: Any) -> Any:
            with _OurProducts() if tensor.is_cpu else nullcontext():
                return of_megatron(ctx, tensor, *rest)

        return staticmethod(computed)

    if onednn_is_faster():
        linear = layers.LinearWithGradAccumulationAndAsyncCommunication
        linear.forward, linear.backward = with_products(linear.forward), with_products(linear.backward)


@contextmanager
def reader_of_tensors(reader: Any) -> Iterator[None]:
    """Have Megatron's loading of tensors use this reader: its own unpickles `.metadata`, and has no other way in."""
    own = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *args, **options: reader
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader = own


def collect_results_in_process() -> None:
    """Let the writers of a checkpoint's files put their results into a queue of this process, in place of one that a
    manager process holds."""
    filesystem_async._results_queue = queue.SimpleQueue()


def save_without_advice() -> None:
    """Let a save that is waited for not advise against asynchronous ones, as 0.17 does at the first of a process."""
    torch_strategy._logged_mcore_async_deprecation = True


# ---- a dry run, whose tensors have shapes and no values --------------------------------------------------------------


def trust_shards() -> None:
    """Leave out that rank 0 checks whether the shards of all ranks make up whole tensors of a checkpoint."""
    state_dict_utils.validate_sharding_integrity = validation.validate_sharding_integrity = lambda *args, **kwargs: None


def answer_split_sizes(chosen: int, wait: Callable[[str], None]) -> None:
    """Give every expert the same number of tokens: in numpy, whose numbers keep their values.

    chosen: experts of a token.
    wait: called where the dispatcher would copy the numbers to the host.
    """

    def even(self: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point:
            return tokens_per_expert
        wait("split sizes")
        sent = self.routing_map.shape[0] * chosen
        ranks = self.ep_size * self.tp_size
        splits = np.full(self.ep_size, sent // self.ep_size)
        splits[-1] += sent % self.ep_size
        self.input_splits = self.output_splits = splits
        self.output_splits_tp = np.full(self.tp_size, sent)
        local = self.num_local_experts
        received = np.full((ranks, local), sent * self.tp_size // (ranks * local))
        received[-1, -1] += sent * self.tp_size - received.sum()
        self.num_global_tokens_per_local_expert = received
        chunks = np.arange(ranks * local)
        self.sort_input_by_local_experts = chunks.reshape(-1, local).T.ravel()
        self.restore_output_by_local_experts = chunks.reshape(local, -1).T.ravel()
        return received.sum(0)

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = even


# ---- optimizers -----------------------------------------------------------------------------------------------------


def use_torch_adamw() -> None:
    """Let Megatron take torch's AdamW. It prefers Transformer Engine's FusedAdam, then apex's, where one imports; their
    states have other forms, so what is installed would decide which checkpoints can be read."""
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = torch.optim.AdamW, False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False


def reduce_among_ranks() -> None:
    """Let the gradients of a group of one rank stay where they are: gloo copies all of them, and back. (Megatron would
    scale them before, by 1 with calculate_per_token_loss.)"""
    start = BucketGroup.start_grad_sync

    def start_unless_alone(self: Any, *args: Any, **options: Any) -> None:
        alone = self.ddp_config.use_distributed_optimizer and self.intra_distributed_optimizer_instance_size == 1
        if not alone or self.ddp_config.overlap_grad_reduce:
            start(self, *args, **options)

    BucketGroup.start_grad_sync = start_unless_alone


def save_own_part(part: DistributedOptimizer) -> None:
    """Let every rank of an optimizer put its own part into a checkpoint of the format `fully_reshardable`, and read it
    into place: Megatron's own code gathers the parts of all data-parallel ranks on each of them. Its loading looks for
    the step count, which it keeps elsewhere, among the tensors."""
    part.state_dict = partial(_groups, part)
    part.sharded_param_state_fully_reshardable = partial(optimizer_shards.own_part, part)
    part.load_parameter_state_from_fully_reshardable = lambda loaded: None


def _groups(part: DistributedOptimizer) -> dict[str, Any]:
    """Return the value of Megatron's `state_dict`. All parameters have the same step count, so only one is read: each
    is a tensor of the device, which the host waits for."""
    inner = part.optimizer.state_dict()
    step = next(iter(inner["state"].values()))["step"].item()
    groups = [{**group, "step": step} for group in inner["param_groups"]]
    for group in groups:
        del group["params"]
    return {"optimizer": {"param_groups": groups}}


# ---- HybridDeviceOptimizer: a share of the optimizer's state lives, and is stepped, in CPU memory ------------------


def offload(settings: OptimizerConfig, share: float) -> None:
    """Let Megatron put `share` of the state (moments and fp32 weights) into CPU memory.

    Only what it calls precision-aware leaves the fp32 weights to this optimizer; else they stay on the device. Both
    flags of that are set here, because the check of a new OptimizerConfig asks for Transformer Engine's version, also
    where there is none.
    """
    settings.optimizer_cpu_offload = True
    settings.optimizer_offload_fraction = share
    settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False


def complete_offload(part: DistributedOptimizer) -> None:
    """Close what Megatron leaves open in an optimizer just built, if a share of it is in CPU memory.

    - Its groups carry its settings, classes among them, into checkpoints, which other machines cannot read.
    - Where torch's AdamW steps both shares, loading moves the device's share of the state to the CPU.
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
    for part in hybrid.sub_optimizers:
        for inner, state in part.state.items():
            for name, value in state.items():
                state[name] = value.to(inner.device)


def _split(
    hybrid: HybridDeviceOptimizer, share: float
) -> tuple[list[ParamGroup], list[ParamGroup], dict[Tensor, Tensor], dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """Return the value of Megatron's `_get_sub_optimizer_param_groups`, where the device is the CPU as well.

    Parameters go to CPU memory in order, until `share` of all their elements are there. Returns the groups of the CPU
    and of the device, the copy of each parameter that went there and the way back, and every parameter's fp32
    weights.
    """
    left = share * sum(parameter.numel() for group in hybrid.param_groups for parameter in group["params"])
    cpu_groups: list[ParamGroup] = []
    device_groups: list[ParamGroup] = []
    copies: dict[Tensor, Tensor] = {}
    weights: dict[Tensor, Tensor] = {}
    for group in hybrid.param_groups:
        cpu: list[Tensor] = []
        device: list[Tensor] = []
        for parameter in group["params"]:
            weights[parameter] = parameter.detach().clone().float()
            if left > 0:
                copies[parameter] = weights[parameter]
            (cpu if left > 0 else device).append(weights[parameter])
            left -= parameter.numel()
        for groups, parameters in ((cpu_groups, cpu), (device_groups, device)):
            if parameters:
                groups.append({**group, "params": parameters})
    return cpu_groups, device_groups, copies, {inner: parameter for parameter, inner in copies.items()}, weights
