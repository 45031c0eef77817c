"""Architecture + mesh -> the Megatron-Core model chunks of this rank.

Megatron's own layers or Transformer Engine's (`te`), with our activation, attention and router in their slots.
"""

# Megatron hangs attributes on parameters, and types the submodules of a layer as object.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn.functional import silu

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.dense_and_experts import DenseAndExperts
from isoloss.models.kinds.experts import Experts
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.grouped_query import GatedQuery, GroupedQuery
from isoloss.models.kinds.kind import Kind
from isoloss.models.kinds.latent import Latent
from isoloss.models.kinds.layer import Layer
from isoloss.models.kinds.mappings import padded_vocab_size
from isoloss.models.mcore.gpt import PackedGPT, unwrap
from isoloss.models.mcore.layer_config import BuildOptions, LayerConfig
from isoloss.models.mcore.layers.asymmetric_attention import AsymmetricAttention
from isoloss.models.mcore.layers.decoder_layer import DecoderLayer
from isoloss.models.mcore.layers.dense_mlp import DenseMLP
from isoloss.models.mcore.layers.gated_delta_net import GatedDeltaNet
from isoloss.models.mcore.layers.grouped_attention import GatedAttention, GroupedAttention
from isoloss.models.mcore.layers.latent_attention import LatentAttention
from isoloss.models.mcore.layers.norm import RMSNorm, norm_class
from isoloss.models.mcore.layers.residual_norm import ResidualNorm
from isoloss.models.mcore.layers.value_head import ValueHead
from isoloss.models.mcore.moe.dense_and_experts import DenseAndExpertLayer
from isoloss.models.mcore.moe.experts import ExpertLayer
from isoloss.models.mcore.patches import (
    accumulate_without_apex,
    embed_into_main_grad,
    multiply_by_onednn,
    multiply_with_adapters,
    recompute_by_copying,
    recompute_without_transformer_engine,
    rotate_by_table,
)
from isoloss.models.mcore.stages import pipeline_layout
from isoloss.parallel import Layout, Mesh

recompute_without_transformer_engine()
recompute_by_copying()
rotate_by_table()
accumulate_without_apex()
embed_into_main_grad()
multiply_by_onednn()
multiply_with_adapters()


# The module that computes each kind, and puts itself into the slots of Megatron's layer.
MODULES: Mapping[type[Kind], Any] = {
    GroupedQuery: GroupedAttention,
    GatedQuery: GatedAttention,
    Asymmetric: AsymmetricAttention,
    Latent: LatentAttention,
    GatedDelta: GatedDeltaNet,
    Dense: DenseMLP,
    Experts: ExpertLayer,
    DenseAndExperts: DenseAndExpertLayer,
}


def layer_spec(layer: Layer, mesh: Mesh, options: BuildOptions) -> ModuleSpec:
    """Return Megatron's spec of a layer, local with our norm or of Transformer Engine's modules, which own the norm
    before them, with the module of each of its kinds."""
    spec = options.megatron_layer(layer.mlp.experts.count if layer.mlp.experts else None)
    spec.module, spec.params = DecoderLayer, {"description": layer}
    slots = spec.submodules
    if not options.te:
        slots.input_layernorm = RMSNorm
        slots.pre_mlp_layernorm = ResidualNorm if options.kernels.residual_norm else RMSNorm
    slots.sharded_state_dict_keys_map = dict(layer.fused_norms())
    for kind in (layer.attention, layer.mlp):
        MODULES[type(kind)].fill(slots, kind, mesh, options)
    return spec


def transformer_config(
    arch: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    stages: Sequence[int],
    options: BuildOptions,
    cp_kernel: str = "isoloss",
) -> LayerConfig:
    """Return Megatron's configuration of this model on this layout. Dropout is 0: it would break the promise."""
    return LayerConfig(
        kernels=options.kernels,
        ropes=arch.ropes,
        layernorm_zero_centered_gamma=arch.zero_centered_norm,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        use_te_activation_func=True,  # the slot that every MLP fills; nothing of Transformer Engine
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always read or generated by name, so that they are the same in every layout.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Plain sums everywhere: the normalizer's weights hold the only division (docs/normalization.md).
        calculate_per_token_loss=True,
        deterministic_mode=options.deterministic,
        # Megatron's fusions are off by default, and stay so.
        **_layers(arch, layout, options),
        **_parallelism(layout, stages, cp_kernel),
        **options.memory.settings(),
    )


