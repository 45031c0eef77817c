"""What earlier releases of other trainers divided their losses by, and by which factor that was off.

A release is a day: of the commit that ran (`git log -1 --format=%cs`), or on which a package index got the release. A
row holds from the day of the change that brought it to the day of the one that mended it.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isoloss.parallel import UserError
from isoloss.tools.migrate.denominator import Denominator

NAMES = {"verl": "verl", "trl": "TRL", "slime": "slime", "skyrl": "SkyRL", "ms-swift": "ms-swift", "nemo-rl": "NeMo-RL"}


@dataclass(frozen=True)
class Sizes:
    """Of an optimizer step; None: not known. ranks: that hold different samples. micro_batches: of each. sequences:
    of all ranks. steps: optimizer steps that a generated batch feeds."""

    ranks: int | None = None
    micro_batches: int | None = None
    sequences: int | None = None
    steps: int | None = None


Factor = Callable[[Sizes], float]


@dataclass(frozen=True)
class Past:
    """What a trainer did for a while.

    trainer: its name. of: the loss, in words. since, until: days; empty: from its beginning, or still. thread: where
    it was mended, or is discussed. divided: by what, in words. weights: of its tokens, where it was no constant factor.
    factor: its loss by the one that it documents, as a text of Sizes and as a function; besides the weights.
    opened: `until` is the day on which the change was proposed; the day of its merge is not known.
    kind: the losses of a configuration that it is about, of those that a reader tells apart.
    """

    trainer: str
    of: str
    since: str
    until: str
    thread: str
    divided: str
    kind: str = ""
    weights: Denominator | None = None
    formula: str = ""
    factor: Factor | None = None
    opened: bool = False


MEANS = Denominator("token-mean", scope="micro-batch")
BY_MICRO_BATCH = "the target tokens of each micro-batch, and then the micro-batches were averaged"
PASTS = (
    Past("verl", "fine-tuning", "", "2025-11-03", "PR 3994", BY_MICRO_BATCH, "sft", MEANS),
    Past("verl", "seq-mean-* on the engines", "2025-12-17", "2026-01-03", "PRs 4510, 4769, 5798",
         "sequences x ranks, without the factor of ranks that undoes the mean over them", "seq-mean",
         formula="1 / ranks^2", factor=lambda z: 1 / (z.ranks or 1) ** 2),
    Past("verl", "seq-mean-token-sum-norm", "", "2026-02-24", "PR 5366",
         "the length alone, and then ranks were averaged: the number of sequences was missing", "norm",
         formula="sequences / ranks", factor=lambda z: (z.sequences or 1) / (z.ranks or 1)),
    Past("verl", "the critic on the engines", "", "2026-07-07", "PR 6957",
         "the target tokens of each micro-batch, and then the micro-batches were added up", "critic", MEANS,
         "micro_batches", lambda z: z.micro_batches or 1),
    Past("verl", "supervised distillation", "", "2026-08-01", "PR 7225, issue 7200", BY_MICRO_BATCH, "distillation",
         MEANS),
    Past("verl", "token-mean on the older workers", "", "", "issue 5625",
         "the target tokens of each micro-batch, and then the micro-batches were averaged by their samples", "legacy",
         Denominator("token-mean", scope="sample share")),
    Past("verl", "token-sum", "2026-08-03", "", "PR 7197", "nothing", "token-sum", Denominator("sum")),
    Past("skyrl", "token_mean", "", "2026-03-09", "PR 1296", BY_MICRO_BATCH, weights=MEANS),
    Past("skyrl", "token_mean_legacy", "2026-03-09", "", "PR 1296", BY_MICRO_BATCH, weights=MEANS),
    Past("skyrl", "any loss with context parallelism", "", "2026-03-31", "PR 1420",
         "twice too much with two context-parallel ranks (gradients were halved, metrics doubled)"),
    Past("skyrl", "cross-entropy of fine-tuning, a sum by its documentation", "2026-03-09", "", "issue 1504",
         "micro_batches x ranks, where a sum is divided by nothing", weights=Denominator("sum"),
         formula="1 / (micro_batches x ranks)", factor=lambda z: 1 / ((z.micro_batches or 1) * (z.ranks or 1))),
    Past("skyrl", "the Tinker interface on Megatron", "", "2026-08-10", "PR 2008",
         "nothing, but only the last forward_backward before an optimizer step counted"),
    Past("trl", "bnpo", "", "", "its documentation", BY_MICRO_BATCH, "bnpo", MEANS),
    Past("trl", "dapo, cispo, vespo", "", "2026-07-23", "issue 5619, PR 6024",
         "the tokens of the generated batch, in each of the steps that it fed", "generated",
         Denominator("token-mean"), "1 / steps", lambda z: 1 / (z.steps or 1), opened=True),
    Past("trl", "dapo, cispo, vespo with mask_truncated_completions", "", "2026-07-18", "issue 6369, PR 6439",
         "all tokens, those of truncated completions included, which have no loss: less by their share", "truncated",
         opened=True),
    Past("trl", "GKD, GOLD and distillation (JSD)", "", "2026-06-11", "PR 6006", BY_MICRO_BATCH, "distillation", MEANS,
         opened=True),
    Past("ms-swift", "IPO", "", "2026-08-16", "PR 9925", "rows, where it is defined by tokens"),
    Past("ms-swift", "GRPO and GKD on Megatron", "", "2026-09-10", "issue 10076, PR 10104", BY_MICRO_BATCH,
         weights=MEANS, opened=True),
    Past("ms-swift", "packed DPO", "", "2026-09-15", "PR 10144",
         "the pairs of each micro-batch, and then the micro-batches were averaged",
         weights=Denominator("seq-mean-token-sum", scope="micro-batch")),
    Past("ms-swift", "GKD on transformers", "", "", "PR 10165", BY_MICRO_BATCH, weights=MEANS),
    Past("ms-swift", "hinge and ipo of DPO", "", "", "PR 10167", "as sigmoid: another loss was trained"),
    Past("nemo-rl", "VAPO's likelihood of right answers", "", "", "PR 3791",
         "the target tokens of each micro-batch, and then the micro-batches of all ranks were added up", weights=MEANS,
         formula="micro_batches x ranks", factor=lambda z: (z.micro_batches or 1) * (z.ranks or 1)),
    Past("nemo-rl", "the ratio of cross-entropy and distillation", "", "", "PR 4172", BY_MICRO_BATCH, weights=MEANS),
    Past("nemo-rl", "auxiliary and multi-token losses", "", "", "PRs 3888, 3889", "the main loss's denominator"),
)  # fmt: skip


def day(text: str) -> str:
    """A day as the table has it. Raises UserError."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise UserError(
            f"--release {text}: must be a day, YYYY-MM-DD: of the commit (git log -1 --format=%cs), or of the release"
        ) from None


