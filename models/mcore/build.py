"""Architecture + mesh -> the Megatron-Core model chunks of this rank.

Megatron's own layers or Transformer Engine's (`te`), with our activation, attention and router in their slots.
"""

# Megatron hangs attributes on parameters, and types the submodules of a layer as object.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn.functional import silu

from isoloss.models.architecture import Architecture
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.compat import AnyLayer, ClampedSwiGLU, GeGLU, SwiGLU, of_class, submodules_of
from isoloss.models.mcore.gpt import PackedGPT, unwrap
from isoloss.models.mcore.kernels import ALL, Kernels
from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.asymmetric_attention import DifferingAttention
from isoloss.models.mcore.layers.dense_mlp import RecomputingMLP
from isoloss.models.mcore.layers.gated_attention import GatedSelfAttention
from isoloss.models.mcore.layers.gated_delta_net import GatedDeltaNet
from isoloss.models.mcore.layers.latent_attention import LatentAttention
from isoloss.models.mcore.layers.norm import JointHeadNorm, RMSNorm
from isoloss.models.mcore.layers.residual_norm import ResidualNorm, ResidualNormLayer
from isoloss.models.mcore.layers.sandwich_norm import SandwichLayer
from isoloss.models.mcore.layers.value_head import ValueHead
from isoloss.models.mcore.moe.experts import ExpertLayer, ExpertTransformerLayer
from isoloss.models.mcore.moe.grouped_experts import Experts
from isoloss.models.mcore.moe.router import Router
from isoloss.models.mcore.patches import (
    accumulate_without_apex,
    embed_into_main_grad,
    multiply_by_onednn,
    recompute_by_copying,
    recompute_without_transformer_engine,
    rotate_by_table,
)
from isoloss.models.mcore.stages import pipeline_layout
from isoloss.models.weights.checkpoint_names import te_prefixes
from isoloss.models.weights.mappings import padded_vocab_size
from isoloss.parallel import Layout, Mesh
from isoloss.parallel.attention import PackedAttention
from isoloss.parallel.head_exchange import HeadExchange
from isoloss.parallel.ops.block_attention import Heads

recompute_without_transformer_engine()
recompute_by_copying()
rotate_by_table()
accumulate_without_apex()
embed_into_main_grad()
multiply_by_onednn()


def transformer_config(
    arch: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    stages: Sequence[int],
    memory: ActivationMemory,
    kernels: Kernels = ALL,
    *,
    te: bool = False,
    cp_kernel: str = "isoloss",
    dispatcher: str = "alltoall",
    deterministic: bool = False,
) -> LayerConfig:
    """Megatron's configuration of this model on this layout. Dropout is 0: it would break the promise."""
    return LayerConfig(
        kernels=kernels,
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
        qk_layernorm=arch.qk_norm and not arch.joint_qk_norm,  # it sums gradients of norms of that name over TP
        layernorm_zero_centered_gamma=arch.zero_centered_norm,
        attention_output_gate=arch.output_gate,
        linear_attention_freq=_linear_attention(arch),
        multi_latent_attention=arch.latent is not None,  # read by Megatron's checks only
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=pipeline_layout(stages) if layout.pp > 1 else None,
        context_parallel_size=layout.context,
        cp_comm_type=None if cp_kernel == "isoloss" else cp_kernel,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always read or generated by name, so that they are the same in every layout.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Plain sums everywhere: the normalizer's weights hold the only division (docs/normalization.md).
        calculate_per_token_loss=True,
        # Packed rows differ in length, so stages ask for the shape of every message, which `parallel.schedule.Messages`
        # knows; that path refuses the default dispatcher.
        variable_seq_lengths=True,
        **_dispatcher_settings(dispatcher),
        # With pp=2 and batched messages, interleaved stages confuse "previous" and "next" between the same two ranks,
        # silently; overlapped messages are exact.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        # The host need not wait as well. A batch's `wait()` lets the stream wait, since pytorch/pytorch#82450 for all
        # its messages, and on that stream their tensors are made, used, freed and their memory used again.
        batch_p2p_sync=False,
        deterministic_mode=deterministic,
        # Megatron's fusions are off by default, and stay so.
        **_expert_settings(arch, layout, te),
        **memory.settings(),
    )


def _linear_attention(arch: Architecture) -> list[int] | None:
    """Megatron names the checkpoint's tensors by this, and by `moe_layer_freq`: a list means that layers differ."""
    if arch.delta or (arch.layers_differ and arch.experts is None):
        return [int(arch.is_linear(layer)) for layer in range(arch.num_layers)]
    return None


def _dispatcher_settings(dispatcher: str) -> dict[str, str]:
    if dispatcher == "alltoall":
        return {"moe_token_dispatcher_type": "alltoall"}
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": dispatcher}


