"""Transformer Engine's attention over packed rows, with its kernels for rows that are split over context ranks.

Only imported where Transformer Engine is: without it Megatron-Core has no class to derive from.

Shape suffixes as in `isoloss.parallel.attention`.
"""

import copy
from functools import lru_cache
from itertools import accumulate

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isoloss.parallel.attention import PackedRow
from isoloss.parallel.runtime.upload import upload


class FusedAttention(TEDotProductAttention):
    """Megatron-Core's `core_attention` slot. Which kernel exchanges tokens is `config.cp_comm_type`.

    scale: factor of the logits.
    window: number of tokens that a token sees, itself included; None: all before it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        scale: float,
        window: int | None,
        softmax_scale: float | None = None,
        **options,
    ):
        del softmax_scale  # the model's configuration has none: the scale belongs to the layer
        config = copy.copy(config)
        config.window_size = None if window is None else (window - 1, 0)
        super().__init__(config, layer_number, softmax_scale=scale, **options)

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> Tensor:
        """query: [R, 1, H, D]; key and value: [R, 1, K, D]. Returns [R, 1, H*D].

        R are the tokens that `own_tokens` gives this context rank. Collectives: the kernel's, over the context ranks.
        """
        assert isinstance(packed_seq_params, PackedRow) and attention_mask is None and attention_bias is None
        del attn_mask_type
        out = super().forward(
            packed_seq_params.scaled(query.squeeze(1)),
            key.squeeze(1),
            value.squeeze(1),
            None,
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=packed_documents(packed_seq_params.lengths, query.device),
        )
        return out.reshape(out.shape[0], 1, -1)


@lru_cache(maxsize=16)
def packed_documents(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Return the starts of the documents of a *whole* row, on the device; all layers of a micro-batch share them.

    Padding counts as the end of its document, which under a causal mask no token before it sees. So there is no padding
    between documents, with which Transformer Engine would rule out FlashAttention.
    """
    starts = upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