def _layers(arch: Architecture, layout: Layout, options: BuildOptions) -> dict[str, Any]:
    """Sizes of the layers. Where they differ, Megatron is given one of them and reads no other: what differs is in its
    slots. It names a checkpoint's tensors by `linear_attention_freq` and `moe_layer_freq`: a list means that layers
    differ."""
    settings = {"num_layers": arch.num_layers, "hidden_size": arch.hidden_size, "add_bias_linear": False}
    settings |= arch.attentions[0].settings()
    for mlp in arch.mlps:
        settings |= mlp.settings()
    if arch.layers_differ and (any(arch.linear) or not arch.experts):
        settings["linear_attention_freq"] = [int(linear) for linear in arch.linear]
    if arch.experts:
        settings |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.etp}
        settings["moe_layer_freq"] = [int(sparse) for sparse in arch.sparse] if arch.layers_differ else 1
        # Transformer Engine's permutation adds a token's experts up in a fixed order, and not by atomic additions.
        settings |= {"moe_grouped_gemm": options.te, "moe_permute_fusion": options.te}
    if options.dispatcher == "alltoall":
        return settings | {"moe_token_dispatcher_type": "alltoall"}
    return settings | {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": options.dispatcher}


def _parallelism(layout: Layout, stages: Sequence[int], cp_kernel: str) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": pipeline_layout(stages) if layout.pp > 1 else None,
        "context_parallel_size": layout.context,
        "cp_comm_type": None if cp_kernel == "isoloss" else cp_kernel,
        "sequence_parallel": layout.sequence_parallel,
        # Packed rows differ in length, so stages ask for the shape of every message, which `parallel.schedule.Messages`
        # knows; that path refuses the default dispatcher.
        "variable_seq_lengths": True,
        # With pp=2 and batched messages, interleaved stages confuse "previous" and "next" between the same two ranks,
        # silently; overlapped messages are exact.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # The host need not wait as well. A batch's `wait()` lets the stream wait, since pytorch/pytorch#82450 for all
        # its messages, and on that stream their tensors are made, used, freed and their memory used again.
        "batch_p2p_sync": False,
    }


def build_chunks(
    arch: Architecture, mesh: Mesh, dtype: torch.dtype, stages: Sequence[int], options: BuildOptions
) -> Sequence[PackedGPT]:
    """Build the chunks of `Model.build`. stages: layers of each stage, in the order of the model."""
    # Megatron forks its random states around every dropout under TP, even of probability 0; the seed changes nothing.
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = transformer_config(arch, mesh.layout, dtype, stages, options, mesh.cp_kernel)
    final_norm = ModuleSpec(module=norm_class(options))
    chunks = []
    for index in range(mesh.layout.vpp):
        stage = index if mesh.layout.vpp > 1 else None
        first = get_transformer_layer_offset(config, stage, mesh.pp.rank())
        count = get_num_layers_to_build(config, vp_stage=stage)
        layers = [layer_spec(layer, mesh, options) for layer in arch.layers[first : first + count]]
        chunk = PackedGPT(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
            vocab_size=padded_vocab_size(arch.vocab_size, mesh.layout.tp),
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage(index),
            post_process=mesh.is_last_stage(index),
            share_embeddings_and_output_weights=arch.tie_embeddings,
            rotary_factor=arch.attentions[0].rotary_factor,
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
    """Set the attributes of parameters that Megatron leaves unset.

    Megatron marks TP shards only where it also initialises them; in unmarked ones the gradient norm takes every shard
    but the first for a duplicate. (Transformer Engine always marks them.) It marks parameters of experts only with
    ep > 1, but with fewer expert than attention TP ranks the others hold copies whose gradients have to be summed as
    well.
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
