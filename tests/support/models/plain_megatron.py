"""Checkpoints of plain Megatron-Core: its own GPTModel of the local spec, saved by its own dist_checkpointing."""

import copy
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.dense_and_experts import NORMS, DenseAndExperts
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.latent import Latent
from isoloss.models.kinds.mappings import ColumnParallel, Vocabulary
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout, Mesh

METADATA = {
    "stacked": {},
    "per-layer": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True},
}

UNTRAINED = ("expert_bias", "layer_scalar")  # buffers of a checkpoint
# Options of `save`, with the world that each takes.
LAYOUTS = {
    "tp2": {"world": 2, "tp": 2, "etp": 2, "vocab_multiple": 37},
    "pp2": {"world": 2, "pp": 2, "vocab_multiple": 74},
    "tp2+pp2, fully parallel": {"world": 4, "tp": 2, "pp": 2, "etp": 2, "fully_parallel": True, "vocab_multiple": 37},
    "tp2+dp2, fully parallel": {"world": 4, "tp": 2, "fully_parallel": True, "vocab_multiple": 37},
}


def experts_apart(architecture: str) -> dict:
    """Options of `save` for a model with experts on different ranks, each of them sharded where Megatron can."""
    if architecture == "gpt-oss":  # it shards no expert with a bias
        return {"world": 2, "tp": 2, "ep": 2}
    return {"world": 4, "tp": 2, "ep": 2, "etp": 2}


def save(
    hf: Path,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    style: str = "stacked",
    fully_parallel: bool = False,
    vocab_multiple: int = 128,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
) -> list[str]:
    """Build the model of the Hugging Face folder `hf` at this layout, fill it and save it; returns its parameters."""
    layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp).with_world(dist.get_world_size())
    mesh = Mesh.create(layout)
    arch = read_architecture(hf)
    padded = -(-arch.vocab_size // (vocab_multiple * tp)) * vocab_multiple * tp
    model = build(arch, mesh, padded).to(dtype)
    names = fill(model, arch, hf, mesh, padded)
    metadata = {**METADATA[style], "dp_cp_group": mesh.dp_context}
    strategy = get_default_save_sharded_strategy("torch_dist")
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, mesh.dp)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = {"model": model.sharded_state_dict(prefix=prefix, metadata=metadata), "iteration": 7}
    dist_checkpointing.save(state, str(folder), strategy)
    return names


# Megatron's local layers in its own place for them; its spec of these layers is Transformer Engine's only.
GATED_DELTA_NET = ModuleSpec(
    module=gated_delta_net.GatedDeltaNet,
    submodules=gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    ),
)


class LatentCoreAttention(DotProductAttention):
    """The local core attention lacks the arguments that Megatron's latent attention gives it; it has no weights."""

    def __init__(self, *args, k_channels: int = 0, v_channels: int = 0, **kwargs):
        super().__init__(*args, **kwargs)


class DifferingAttention(SelfAttention):
    """Megatron has one kind of attention in all layers; its own projections and core, in the sizes of each layer."""

    def __init__(self, config, submodules, layer_number, *, arch: Architecture, pg_collection=None, **options):
        config, kind = copy.copy(config), arch.layers[layer_number - 1].attention
        config.num_query_groups, config.kv_channels = kind.kv_heads, kind.head_dim
        config.softmax_type = "learnable" if kind.sinks else "vanilla"
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **options)
        values = kind.heads * kind.value_dim
        rows = self.query_projection_size + self.kv_projection_size
        rows += 0 if kind.keys_as_values else kind.kv_heads * kind.value_dim
        options = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        self.linear_qkv = ColumnParallelLinear(arch.hidden_size, rows, gather_output=False, **options)
        self.linear_proj = RowParallelLinear(
            values, arch.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )


class SandwichLayer(TransformerLayer):
    """Megatron has no norms behind attention and MLP, and no scalar of a layer; their places in a checkpoint."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            setattr(self, name, WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon))
        self.register_buffer("layer_scalar", torch.empty(1))


class DenseAndExpertLayer(SandwichLayer):
    """Megatron has one norm before its experts and its shared expert, and no scales in a router; their places."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.pre_mlp_layernorm = nn.Identity()
        for name in NORMS:
            setattr(self.mlp, name, WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon))
        self.mlp.router.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp.router.per_expert_scale = nn.Parameter(torch.empty(config.num_moe_experts))


