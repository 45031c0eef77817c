"""Architecture + mesh -> the Megatron-Core model chunks of this rank.

Megatron's own layers, with our norm, activation, attention and router in their slots.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn.functional import silu

from isoloss.models.activations import clamped_swiglu, swiglu
from isoloss.models.architecture import Architecture
from isoloss.models.checkpoint_keys import te_prefixes
from isoloss.models.forms import padded_vocab_size
from isoloss.models.gpt import PackedGPT
from isoloss.models.latent_attention import LatentAttention
from isoloss.models.norm import RMSNorm
from isoloss.models.router import Router
from isoloss.models.value_head import ValueHead
from isoloss.parallel import Layout, Mesh, UserError
from isoloss.parallel.attention import PackedAttention


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Refuse a layout that this architecture cannot be split by. Raises UserError; needs no process group."""
    heads, kv_heads = arch.num_heads, arch.num_kv_heads
    if heads % layout.tp:
        raise UserError(
            f"parallel.tp={layout.tp} does not divide the model's {heads} attention heads; use one of "
            f"{_divisors(heads)}"
        )
    if kv_heads % layout.tp and layout.tp % kv_heads:
        raise UserError(
            f"parallel.tp={layout.tp} neither divides nor is a multiple of the model's {kv_heads} key/value heads"
        )
    if arch.intermediate_size % layout.tp:
        raise UserError(
            f"parallel.tp={layout.tp} does not divide the model's intermediate_size {arch.intermediate_size}"
        )
    if heads // layout.tp % layout.ulysses:
        raise UserError(
            f"parallel.ulysses={layout.ulysses} does not divide the {heads // layout.tp} attention heads of a TP rank "
            f"({heads} heads / tp {layout.tp}); use one of {_divisors(heads // layout.tp)}"
        )
    if arch.num_layers % (layout.pp * layout.vpp):
        raise UserError(
            f"parallel.pp={layout.pp} x vpp={layout.vpp} does not divide the model's {arch.num_layers} layers; "
            f"use a product out of {_divisors(arch.num_layers)}"
        )
    if arch.critic and arch.hidden_size % layout.tp:
        raise UserError(
            f"parallel.tp={layout.tp} does not divide the hidden_size {arch.hidden_size} that the critic's value head "
            f"reads; use one of {_divisors(arch.hidden_size)}"
        )
    _check_expert_layout(arch, layout)


