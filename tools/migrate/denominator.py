"""Describe what a trainer divides its loss by: in words, and as the weight of a token.

A loss that sums per-token terms and divides is a weight per token. Two trainers compute the same loss if the weights
are equal on every step, for every division into micro-batches and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scope = Literal["step", "micro-batch", "sample share", "generated batch", "rank"]

MODES = {
    "token-mean": "the sum over target tokens divided by their number",
    "seq-mean-token-mean": "the mean over sequences of each one's mean over its target tokens",
    "seq-mean-token-sum": "the sum over target tokens divided by the number of sequences",
    "seq-mean-token-sum-norm": "the sum over target tokens divided by the number of sequences x {length} tokens",
    "prompt-mean-token-mean": "the mean over prompts of each one's mean over the target tokens of its sequences",
    "sum": "the sum over target tokens, divided by nothing",
}
SCOPES = {
    "step": "over the whole optimizer step: all its micro-batches, on all ranks",
    "micro-batch": "within each micro-batch of each rank; then the plain mean of these means over micro-batches and "
    "ranks, however many tokens each has",
    "sample share": "within each micro-batch of each rank; then these means are added up, each weighted by its share "
    "of the samples of the optimizer step",
    "rank": "over the micro-batches of an optimizer step on each rank; then the plain mean of these means over ranks, "
    "however many tokens each has",
    "generated batch": "with the target tokens of the whole generated batch, all the optimizer steps that it feeds, as "
    "the denominator of each step",
}
# Lengths of four sequences in two micro-batches, for the example of a report.
EXAMPLE = ((100, 300), (500, 700))


@dataclass(frozen=True)
class Denominator:
    """The denominator of a loss.

    mode: isoloss's name for the aggregation. scope: the group of sequences that is counted.
    length: the constant of seq-mean-token-sum-norm. count_fully_masked: True if means over sequences count those
    without a target. masked_is_a_token: True if token means count such a sequence as one token.
    steps: number of optimizer steps that a generated batch feeds. own_loss: True for a per-token loss that isoloss
    lacks, whose value cannot be compared.
    """

    mode: str
    scope: Scope = "step"
    length: int | None = None
    count_fully_masked: bool = False
    masked_is_a_token: bool = False
    steps: int = 1
    own_loss: bool = False

    def words(self) -> str:
        text = f"{MODES[self.mode].format(length=self.length)}, {SCOPES[self.scope]}"
        if "seq" in self.mode and self.count_fully_masked:
            text += "; sequences without a target count"
        if self.masked_is_a_token:
            text += "; a sequence without a target counts as one token"
        return text

    def differs(self, ours: "Denominator") -> list[str]:
        """Return the differences from the weights of `ours`; none if the loss is the same number on every step."""
        differences = []
        if self.own_loss:
            differences.append(
                "the per-token loss is not one of isoloss's: the denominators below are all that is compared"
            )
        if self.mode != ours.mode:
            differences.append(f"{MODES[self.mode].format(length=self.length)} is not {ours.mode}")
        elif self.length != ours.length:
            differences.append(f"{self.length} tokens are not loss.norm_length={ours.length}")
        if self.scope in ("micro-batch", "sample share"):
            differences.append(
                "a mean of means: a token of a micro-batch with few tokens weighs more than one of a micro-batch with "
                "many, and another micro-batch size, packing or number of ranks gives another loss"
            )
        if self.scope == "rank":
            differences.append("a mean of means over ranks: a token of a rank with few tokens weighs more")
        if self.scope == "generated batch":
            differences.append(
                f"a generated batch feeds {self.steps} optimizer steps, and each is divided by the tokens of all: "
                f"about {self.steps} times smaller than ours, so gradient clipping acts later (AdamW itself hardly "
                "sees a constant factor)"
            )
        if "seq" in self.mode and self.count_fully_masked != ours.count_fully_masked:
            differences.append("sequences without a target are counted by one of the two")
        if self.masked_is_a_token:
            differences.append("only if a step has sequences without a target: each adds one to the denominator")
        return differences

    def weights(self, ranks: Sequence[Sequence[Sequence[int]]], other_tokens: int | None = None) -> list[float]:
        """Return the weight of a token of each sequence of a step, in order.

        ranks: numbers of target tokens, by rank, micro-batch and sequence.
        other_tokens: number of target tokens in the other steps of the generated batch; default: as many in each.
        """
        micro_batches = [micro_batch for rank in ranks for micro_batch in rank]
        step = [tokens for micro_batch in micro_batches for tokens in micro_batch]
        if self.scope == "step":
            return self._mean(step)
        if self.scope == "generated batch":
            others = (self.steps - 1) * sum(step) if other_tokens is None else other_tokens
            return [1 / max(sum(step) + others, 1)] * len(step)
        if self.scope == "rank":
            rows = [[tokens for micro_batch in rank for tokens in micro_batch] for rank in ranks]
            return [weight / len(ranks) for row in rows for weight in self._mean(row)]
        shares = {
            "micro-batch": [1 / len(micro_batches)] * len(micro_batches),
            "sample share": [len(micro_batch) / len(step) for micro_batch in micro_batches],
        }[self.scope]
        means = zip(micro_batches, shares)
        return [weight * share for micro_batch, share in means for weight in self._mean(micro_batch)]

    def _mean(self, lengths: Sequence[int]) -> list[float]:
        """Return the weight of a token of each of these sequences in their mean."""
        sequences = max(len(lengths) if self.count_fully_masked else sum(n > 0 for n in lengths), 1)
        tokens = sum(max(n, 1) if self.masked_is_a_token else n for n in lengths)
        divisors = {
            "token-mean": lambda n: max(tokens, 1),
            "seq-mean-token-mean": lambda n: sequences * max(n, 1),
            "seq-mean-token-sum": lambda n: sequences,
            "seq-mean-token-sum-norm": lambda n: sequences * (self.length or 1),
            "sum": lambda n: 1,
        }
        return [1 / divisors[self.mode](n) for n in lengths]


def example(theirs: Denominator, ours: Denominator) -> str | None:
    """Compare the weights of tokens in a step of four sequences. Return None if they are equal."""
    lengths = [n for micro_batch in EXAMPLE for n in micro_batch]
    ratios = [a / b for a, b in zip(theirs.weights([EXAMPLE]), ours.weights([EXAMPLE]))]
    if all(abs(ratio - 1) < 1e-12 for ratio in ratios):
        return None
    return (
        f"in a step of two micro-batches, with sequences of {', '.join(map(str, lengths))} tokens, a token weighs "
        f"{', '.join(f'{ratio:.3g}' for ratio in ratios)} times what it does here"
    )
