"""GlobalLossNormalizer: the only division in the engine.

An aggregation mode *is* a weight for every token, known from integer counts before any forward. With n_i the valid
tokens of sequence i on all ranks, N their sum, N_g those of prompt g, S and P the sequences and prompts that count:

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
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.upload import upload

MASK_PLACEMENTS = ("replicated", "sharded")


@dataclass(frozen=True)
class TokenCounts:
    """Integer counts of an optimizer step over all ranks, on the host, by which the modes divide.

    tokens_S: valid tokens (mask 1) of the whole sequence of each own sample, on all ranks. group_S: its prompt.
    tokens: valid tokens. sequences: number of sequences. valid_sequences: number with a valid token.
    tokens_P, samples_P: valid tokens and samples of each prompt; these and group_S are empty where prompts were not
        counted.
    owned_Q: tokens of each sequence, targets or not; empty where they were not counted.
    """

    tokens_S: Tensor
    group_S: Tensor
    tokens: int
    sequences: int
    valid_sequences: int
    tokens_P: Tensor
    samples_P: Tensor
    owned_Q: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "TokenCounts":
        """Count a step of which this rank knows every sequence, and in which every token is valid. No collective."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.tensor(lengths, dtype=torch.int64), none, sum(lengths), len(lengths), len(lengths), none, none)


@dataclass(frozen=True)
class Ids:
    """The prompt, or the sequence, of each of this rank's samples.

    kind: "group" for prompts, "sequence".
    number_S: numbers in 0..count-1, where `count` is the same on all ranks; a number without samples on any rank is
        ignored. ValueError where one is out of range.
    """

    kind: str
    number_S: Sequence[int]
    count: int

    def __post_init__(self):
        outside = [number for number in self.number_S if not 0 <= number < self.count]
        if outside:
            kind, last = self.kind, self.count - 1
            raise ValueError(f"{kind}_ids must be in 0..{last} (num_{kind}s={self.count}), not {outside[0]}")

    def totals(self, tokens_S: Tensor) -> Tensor:
        """Count this rank's valid tokens and samples by number, [2, count]."""
        totals = torch.zeros((2, self.count), dtype=torch.int64)
        return totals.index_add_(
            1, torch.tensor(self.number_S, dtype=torch.int64), torch.stack([tokens_S, torch.ones_like(tokens_S)])
        )


def count_tokens(
    masks: Sequence[Tensor],
    dp_group: dist.ProcessGroup,
    *,
    sp_group: dist.ProcessGroup | None = None,
    prompts: Ids | None = None,
    sequences: Ids | None = None,
    owned: Sequence[int] | None = None,
    counted: bool = True,
) -> TokenCounts:
    """Count the tokens of the step.

    masks: the 0/1 mask of each of this rank's samples, [T_i]; with sp_group this rank's shard of it.
    prompts: the prompt of each sample. None: prompts are not counted.
    sequences: the sequence of each sample, whose samples may lie on several ranks. None: each is a sequence.
    owned: tokens of each sample, targets or not, that count for its sequence; None: they are not counted.
    counted: whether this rank is counted; True on one of the ranks of dp_group with the same samples.
    Collectives: one all-reduce over dp_group (before it, one over sp_group if the masks are sharded).
    """
    tokens_S = torch.stack([m.sum(dtype=torch.int64) for m in masks]) if masks else torch.zeros(0, dtype=torch.int64)
    tokens_S = tokens_S.cpu()
    if sp_group is not None:
        whole_S = upload(tokens_S, device_of(sp_group))
        dist.all_reduce(whole_S, group=sp_group)
        tokens_S = whole_S.cpu()
    ids = [each for each in (prompts, sequences) if each is not None]
    own = torch.stack([tokens_S.sum(), torch.tensor(len(masks)), (tokens_S > 0).sum()])
    own = torch.cat([own, *(each.totals(tokens_S).flatten() for each in ids)])
    if sequences is not None and owned is not None:
        own = torch.cat([own, sequences.totals(torch.tensor(owned, dtype=torch.int64))[0]])
    counts = upload(own * counted, device_of(dp_group))
    dist.all_reduce(counts, group=dp_group)
    counts = counts.cpu()  # the host waits for the device here, once a step
    sizes = [3, *(2 * each.count for each in ids)]
    totals, *by_id, owned_Q = counts.split([*sizes, len(counts) - sum(sizes)])
    tokens, num_sequences, valid_sequences = totals.tolist()
    none = torch.zeros(0, dtype=torch.int64)
    group_S, tokens_P, samples_P = none, none, none
    if prompts is not None:
        group_S = torch.tensor(prompts.number_S, dtype=torch.int64)
        tokens_P, samples_P = by_id[0].view(2, -1)
    if sequences is not None:
        tokens_Q, samples_Q = by_id[-1].view(2, -1)
        tokens_S = tokens_Q[torch.tensor(sequences.number_S, dtype=torch.int64)]
        num_sequences, valid_sequences = int((samples_Q > 0).sum()), int((tokens_Q > 0).sum())
    return TokenCounts(tokens_S, group_S, tokens, num_sequences, valid_sequences, tokens_P, samples_P, owned_Q)