class JointNorm(nn.Module):
    """Megatron has no norm over all heads together; its place in a checkpoint, with each TP rank's share."""

    def __init__(self, config, hidden_size: int, eps: float, *, heads: int, tp_group):
        super().__init__()
        self.weight, self.tp_group = nn.Parameter(torch.empty(heads * hidden_size // tp_group.size())), tp_group

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


def build(arch: Architecture, mesh: Mesh, padded_vocab: int) -> GPTModel:
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    moe, layout, attention = arch.experts, mesh.layout, arch.attentions[0]
    latent = attention if isinstance(attention, Latent) else None
    delta = next((kind for kind in arch.attentions if isinstance(kind, GatedDelta)), None)
    joint = not latent and attention.qk_norm == "joint"
    biased = not latent and attention.output_bias
    width = next((layer.mlp.width for layer in arch.layers if isinstance(layer.mlp, Dense)), None)
    options = {
        "num_layers": arch.num_layers, "hidden_size": arch.hidden_size, "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads, "kv_channels": attention.head_dim, "ffn_hidden_size": width,
        "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": biased,
        "add_qkv_bias": not latent and attention.qkv_bias, "qk_layernorm": bool(latent or attention.qk_norm),
        "use_cpu_initialization": True,
        "activation_func": nn.functional.silu, "bias_activation_fusion": False,
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.etp,
        "pipeline_dtype": torch.float32,
        "softmax_type": "learnable" if any(kind.sinks for kind in arch.attentions) else "vanilla",
    }  # fmt: skip
    if moe:
        options |= {
            "num_moe_experts": moe.count, "moe_router_topk": moe.top_k, "moe_ffn_hidden_size": moe.intermediate_size,
            "moe_router_score_function": moe.score, "moe_router_enable_expert_bias": moe.selection_bias,
            "moe_shared_expert_intermediate_size": moe.shared_size or None,
            "moe_shared_expert_gate": moe.shared_gate, "moe_token_dispatcher_type": "allgather",
        }  # fmt: skip
        if arch.layers_differ:  # a list means that they do
            options["moe_layer_freq"] = [int(sparse) for sparse in arch.sparse]
    elif arch.layers_differ:
        options["linear_attention_freq"] = [0] * arch.num_layers  # a list means that they do
    if latent:
        options |= {
            "multi_latent_attention": True, "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim, "qk_pos_emb_head_dim": latent.rope_dim, "v_head_dim": latent.value_dim,
        }  # fmt: skip
        del options["kv_channels"], options["num_query_groups"]
    if delta:
        options |= {
            "linear_attention_freq": [int(linear) for linear in arch.linear],
            "linear_conv_kernel_dim": delta.conv_width, "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim, "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads, "attention_output_gate": True,
        }  # fmt: skip
    config = (MLATransformerConfig if latent else TransformerConfig)(**options)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    if joint:
        for layer in spec.layer_specs:
            parts = layer.submodules.self_attention.submodules
            for slot, heads in (("q_layernorm", attention.heads), ("k_layernorm", attention.kv_heads)):
                setattr(parts, slot, ModuleSpec(JointNorm, params={"heads": heads, "tp_group": mesh.tp}))
    if isinstance(attention, Asymmetric):
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = DifferingAttention
            layer.submodules.self_attention.params["arch"] = arch
    if arch.layers[0].sandwich:
        for layer in spec.layer_specs:
            layer.module = DenseAndExpertLayer if isinstance(moe, DenseAndExperts) else SandwichLayer
    if delta:
        first = get_transformer_layer_offset(config, pp_rank=mesh.pp.rank())
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]  # layers of a kind share one
        for layer, linear in zip(spec.layer_specs, arch.linear[first:]):
            if linear:
                layer.submodules.self_attention = GATED_DELTA_NET
                layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    # Megatron takes Transformer Engine for present as soon as a part of it that needs none imports.
    # Its GatedDeltaNet is only built without fla's kernels, and saved.
    with (
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),
        mock.patch.object(gated_delta_net, "HAVE_FLA", True),
    ):
        return GPTModel(
            config,
            spec,
            vocab_size=padded_vocab,
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage(0),
            post_process=mesh.is_last_stage(0),
            share_embeddings_and_output_weights=arch.tie_embeddings,
            position_embedding_type="rope",
        )


@torch.no_grad()
def fill(model: GPTModel, arch: Architecture, hf: Path, mesh: Mesh, padded_vocab: int) -> list[str]:
    """Give every parameter and buffer its shard of the weight of its global name. Rows that pad the vocabulary are 9,
    so that none gets lost among zeros."""
    weights, reader = {weight.name: weight for weight in weight_map(arch)}, HFReader(hf)
    offset = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
    local = arch.experts.count // mesh.layout.ep if arch.experts else 0
    first_expert = local * mesh.ep.rank()
    filled = []
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(UNTRAINED)}
    for own, parameter in {**dict(model.named_parameters()), **buffers}.items():
        name, parts = own, own.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(offset[int(parts[2])])
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(first_expert + int(parts[at]))
            name = ".".join(parts)
        if name == "output_layer.weight" and arch.tie_embeddings:
            name = "embedding.word_embeddings.weight"
        weight = weights[name]
        whole = reader.whole(weight).to(parameter.dtype)
        if isinstance(weight.mapping, Vocabulary):
            padding = whole.new_full((padded_vocab - len(whole), whole.shape[1]), 9.0)
            shard = torch.cat([whole, padding]).chunk(mesh.layout.tp)[mesh.tp.rank()]
        elif weight.expert is not None:
            shard = weight.mapping.shard(whole, mesh.layout.etp, mesh.etp.rank())
        else:  # the local spec shards what Transformer Engine's replicates
            mapping = ColumnParallel() if "_down_proj" in name else weight.mapping
            shard = mapping.shard(whole, mesh.layout.tp, mesh.tp.rank())
        parameter.copy_(shard)
        filled.append(name)
    return filled


def save_as(hf: Path, folder: Path, options: dict) -> list[str]:
    """`save`, for a pool, which hands on no keywords."""
    return save(hf, folder, **options)
