"""GlobalLossNormalizer: the only division in the engine.

An aggregation mode *is* a weight for every token, known from integer counts before any forward. With n_i the valid
tokens of sequence i, N their sum, S the number of sequences, P the number of prompts and N_g the tokens of prompt g:

    token-mean               1 / N
    seq-mean-token-mean      1 / (S n_i)
    seq-mean-token-sum       1 / S
    seq-mean-token-sum-norm  1 / (S norm_length)
    prompt-mean-token-mean   1 / (P N_g)
    sum                      1

The loss of a step is then sum(weight * per_token_loss), summed plainly over tokens, micro-batches and ranks. The
derivation, and what goes wrong otherwise, is in docs/normalization.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.errors import UserError

MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
    "sum",
)
MASK_PLACEMENTS = ("replicated", "sharded")


@dataclass(frozen=True)
class Counts:
    """What an optimizer step holds, over all ranks.

    tokens: valid tokens N. sequences, prompts: the denominators S and P (fully masked ones only if they count).
    weight_sum: what the weights of all tokens of the step add up to, in closed form; the canary compares it with the
        sum of the weights that the loss head really consumed.
    """

    tokens: int
    sequences: int
    prompts: int
    weight_sum: float


class GlobalLossNormalizer:
    """Turns the masks of an optimizer step into a weight for every token.

    mode: one of MODES.
    dp_group: the data-parallel group, *without* the sequence-parallel ranks (they hold the same samples and would be
        counted again).
    mask_placement: "replicated" if every sequence-parallel rank passes whole masks; "sharded" if each passes its own
        slice of every sequence, in which case `sp_group` is needed and n_i is first summed over it.
    norm_length: the constant of seq-mean-token-sum-norm, in tokens.
    count_fully_masked: whether a sequence or prompt without a valid token counts in S or P.
    """

    def __init__(
        self,
        mode: str,
        dp_group: dist.ProcessGroup,
        mask_placement: str = "replicated",
        *,
        sp_group: dist.ProcessGroup | None = None,
        norm_length: int | None = None,
        count_fully_masked: bool = False,
    ):
        if mode not in MODES:
            raise UserError(f"loss.aggregation={mode!r} is not one of {', '.join(MODES)}")
        if mask_placement not in MASK_PLACEMENTS:
            raise UserError(f"mask_placement={mask_placement!r} is not one of {', '.join(MASK_PLACEMENTS)}")
        if (mask_placement == "sharded") != (sp_group is not None):
            raise UserError(
                f"mask_placement={mask_placement!r}: sp_group goes with 'sharded' masks, and only with them"
            )
        if (mode == "seq-mean-token-sum-norm") != (norm_length is not None):
            raise UserError(
                f"loss.norm_length={norm_length} goes with loss.aggregation=seq-mean-token-sum-norm, and "
                f"only with it (it is {mode})"
            )
        if norm_length is not None and norm_length <= 0:
            raise UserError(f"loss.norm_length={norm_length} must be a positive number of tokens")
        self.mode = mode
        self.dp_group = dp_group
        self.sp_group = sp_group
        self.norm_length = norm_length
        self.count_fully_masked = count_fully_masked

    def weights(
        self, masks: Sequence[Tensor], group_ids: Sequence[int] | None = None, num_groups: int | None = None
    ) -> tuple[list[Tensor], Counts]:
        """Weights of this rank's tokens.

        masks: for each of this rank's samples of the whole optimizer step, its 0/1 mask, of shape [T_i].
        group_ids, num_groups: each sample's prompt, in 0..num_groups-1, and the number of prompts of the step over all
            ranks; only prompt-mean-token-mean reads them.
        Returns fp64 weights of the shapes of `masks`, and the counts of the step.
        Collectives: one all-reduce over dp_group (before it, one over sp_group if the masks are sharded).
        """
        tokens_S = (
            torch.stack([m.sum(dtype=torch.int64) for m in masks]) if masks else torch.zeros(0, dtype=torch.int64)
        )
        tokens_S = tokens_S.to(_device_of(self.dp_group))
        if self.sp_group is not None:
            dist.all_reduce(tokens_S, group=self.sp_group)
        by_prompt = self.mode == "prompt-mean-token-mean"
        if by_prompt and (group_ids is None or num_groups is None):
            raise ValueError("prompt-mean-token-mean needs group_ids and num_groups")
        num_prompts = num_groups if by_prompt and num_groups is not None else 0
        group_S = torch.as_tensor(group_ids if by_prompt else [], dtype=torch.int64, device=tokens_S.device)
        tokens_P = torch.zeros(num_prompts, dtype=torch.int64, device=tokens_S.device)
        if by_prompt:
            tokens_P.index_add_(0, group_S, tokens_S)

        totals = torch.tensor([0, len(masks), 0], device=tokens_S.device)
        totals[0], totals[2] = tokens_S.sum(), (tokens_S > 0).sum()
        counts = torch.cat([totals, tokens_P])
        dist.all_reduce(counts, group=self.dp_group)

        tokens, all_sequences, valid_sequences = (int(c) for c in counts[:3])
        tokens_P = counts[3:]
        valid_prompts = int((tokens_P > 0).sum())
        sequences = all_sequences if self.count_fully_masked else valid_sequences
        prompts = num_prompts if self.count_fully_masked else valid_prompts
        weight_S = self._weight_of_samples(tokens_S, tokens_P, group_S, tokens, sequences, prompts).cpu()
        weight_sum = {
            "token-mean": float(tokens > 0),
            "seq-mean-token-mean": valid_sequences / max(sequences, 1),
            "seq-mean-token-sum": tokens / max(sequences, 1),
            "seq-mean-token-sum-norm": tokens / max(sequences, 1) / (self.norm_length or 1),
            "prompt-mean-token-mean": valid_prompts / max(prompts, 1),
            "sum": float(tokens),
        }[self.mode]
        weights = [m.to(torch.float64) * w.to(m.device) for m, w in zip(masks, weight_S)]
        return weights, Counts(tokens, sequences, prompts, weight_sum)

    def _weight_of_samples(self, tokens_S, tokens_P, group_S, tokens, sequences, prompts) -> Tensor:
        """The weight of every valid token of each sample, [S] in fp64; 0 where there is nothing to weigh."""
        divisor_S = {
            "token-mean": lambda: torch.full_like(tokens_S, tokens),
            "seq-mean-token-mean": lambda: tokens_S * sequences,
            "seq-mean-token-sum": lambda: torch.full_like(tokens_S, sequences),
            "seq-mean-token-sum-norm": lambda: torch.full_like(tokens_S, sequences * (self.norm_length or 1)),
            "prompt-mean-token-mean": lambda: tokens_P[group_S] * prompts,
            "sum": lambda: torch.ones_like(tokens_S),
        }[self.mode]()
        return torch.where(divisor_S > 0, 1.0 / divisor_S.clamp(min=1).to(torch.float64), 0.0)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors of a collective over `group` must live."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