def _expert_settings(arch: Architecture, layout: Layout, te: bool) -> dict[str, Any]:
    moe = arch.experts
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.count,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        # As `linear_attention_freq`.
        "moe_layer_freq": [int(arch.has_experts(k)) for k in range(arch.num_layers)] if arch.layers_differ else 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Transformer Engine's permutation adds a token's experts up in a fixed order, and not by atomic additions.
        "moe_grouped_gemm": te,
        "moe_permute_fusion": te,
        # Read by Megatron's checks only: `Router` chooses the experts.
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
    }


def layer_spec(
    arch: Architecture, mesh: Mesh, layer: int, memory: ActivationMemory, kernels: Kernels, *, te: bool = False
) -> ModuleSpec:
    """Megatron's spec of a layer, local with our norm or of Transformer Engine's modules, which own the norm before
    them (`te`); with our activation, attention and router in either."""
    sparse = arch.has_experts(layer)
    num_experts = arch.experts.count if arch.experts and sparse else None
    if te:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm=True, qk_layernorm=arch.qk_norm)
    else:
        spec = get_gpt_layer_local_spec(num_experts, qk_layernorm=arch.qk_norm, normalization="RMSNorm")
        spec.module = ResidualNormLayer
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.pre_mlp_layernorm = ResidualNorm if kernels.residual_norm else RMSNorm
    layers = spec.submodules
    layers.sharded_state_dict_keys_map = te_prefixes(arch, layer)
    if arch.is_linear(layer):
        layers.input_layernorm = TENorm if te else RMSNorm
        params = {"arch": arch, "exchange": HeadExchange.over(mesh)}
        layers.self_attention = ModuleSpec(module=GatedDeltaNet, params=params)
    elif arch.latent or arch.differing_attention:
        layers.input_layernorm = TENorm if te else RMSNorm  # its projections own no norm
        params = {"arch": arch, "core": _core_attention(arch, mesh, layer, kernels)}
        module = LatentAttention if arch.latent else DifferingAttention
        layers.self_attention = ModuleSpec(module=module, params=params)
    else:
        attention = layers.self_attention.submodules
        attention.core_attention = _core_attention(arch, mesh, layer, kernels)
        if arch.output_gate:
            layers.self_attention.module = GatedSelfAttention
        if arch.joint_qk_norm:
            for slot, heads in (("q_layernorm", arch.num_heads), ("k_layernorm", arch.num_kv_heads)):
                params = {"heads": heads, "tp_group": mesh.tp}
                setattr(attention, slot, ModuleSpec(module=JointHeadNorm, params=params))
        elif arch.qk_norm and not te:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    activation = ClampedSwiGLU if arch.clamped_swiglu else GeGLU if arch.geglu else SwiGLU
    mlp = submodules_of(layers.mlp)
    if arch.experts and sparse:
        mlp.router = partial(Router, experts=arch.experts)
        experts = submodules_of(mlp.experts)
        experts.activation_func = submodules_of(mlp.shared_experts).activation_func = activation
        if arch.linear_bias and not te:
            experts.linear_fc2 = _BiasedExpertOutput
        if not te:
            grouped = kernels.grouped_experts and not arch.clamped_swiglu
            mlp.experts = of_class(mlp.experts, Experts, grouped=grouped)
        spec.module = ExpertTransformerLayer
        # Not a ModuleSpec: Megatron gives the groups of one to its own MoE layer only, and warns of any other.
        params = {"pg_collection": mesh.megatron, "recompute_experts": memory.recomputes_experts}
        layers.mlp = AnyLayer(module=ExpertLayer, submodules=mlp, params=params)
    else:
        mlp.activation_func = activation
        if memory.recomputes_mlp_act:
            layers.mlp = AnyLayer(module=RecomputingMLP, submodules=mlp, params={"tp_group": mesh.tp})
    if arch.sandwich_norm:
        spec.module, spec.params = SandwichLayer, {"scaled": arch.layer_scalar}
    return spec


def _core_attention(arch: Architecture, mesh: Mesh, layer: int, kernels: Kernels) -> Callable[..., nn.Module]:
    # Where cosine and sine of a whole head are scaled, so is the product of a query and a key, twice.
    rotated_scale = 1.0 if arch.latent else arch.rope.cos_sin_factor**2
    scale = arch.softmax_scale or arch.key_dim(layer) ** -0.5
    heads = {"scale": scale * arch.rope.softmax_factor * rotated_scale, "window": arch.window(layer)}
    if mesh.cp_kernel != "isoloss":
        from isoloss.models.mcore.layers.te_attention import FusedAttention

        return partial(FusedAttention, **heads)
    groups = {"ulysses": mesh.ulysses, "ring": mesh.ring, "tp_group": mesh.tp}
    sinks, flash = arch.has_sinks(layer), kernels.attention != "blocks"
    return partial(PackedAttention, **groups, sinks=sinks, heads=Heads(**heads, flash=flash))


