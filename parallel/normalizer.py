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

from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.upload import upload

MASK_PLACEMENTS = ("replicated", "sharded")


@dataclass(frozen=True)
class TokenCounts:
    """Integer counts of an optimizer step, on the host: all that any mode divides by.

    Of this rank's samples: tokens_S, valid tokens of each; group_S, its prompt. Over all ranks: tokens; sequences, and
    valid_sequences with a valid token; tokens_P, valid tokens of each prompt, and sequences_P, how many it has. What is
    about prompts is empty where they were not counted.
    """

    tokens_S: Tensor
    group_S: Tensor
    tokens: int
    sequences: int
    valid_sequences: int
    tokens_P: Tensor
    sequences_P: Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "TokenCounts":
        """Of a step of which this rank knows every sequence and counts every token. No collective."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.tensor(lengths, dtype=torch.int64), none, sum(lengths), len(lengths), len(lengths), none, none)


def count_tokens(
    masks: Sequence[Tensor],
    dp_group: dist.ProcessGroup,
    *,
    sp_group: dist.ProcessGroup | None = None,
    group_ids: Sequence[int] | None = None,
    num_groups: int = 0,
    counted: bool = True,
) -> TokenCounts:
    """Count the tokens of the step.

    masks: of each of this rank's samples its 0/1 mask, [T_i]; with sp_group this rank's shard of it.
    group_ids, num_groups: each sample's prompt, in 0..num_groups-1, where num_groups is the same on all ranks; a number
        that no sample of any rank has is no prompt. Without group_ids prompts are not counted. ValueError where one is
        out of range.
    counted: where several ranks of dp_group have the same samples, True on one of them.
    Collectives: one all-reduce over dp_group (before it, one over sp_group if the masks are sharded).
    """
    tokens_S = torch.stack([m.sum(dtype=torch.int64) for m in masks]) if masks else torch.zeros(0, dtype=torch.int64)
    tokens_S = tokens_S.cpu()
    if sp_group is not None:
        whole_S = upload(tokens_S, device_of(sp_group))
        dist.all_reduce(whole_S, group=sp_group)
        tokens_S = whole_S.cpu()
    group_S = torch.as_tensor([] if group_ids is None else group_ids, dtype=torch.int64)
    # Valid tokens and sequences of each prompt.
    of_prompts_2P = torch.zeros((2, 0 if group_ids is None else num_groups), dtype=torch.int64)
    if group_ids is not None:
        outside = [group for group in group_ids if not 0 <= group < num_groups]
        if outside:
            raise ValueError(f"group_ids must be in 0..{num_groups - 1} (num_groups={num_groups}), not {outside[0]}")
        of_prompts_2P.index_add_(1, group_S, torch.stack([tokens_S, torch.ones_like(tokens_S)]))
    totals = torch.stack([tokens_S.sum(), torch.tensor(len(masks)), (tokens_S > 0).sum()])
    counts = upload(torch.cat([totals, of_prompts_2P.flatten()]) * counted, device_of(dp_group))
    dist.all_reduce(counts, group=dp_group)
    counts = counts.cpu()  # the host waits for the device here, once a step
    tokens, sequences, valid_sequences = counts[:3].tolist()
    return TokenCounts(tokens_S, group_S, tokens, sequences, valid_sequences, *counts[3:].view_as(of_prompts_2P))


@dataclass(frozen=True)
class StepCounts:
    """What an optimizer step holds, over all ranks.

    tokens: valid tokens N. sequences, prompts: the denominators S and P (fully masked ones only if they count).
    weight_sum: what the weights of all tokens of the step add up to, in closed form; the canary compares it with the
        sum of the weights that the loss head really consumed.
    """

    tokens: int
    sequences: int
    prompts: int
    weight_sum: float


def token_weights(
    masks: Sequence[Tensor], counts: TokenCounts, aggregation: Aggregation
) -> tuple[list[Tensor], StepCounts]:
    """The weight of every token of this rank's samples, fp64 of the shapes of `masks`, and what they add up to."""
    if aggregation.by_prompt and len(counts.group_S) < len(masks):
        raise ValueError("prompt-mean-token-mean needs group_ids and num_groups")
    counted = aggregation.count_fully_masked
    tokens, tokens_S, tokens_P = counts.tokens, counts.tokens_S, counts.tokens_P
    sequences = counts.sequences if counted else counts.valid_sequences
    valid_prompts = int((tokens_P > 0).sum())
    prompts = int((counts.sequences_P > 0).sum()) if counted else valid_prompts
    length = aggregation.norm_length or 1
    divisor_S = {
        "token-mean": lambda: torch.full_like(tokens_S, tokens),
        "seq-mean-token-mean": lambda: tokens_S * sequences,
        "seq-mean-token-sum": lambda: torch.full_like(tokens_S, sequences),
        "seq-mean-token-sum-norm": lambda: torch.full_like(tokens_S, sequences * length),
        "prompt-mean-token-mean": lambda: tokens_P[counts.group_S] * prompts,
        "sum": lambda: torch.ones_like(tokens_S),
    }[aggregation.mode]()
    weight_S = torch.where(divisor_S > 0, 1.0 / divisor_S.clamp(min=1).to(torch.float64), 0.0)
    weight_sum = {
        "token-mean": float(tokens > 0),
        "seq-mean-token-mean": counts.valid_sequences / max(sequences, 1),
        "seq-mean-token-sum": tokens / max(sequences, 1),
        "seq-mean-token-sum-norm": tokens / max(sequences, 1) / length,
        "prompt-mean-token-mean": valid_prompts / max(prompts, 1),
        "sum": float(tokens),
    }[aggregation.mode]
    weights = [m.to(torch.float64) * w.to(m.device) for m, w in zip(masks, weight_S)]
    return weights, StepCounts(tokens, sequences, prompts if aggregation.by_prompt else 0, weight_sum)


