"""Hold what a check found, and show it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """level: "problem" for what a run fails on, "note" for what some runs do.
    what: the part of the environment. value: what it is. fix: what to do; nothing to do where it is ok."""

    level: Literal["ok", "note", "problem"]
    what: str
    value: str
    fix: str = ""


def ok(what: str, value: str) -> Finding:
    return Finding("ok", what, value)


def note(what: str, value: str, fix: str = "") -> Finding:
    return Finding("note", what, value, fix)


def problem(what: str, value: str, fix: str) -> Finding:
    return Finding("problem", what, value, fix)


def count(findings: Sequence[Finding], level: str) -> int:
    return sum(finding.level == level for finding in findings)


def table(findings: Sequence[Finding]) -> str:
    """A line for each, and a last one with their numbers."""
    level, what = (max(len(getattr(finding, name)) for finding in findings) for name in ("level", "what"))
    lines = [f"{f.level:{level}}  {f.what:{what}}  {f.value}{f' -> {f.fix}' if f.fix else ''}" for f in findings]
    return "\n".join([*lines, "", f"{count(findings, 'problem')} problem(s), {count(findings, 'note')} note(s)"])