@dataclass(frozen=True)
class StepCounts:
    """The counts of an optimizer step that one aggregation uses, over all ranks.

    tokens: valid tokens N. sequences, prompts: the denominators S and P (fully masked ones only if they count).
    weight_sum: sum of the weights of all tokens of the step, in closed form; the canary compares it with the sum of
        the weights that the loss head really consumed.
    """

    tokens: int
    sequences: int
    prompts: int
    weight_sum: float


def token_weights(
    masks: Sequence[Tensor], counts: TokenCounts, aggregation: Aggregation
) -> tuple[list[Tensor], StepCounts]:
    """Return the weight of every token of this rank's samples, fp64, 0 where masked, and the step's counts."""
    if aggregation.by_prompt and len(counts.group_S) < len(masks):
        raise ValueError("prompt-mean-token-mean needs the prompts that samples belong to")
    counted = aggregation.count_fully_masked
    tokens, tokens_S, tokens_P = counts.tokens, counts.tokens_S, counts.tokens_P
    sequences = counts.sequences if counted else counts.valid_sequences
    valid_prompts = int((tokens_P > 0).sum())
    prompts = int((counts.samples_P > 0).sum()) if counted else valid_prompts
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
    """Turn the masks of an optimizer step into a weight for every token: `count_tokens`, then `token_weights`.

    mode: one of MODES, or an Aggregation, which then says norm_length and count_fully_masked.
    dp_group: the data-parallel group, *without* the sequence-parallel ranks (they hold the same samples and would be
        counted again).
    mask_placement: "replicated" if every sequence-parallel rank passes whole masks; "sharded" if each passes its own
        slice of every sequence, in which case `sp_group` is needed and n_i is first summed over it.
    Raises UserError for an unknown mode or placement, and for arguments that do not go with it.
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
        sequence_ids: Sequence[int] | None = None,
        num_sequences: int | None = None,
    ) -> tuple[list[Tensor], StepCounts]:
        """Return the weights of this rank's tokens, and the counts of the step.

        group_ids, num_groups: the prompt of each sample, see `Ids`; only prompt-mean-token-mean reads them.
        sequence_ids, num_sequences: the sequence of each sample, likewise, where some are cut into several samples.
        masks, collectives: see `count_tokens`.
        """
        prompts = sequences = None
        if self.aggregation.by_prompt:
            prompts = _ids("group", group_ids, num_groups, "prompt-mean-token-mean")
        if sequence_ids is not None or num_sequences is not None:
            sequences = _ids("sequence", sequence_ids, num_sequences, "a sequence of several samples")
        counts = count_tokens(masks, self.dp_group, sp_group=self.sp_group, prompts=prompts, sequences=sequences)
        return token_weights(masks, counts, self.aggregation)


def _ids(kind: str, number_S: Sequence[int] | None, count: int | None, reader: str) -> Ids:
    if number_S is None or count is None:
        raise ValueError(f"{reader} needs {kind}_ids and num_{kind}s")
    return Ids(kind, number_S, count)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which tensors of a collective over `group` must be."""
    return torch.device(torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
