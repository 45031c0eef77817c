"""The most probable tokens over a vocabulary that tensor-parallel ranks share, a few positions' logits at a time.

Shape suffixes as in `loss_head`; K of the most probable tokens, C those that a rank proposes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.loss_head import LowRank, softcapped, unrounded_logits

CHUNK_ELEMENTS = 1 << 24  # of the logits that are in memory at a time


@torch.no_grad()
def most_probable(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    num: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    softcap: float | None = None,
    low_rank: LowRank | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the ids of the `num` most probable tokens at each position, [N, K] int64, and their log-probabilities
    under softmax(logits / temperature), [N, K] fp64; the most probable first, of equal ones the earlier in the
    vocabulary. Without gradients.

    hidden_ND, weight_VD, vocab_size, low_rank: inputs of `vocab_parallel_logprobs`.
    Collectives: one all-gather of [N, 2C + 1] fp64 over tp_group.
    """
    first = tp_group.rank() * weight_VD.shape[0]
    columns = min(max(vocab_size - first, 0), weight_VD.shape[0])
    rows, proposed = max(1, CHUNK_ELEMENTS // weight_VD.shape[0]), min(num, weight_VD.shape[0])
    part = hidden_ND.new_full((len(hidden_ND), 2 * proposed + 1), -torch.inf, dtype=torch.float64)
    for start in range(0, len(hidden_ND) if columns else 0, rows):  # not where only padding is
        chunk = slice(start, start + rows)
        part_M, logits_MV = part[chunk], unrounded_logits(hidden_ND[chunk], weight_VD)
        if low_rank is not None:
            LowRank(low_rank.down_Nr[chunk], low_rank.up_Vr).add_to(logits_MV)
        logits_MV = softcapped(logits_MV, softcap)[:, :columns] / temperature
        ids_MC = _largest(logits_MV, min(proposed, columns))
        part_M[:, 0] = logits_MV.logsumexp(1)
        part_M[:, 1 : 1 + ids_MC.shape[1]] = logits_MV.gather(1, ids_MC)
        part_M[:, 1 + proposed : 1 + proposed + ids_MC.shape[1]] = ids_MC + first
    parts = [torch.empty_like(part) for _ in range(tp_group.size())]
    dist.all_gather(parts, part, group=tp_group)
    gathered = torch.stack(parts)
    total_N = gathered[:, :, 0].logsumexp(0)
    logits_NC, ids_NC = (
        torch.cat([*each], 1) for each in (gathered[:, :, 1 : 1 + proposed], gathered[:, :, 1 + proposed :])
    )
    # Ranks stand in the order of the vocabulary, and so do a rank's own proposals of equal logits.
    order_NK = logits_NC.sort(dim=1, descending=True, stable=True)[1][:, :num]
    return ids_NC.gather(1, order_NK).long(), logits_NC.gather(1, order_NK) - total_N[:, None]


def _largest(logits_MV: Tensor, num: int) -> Tensor:
    """Return the columns of the largest numbers of each row, [M, num], the largest first, of equal ones the first."""
    last_M1 = logits_MV.topk(num, sorted=False)[0].amin(1, keepdim=True)
    above_MV, equal_MV = logits_MV > last_M1, logits_MV == last_M1
    room_M1 = num - above_MV.sum(1, keepdim=True)
    columns_MK = (above_MV | (equal_MV & (equal_MV.cumsum(1) <= room_M1))).nonzero()[:, 1].view(-1, num)
    order_MK = logits_MV.gather(1, columns_MK).sort(dim=1, descending=True, stable=True)[1]
    return columns_MK.gather(1, order_MK)
