"""Aggregations: how the loss terms of tokens become one number (docs/normalization.md). Imports no torch."""

from dataclasses import dataclass

from isoloss.parallel.runtime.errors import UserError

MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
    "sum",
)


@dataclass(frozen=True)
class Aggregation:
    """A way in which per-token terms become one number.

    mode: one of MODES.
    norm_length: the constant of seq-mean-token-sum-norm, in tokens.
    count_fully_masked: whether a sequence or prompt without a valid token counts in S or P.
    """

    mode: str = "token-mean"
    norm_length: int | None = None
    count_fully_masked: bool = False

    def __post_init__(self):
        if self.mode not in MODES:
            raise UserError(f"loss.aggregation={self.mode!r} is not one of {', '.join(MODES)}")
        if (self.mode == "seq-mean-token-sum-norm") != (self.norm_length is not None):
            raise UserError(
                f"loss.norm_length={self.norm_length} goes with loss.aggregation=seq-mean-token-sum-norm, and "
                f"only with it (it is {self.mode})"
            )
        if self.norm_length is not None and self.norm_length <= 0:
            raise UserError(f"loss.norm_length={self.norm_length} must be a positive number of tokens")

    @property
    def by_prompt(self) -> bool:
        return self.mode == "prompt-mean-token-mean"