def _check_expert_layout(arch: Architecture, layout: Layout) -> None:
    moe = arch.experts
    if moe is None:
        for key in ("ep", "etp"):
            if getattr(layout, key) > 1:
                raise UserError(
                    f"parallel.{key}={getattr(layout, key)} is for mixture-of-experts models and this one is dense; "
                    "set it to 1"
                )
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        raise UserError(
            "parallel.sequence_parallel=false does not work with experts and parallel.tp > 1: every TP rank would send "
            "the same tokens to the experts; leave it at null"
        )
    if moe.count % layout.ep:
        raise UserError(
            f"parallel.ep={layout.ep} does not divide the model's {moe.count} experts; use one of "
            f"{_divisors(moe.count)}"
        )
    for what, size in (("expert width", moe.intermediate_size), ("shared expert's width", moe.shared_size)):
        degree, key = (layout.etp, "etp") if what == "expert width" else (layout.tp, "tp")
        if size % degree:
            raise UserError(f"parallel.{key}={degree} does not divide the model's {what} {size}")
    if layout.etp > 1 and arch.linear_bias:
        raise UserError(f"parallel.etp={layout.etp} does not work with biases in the experts; set it to 1")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def transformer_config(arch: Architecture, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of this model on this mesh. Dropout is 0: it would break the promise."""
    layout = mesh.layout
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        use_te_activation_func=True,  # the slot that `layer_spec` fills; nothing of Transformer Engine
        add_bias_linear=arch.linear_bias,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always read or generated by name, so that they are the same in every layout.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Plain sums everywhere: the normalizer's weights hold the only division (docs/normalization.md).
        calculate_per_token_loss=True,
        # Packed rows differ in length, so stages exchange shapes; that path refuses the default dispatcher.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # With pp=2 and batched messages, interleaved stages confuse "previous" and "next" between the same two ranks,
        # silently; overlapped messages are exact.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_expert_settings(arch, layout),
    )


def _expert_settings(arch: Architecture, layout: Layout) -> dict[str, Any]:
    moe = arch.experts
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.count,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_size or None,
        # Megatron names the checkpoint's tensors by this: a list means that layers differ.
        "moe_layer_freq": [int(arch.has_experts(k)) for k in range(arch.num_layers)] if moe.dense_layers else 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Read by Megatron's checks only: `Router` chooses the experts.
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
    }


def layer_spec(arch: Architecture, mesh: Mesh, layer: int) -> ModuleSpec:
    """Megatron's local spec of a layer, with our norm, activation, attention and router in it."""
    sparse = arch.has_experts(layer)
    spec = get_gpt_layer_local_spec(
        num_experts=arch.experts.count if arch.experts and sparse else None,
        qk_layernorm=arch.qk_norm,
        normalization="RMSNorm",
    )
    layers = spec.submodules
    layers.input_layernorm = layers.pre_mlp_layernorm = RMSNorm
    layers.sharded_state_dict_keys_map = te_prefixes(arch, layer)
    core = partial(
        PackedAttention,
        group=mesh.ulysses,
        tp_group=mesh.tp,
        window=arch.window(layer),
        sinks=arch.sinks,
        # Where cosine and sine of a whole head are scaled, so is the product of a query and a key, twice.
        scale=arch.head_dim**-0.5 * arch.rope.softmax_factor * (1.0 if arch.latent else arch.rope.cos_sin_factor**2),
    )
    if arch.latent:
        layers.self_attention = ModuleSpec(module=LatentAttention, params={"arch": arch, "core": core})
    else:
        attention = layers.self_attention.submodules
        attention.core_attention = core
        if arch.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    activation = clamped_swiglu if arch.clamped_swiglu else swiglu
    mlp = layers.mlp.submodules
    if arch.experts and sparse:
        mlp.router = partial(Router, experts=arch.experts)
        mlp.experts.submodules.activation_func = mlp.shared_experts.submodules.activation_func = activation
        if arch.linear_bias:
            mlp.experts.submodules.linear_fc2 = _BiasedExpertOutput
    else:
        mlp.activation_func = activation
    return spec


class _BiasedExpertOutput(RowParallelLinear):
    """Megatron's MLP adds an expert's bias in place to what this returns, which autograd forbids on its own output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias


def build_model(arch: Architecture, mesh: Mesh, dtype: torch.dtype) -> Sequence[PackedGPT]:
    """This rank's model chunks (one; `vpp` of them in an interleaved pipeline), with uninitialised weights.

    Collectives: with tied embeddings and a pipeline, Megatron exchanges the embedding between first and last stage.
    """
    # Megatron forks its random states around every dropout under TP, even of probability 0; the seed changes nothing.
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = transformer_config(arch, mesh, dtype)
    chunks = []
    for index in range(mesh.layout.vpp):
        stage = index if mesh.layout.vpp > 1 else None
        first = get_transformer_layer_offset(config, stage, mesh.pp.rank())
        layers = [layer_spec(arch, mesh, first + k) for k in range(get_num_layers_to_build(config, vp_stage=stage))]
        chunk = PackedGPT(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=ModuleSpec(module=RMSNorm)),
            vocab_size=padded_vocab_size(arch.vocab_size, mesh.layout.tp),
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage(index),
            post_process=mesh.is_last_stage(index),
            share_embeddings_and_output_weights=arch.tie_embeddings,
            inv_freq=arch.rope.inv_freq(arch.rotary_dim),
            pg_collection=mesh.megatron,
            vp_stage=stage,
        )
        if arch.critic and mesh.is_last_stage(index):
            chunk.output_layer = ValueHead(arch.hidden_size, mesh.tp)
        _mark_parameters(chunk)
        chunks.append(_cast(chunk, dtype))
    return chunks


def _mark_parameters(chunk: PackedGPT) -> None:
    """Tell Megatron what it does not find out itself.

    Which parameters are TP shards: Megatron says so only where it also initialises them; without it the gradient norm
    takes every shard but the first for a duplicate. Which belong to experts: Megatron says so only with ep > 1, but
    with fewer expert than attention TP ranks the others hold copies whose gradients have to be summed as well.
    """
    for name, module in chunk.named_modules():
        sharded = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        if sharded and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)
        if ".local_experts." in name:
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = False
                parameter.sequence_parallel = False
                parameter.tensor_model_parallel = True  # TP ranks hold other experts, or copies that are not counted


def _cast(chunk: PackedGPT, dtype: torch.dtype) -> PackedGPT:
    """The chunk in `dtype`, but for buffers (the experts' selection bias), which keep theirs."""
    for parameter in chunk.parameters():
        parameter.data = parameter.data.to(dtype)
    return chunk