def in_effect(trainer: str, release: str, kinds: Sequence[str] | None = None) -> list[Past]:
    """kinds: of a configuration; None: all of the trainer."""
    return [
        past
        for past in PASTS
        if past.trainer == trainer
        and past.since <= release
        and (not past.until or release < past.until or past.opened)
        and (kinds is None or past.kind in kinds)
    ]


def told(trainer: str, release: str, sizes: Sizes, kinds: Sequence[str] | None = None) -> list[str]:
    """What a run of that day computed, a line for each loss."""
    lines = [_line(past, release, sizes) for past in in_effect(trainer, release, kinds)]
    return lines or [f"nothing is known of {NAMES[trainer]} of {release} that its documentation does not say"]


def _line(past: Past, release: str, sizes: Sizes) -> str:
    late = past.until and release >= past.until
    period = f"{f'from {past.since} ' if past.since else ''}{f'until {past.until} ' if past.until else ''}".strip()
    text = f"{past.of} ({f'{period}, ' if period else ''}{past.thread}): divided by {past.divided}"
    if late:
        text += f"; the change was proposed on {past.until}, and the day of its merge is not known"
    if past.factor is not None:
        needed = [name for name in vars(sizes) if name in past.formula]
        missing = [name for name in needed if getattr(sizes, name) is None]
        number = f"; give {', '.join(f'{name}=N' for name in missing)}" if missing else f" = {past.factor(sizes):.6g}"
        text += f"; its loss and gradient were {past.formula}{number} times what they should be"
    if past.weights is not None and past.weights.scope != "step":
        text += "; a token of a micro-batch with half the average number of tokens weighed twice as much" + (
            f", among {sizes.ranks * sizes.micro_batches} micro-batches" if sizes.ranks and sizes.micro_batches else ""
        )
    return text


def sizes_of(words: Sequence[str]) -> Sizes:
    """`ranks=8 micro_batches=4`, of a trainer whose configurations are not read."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in Sizes.__dataclass_fields__ or not value.isdigit() or int(value) < 1:
            names = ", ".join(f"{name}=N" for name in Sizes.__dataclass_fields__)
            raise UserError(f"cannot read {word!r}: write {names}, whole numbers above 0")
        values[name] = int(value)
    return Sizes(**values)
