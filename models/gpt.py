"""Architecture + mesh -> the Megatron-Core model chunks of this rank.

Megatron's own layers, with three pieces of ours in their slots: a sequence-parallel-aware RMSNorm in the parameters'
precision, packed Ulysses attention, and a GPTModel that looks rotary angles up by position id and ends at the last
hidden states (the loss head visits labelled positions only, see `isoloss.parallel.vocab`).
"""

from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from isoloss.models.architecture import Architecture
from isoloss.models.forms import padded_vocab_size
from isoloss.parallel import Mesh, UserError
from isoloss.parallel.attention import PackedAttention, PackedRow
from isoloss.parallel.collectives import gather_rows, sum_gradient
from isoloss.parallel.vocab import vocab_parallel_logprobs


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) in Megatron's norm slots.

    The weight of a norm inside a sequence-parallel region sees only this TP rank's tokens; the attribute asks
    Megatron's finalize step to sum its gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        del unused
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wide):
        ctx.save_for_backward(wide)
        gate, up = wide.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (wide,) = ctx.saved_tensors
        gate, up = wide.chunk(2, dim=-1)
        grad_wide = torch.empty_like(wide)
        grad_gate, grad_up = grad_wide.chunk(2, dim=-1)
        torch.mul(silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_wide


def swiglu(wide: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202), gate and up side by side in the last dimension.

    Megatron's unfused one also adds a constant 0, keeps silu(gate) for the backward, and joins the two halves of the
    gradient by a copy. The result is the same, bit by bit.
    """
    return _SwiGLU.apply(wide)


class PackedGPT(GPTModel):
    """GPTModel over one packed row a micro-batch, from token ids to the last hidden states."""

    def __init__(self, *args, inv_freq: Tensor, **kwargs):
        super().__init__(*args, position_embedding_type="none", **kwargs)
        # Not a buffer: it must stay fp32 when the module is cast, and it is not part of a checkpoint.
        self.inv_freq = inv_freq.to(torch.cuda.current_device())

    def _preprocess(self, input_ids, position_ids, *args, **kwargs):
        outputs = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        angles_RD = torch.outer(position_ids[0].to(torch.float32), self.inv_freq).repeat(1, 2)
        return (outputs[0], angles_RD[:, None, None], *outputs[2:])

    def _postprocess(self, hidden_states, *args, **kwargs):
        del args, kwargs
        return hidden_states

    def output_weight(self) -> Tensor:
        """This TP rank's rows of the output matrix (the embedding where they are tied)."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None, "only the last pipeline stage has an output matrix"
        return weight


def forward_row(chunk: nn.Module, tokens_R: Tensor, positions_R: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Output of a model chunk for this rank's slice of a packed row: [R (/tp if sequence-parallel), 1, hidden]."""
    return chunk(
        input_ids=tokens_R[None],
        position_ids=positions_R[None],
        attention_mask=None,
        packed_seq_params=PackedRow(lengths=lengths),
    )


def labelled_logprobs(
    chunk: nn.Module,
    hidden: Tensor,
    labelled_N: Tensor,
    targets_N: Tensor,
    arch: Architecture,
    mesh: Mesh,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the targets (and the entropy) at the labelled positions of this rank's slice, [N].

    hidden: the last stage's output; labelled_N: indices into the slice; targets_N: the tokens to be predicted there.
    Collectives over TP: a gather of the slice if it is sequence-parallel, and those of `vocab_parallel_logprobs`.
    """
    if mesh.layout.sequence_parallel:
        labelled_ND = gather_rows(hidden.squeeze(1), mesh.tp)[labelled_N]
    else:
        labelled_ND = sum_gradient(hidden.squeeze(1)[labelled_N], mesh.tp)
    weight_VD = unwrap(chunk).output_weight()
    return vocab_parallel_logprobs(
        labelled_ND, weight_VD, targets_N, arch.vocab_size, mesh.tp, with_entropy=with_entropy
    )


def unwrap(chunk: nn.Module) -> PackedGPT:
    """The model inside Megatron's DistributedDataParallel wrapper, or the model itself."""
    model = chunk if isinstance(chunk, PackedGPT) else chunk.module
    assert isinstance(model, PackedGPT)
    return model


def check_layout(arch: Architecture, mesh_layout) -> None:
    """Refuse a layout that this architecture cannot be split by. Raises UserError; needs no process group."""
    layout = mesh_layout
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
        use_te_activation_func=True,  # the slot that `layer_spec` fills with `swiglu`; nothing of Transformer Engine
        add_bias_linear=False,
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
    )


def layer_spec(arch: Architecture, mesh: Mesh):
    """Megatron's local layer spec with our norm and attention in it."""
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.mlp.submodules.activation_func = swiglu
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = partial(PackedAttention, group=mesh.ulysses)
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def build_model(arch: Architecture, mesh: Mesh, dtype: torch.dtype) -> Sequence[PackedGPT]:
    """This rank's model chunks (one; `vpp` of them in an interleaved pipeline), with uninitialised weights.

    Collectives: with tied embeddings and a pipeline, Megatron exchanges the embedding between first and last stage.
    """
    # Megatron forks its random states around every dropout under TP, even of probability 0; the seed changes nothing.
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = transformer_config(arch, mesh, dtype)
    spec = layer_spec(arch, mesh)
    chunks = []
    for index in range(mesh.layout.vpp):
        stage = index if mesh.layout.vpp > 1 else None
        layers = [spec] * get_num_layers_to_build(config, vp_stage=stage)
        chunk = PackedGPT(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=ModuleSpec(module=RMSNorm)),
            vocab_size=padded_vocab_size(arch.vocab_size, mesh.layout.tp),
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage(index),
            post_process=mesh.is_last_stage(index),
            share_embeddings_and_output_weights=arch.tie_embeddings,
            inv_freq=arch.rope.inv_freq(arch.head_dim),
            pg_collection=mesh.megatron,
            vp_stage=stage,
        )
        _mark_sharded_parameters(chunk)
        chunks.append(chunk.to(dtype))
    return chunks


def _mark_sharded_parameters(chunk: PackedGPT) -> None:
    """Say which parameters are TP shards. Megatron does so only where it also initialises them; without it the
    gradient norm takes every shard but the first for a duplicate."""
    for module in chunk.modules():
        dim = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}.get(type(module))
        if dim is not None and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