class GlobalLossNormalizer:
    """Turns the masks of an optimizer step into a weight for every token: `count_tokens`, then `token_weights`.

    mode: one of MODES, or an Aggregation, which then says norm_length and count_fully_masked.
    dp_group: the data-parallel group, *without* the sequence-parallel ranks (they hold the same samples and would be
        counted again).
    mask_placement: "replicated" if every sequence-parallel rank passes whole masks; "sharded" if each passes its own
        slice of every sequence, in which case `sp_group` is needed and n_i is first summed over it.
    Raises UserError for an unknown mode or placement, and for what does not go with it.
    """

    def __init__(
        self,
        mode: str | Aggregation,
        dp_group: dist.ProcessGroup,
        mask_placement: str = "replicated",
        *,
        sp_group: dist.ProcessGroup | None = None,
        norm_length: int | None = None,
        count_fully_masked: bool = False,
    ):
        if mask_placement not in MASK_PLACEMENTS:
            raise UserError(f"mask_placement={mask_placement!r} is not one of {', '.join(MASK_PLACEMENTS)}")
        if (mask_placement == "sharded") != (sp_group is not None):
            raise UserError(
                f"mask_placement={mask_placement!r}: sp_group goes with 'sharded' masks, and only with them"
            )
        named = isinstance(mode, str)
        self.aggregation = Aggregation(mode, norm_length, count_fully_masked) if named else mode
        self.dp_group, self.sp_group = dp_group, sp_group

    def weights(
        self,
        masks: Sequence[Tensor],
        group_ids: Sequence[int] | None = None,
        num_groups: int | None = None,
        *,
        counts: TokenCounts | None = None,
    ) -> tuple[list[Tensor], StepCounts]:
        """The weights of this rank's tokens, and the counts of the step.

        masks, group_ids, num_groups, collectives: see `count_tokens`; only prompt-mean-token-mean reads the prompts.
        counts: what `count_tokens` gave for these masks, where several aggregations share it; then nothing is counted.
        """
        if counts is None:
            if self.aggregation.by_prompt and (group_ids is None or num_groups is None):
                raise ValueError("prompt-mean-token-mean needs group_ids and num_groups")
            prompts = {"group_ids": group_ids, "num_groups": num_groups} if self.aggregation.by_prompt else {}
            counts = count_tokens(masks, self.dp_group, sp_group=self.sp_group, **prompts)
        return token_weights(masks, counts, self.aggregation)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors of a collective over `group` must live."""
    return torch.device(torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