class _BiasedExpertOutput(RowParallelLinear):
    """Megatron's MLP adds an expert's bias in place to what this returns, which autograd forbids on its own output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias


def build_chunks(
    arch: Architecture,
    mesh: Mesh,
    dtype: torch.dtype,
    stages: Sequence[int],
    memory: ActivationMemory,
    kernels: Kernels,
    *,
    te: bool,
    dispatcher: str,
    deterministic: bool = False,
) -> Sequence[PackedGPT]:
    """The chunks of `Model.build`. stages: layers of each stage, in the order of the model."""
    # Megatron forks its random states around every dropout under TP, even of probability 0; the seed changes nothing.
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = transformer_config(
        arch,
        mesh.layout,
        dtype,
        stages,
        memory,
        kernels,
        te=te,
        cp_kernel=mesh.cp_kernel,
        dispatcher=dispatcher,
        deterministic=deterministic,
    )
    final_norm = ModuleSpec(module=TENorm if te else RMSNorm)
    chunks = []
    for index in range(mesh.layout.vpp):
        stage = index if mesh.layout.vpp > 1 else None
        first = get_transformer_layer_offset(config, stage, mesh.pp.rank())
        count = get_num_layers_to_build(config, vp_stage=stage)
        layers = [layer_spec(arch, mesh, first + k, memory, kernels, te=te) for k in range(count)]
        chunk = PackedGPT(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
            vocab_size=padded_vocab_size(arch.vocab_size, mesh.layout.tp),
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage(index),
            post_process=mesh.is_last_stage(index),
            share_embeddings_and_output_weights=arch.tie_embeddings,
            inv_freq=torch.cat([rope.inv_freq(channels) for rope, channels in zip(arch.ropes, arch.rotary_dims)]),
            rotary_factor=arch.rope.cos_sin_factor if arch.latent else 1.0,
            query_scaling=arch.rope.query_scaling,
            embedding_factor=torch.tensor(arch.hidden_size**0.5, dtype=dtype).item() if arch.scaled_embedding else 1.0,
            pg_collection=mesh.megatron,
            vp_stage=stage,
        )
        if arch.critic and mesh.is_last_stage(index):
            chunk.output_layer = ValueHead(arch.hidden_size, mesh.tp)
        _mark_parameters(chunk)
        for parameter in chunk.parameters():  # no buffer: the experts' selection bias keeps its precision
            parameter.data = parameter.data.to(dtype)
        chunks.append(chunk)
    return chunks


def accumulate_in_products(chunks: Sequence[nn.Module]) -> None:
    """Let matrix products themselves add weight gradients to Megatron's buffer (`main_grad`).

    Transformer Engine's layers have a kernel for it, Megatron's take torch's (`patches`). Switched on in the layers,
    and not in the configuration: with that, Megatron's layers ask for apex when they are built. The loss head, whose
    product is that of the output layer, reads the latter's flag (`PackedGPT.output_gradient`).
    """
    for chunk in chunks:
        model = unwrap(chunk)
        heads = [model.output_layer] if model.post_process else []
        for module in [*model.decoder.modules(), *heads]:
            for flag in ("fuse_wgrad_accumulation", "gradient_accumulation_fusion"):
                if hasattr(module, flag):
                    setattr(module, flag, True)


def accumulate_in_embedding(chunks: Sequence[nn.Module]) -> None:
    """Let the embedding add its gradient to Megatron's buffer itself, and the loss head as well where it multiplies by
    the embedding. Where TP ranks do not split it; and not on a GPU, which would add in another order every time."""
    for chunk in chunks:
        model = unwrap(chunk)
        if model.pre_process and model.pg_collection.tp.size() == 1:
            embedding: Any = model.embedding.word_embeddings
            embedding.is_output_matrix = model.post_process and model.share_embeddings_and_output_weights
            embedding.gradient_accumulation_fusion = True
            embedding.weight.zero_out_wgrad = False  # what autograd brings is not to be added, though two may bring it


def _mark_parameters(chunk: PackedGPT) -> None:
    """Tell Megatron what it does not find out itself.

    Which parameters are TP shards: Megatron says so only where it also initialises them; without it the gradient norm
    takes every shard but the first for a duplicate. (Transformer Engine says so always.) Which belong to experts:
    Megatron says so only with ep > 1, but with fewer expert than attention TP ranks the others hold copies whose
    gradients have to be summed as well.
    """
    for name, module in chunk.named_modules():
        sharded = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        if sharded and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)
        if ".mlp.experts." in name:
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = False
                parameter.sequence_parallel = False
                parameter.tensor_model_parallel = True  # TP ranks hold other experts, or copies that are not counted
