"""Name what an audit finds, and decide by --fail-on whether it fails."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isoloss.engine.data.remarks import EMPTY_TURN, LOST_THOUGHT
from isoloss.parallel import UserError
from isoloss.tools.audit.answers import Answers
from isoloss.tools.audit.figures import SplitFigures
from isoloss.tools.audit.template_facts import TemplateFacts

# Rows of a split that have the finding, by its name.
COUNTS: Mapping[str, Callable[[SplitFigures], int]] = {
    "rejected": lambda split: split.rejected,
    "dropped": lambda split: split.dropped,
    "truncated": lambda split: split.cut,
    "no-targets": lambda split: split.no_targets,
    "all-targets": lambda split: split.all_targets,
    "duplicates": lambda split: split.copies.exact + split.repeated,
    "near-duplicates": lambda split: split.copies.near,
    "over-budget": lambda split: split.over_budget,
    "empty-turns": lambda split: split.remarks.get(EMPTY_TURN, 0),
    "lost-thoughts": lambda split: split.remarks.get(LOST_THOUGHT, 0),
}
IN_TRAIN, UNSCORABLE, NO_ANSWER, PROMPT_DIFFERS = "train-in-eval", "unscorable", "no-answer", "prompt-differs"
CONDITION = re.compile(r"(?P<name>[a-z-]+)(?:>(?P<most>\d+\.\d+|\d+%?))?")


@dataclass(frozen=True)
class Finding:
    """rows: number of rows that have it. of: number of rows that were looked at."""

    name: str
    rows: int
    of: int


@dataclass(frozen=True)
class Condition:
    """A part of --fail-on. most: rows that may have the finding: a number, or with `share` a share of all."""

    name: str
    most: float = 0
    share: bool = False

    def __str__(self) -> str:
        return f"{self.name}>{self.most:g}"

    def holds(self, finding: Finding) -> bool:
        return finding.rows > (self.most * finding.of if self.share else self.most)


def names_of(rewards: bool, evaluation: bool) -> tuple[str, ...]:
    """Return the names of findings. rewards: whether there are reward functions. evaluation: whether there is
    data.eval."""
    return (
        *COUNTS,
        PROMPT_DIFFERS,
        *((IN_TRAIN,) if evaluation else ()),
        *((UNSCORABLE, NO_ANSWER) if rewards else ()),
    )


def findings_of(figures: Sequence[SplitFigures], answers: Sequence[Answers], facts: TemplateFacts) -> list[Finding]:
    """Return all findings, those without rows too."""
    read = sum(split.read for split in figures)
    found = [Finding(name, sum(map(count, figures)), read) for name, count in COUNTS.items()]
    found.append(Finding(PROMPT_DIFFERS, len(facts.differing), facts.checked))
    found += [Finding(IN_TRAIN, s.in_train.exact + s.in_train.near, s.used) for s in figures if s.in_train is not None]
    if answers:
        scored = sum(answer.scored for answer in answers)
        found.append(Finding(UNSCORABLE, sum(len(answer.unscorable) for answer in answers), scored))
        found.append(Finding(NO_ANSWER, sum(answer.without for answer in answers), scored))
    return found


def conditions_of(text: str, names: Sequence[str]) -> list[Condition]:
    """Return the conditions of --fail-on, such as "rejected,duplicates>0.01". Raises UserError.

    names: findings that there can be.
    """
    conditions = []
    for part in text.split(","):
        match = CONDITION.fullmatch(part.strip())
        if match is None or match["name"] not in names:
            raise UserError(
                f"--fail-on: {part.strip()!r} is no finding of this configuration: write NAME, NAME>COUNT or "
                f"NAME>SHARE, a number with a point; names are {', '.join(names)}"
            )
        most = match["most"] or "0"
        share = "." in most or most.endswith("%")
        value = float(most.rstrip("%")) / (100 if most.endswith("%") else 1)
        if share and value >= 1:
            raise UserError(f"--fail-on: {part.strip()!r} would never hold: a share is below 1, a count has no point")
        conditions.append(Condition(match["name"], value, share))
    return conditions


def failed(conditions: Sequence[Condition], findings: Sequence[Finding]) -> list[str]:
    """Return a line for each condition that holds."""
    by_name = {finding.name: finding for finding in findings}
    pairs = [(condition, by_name[condition.name]) for condition in conditions]
    return [f"{c}: {finding.rows:,} of {finding.of:,} rows" for c, finding in pairs if c.holds(finding)]
