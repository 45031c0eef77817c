"""Write an audit for a terminal: what the run will see of each split, then steps, chat template and rows."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

from isoloss.engine.data.remarks import MESSAGES
from isoloss.engine.data.rows import listed
from isoloss.engine.data.show_rows import printable
from isoloss.engine.rl.config import RLConfig
from isoloss.tools.audit.answers import Answers, full_reward
from isoloss.tools.audit.audit import Audit
from isoloss.tools.audit.copies import SIMILAR
from isoloss.tools.audit.figures import Copies, SplitFigures, grouped
from isoloss.tools.audit.pieces import LONG, as_text, legend
from isoloss.tools.audit.shown import ShownRow

LABEL = 15  # columns of the names of figures
WIDEST = 120  # columns of a line
BAR = 24  # columns of the longest bar

Entry = tuple[str, str]  # a name and a text, which may be empty where the name of the line above goes on


def lines_of(audit: Audit, width: int) -> list[str]:
    """Return the figures as lines of at most `width` columns."""
    lines = []
    for number, figures in enumerate(audit.figures):
        lines += ["", f"{figures.key}: {listed(map(printable, figures.files))}"]
        lines += laid_out(split_entries(figures, audit, audit.answers[number] if audit.answers else None), width)
    return [*lines, "", "the run", *laid_out(run_entries(audit), width)]


def laid_out(entries: Sequence[Entry], width: int) -> list[str]:
    """Return entries as lines, their texts in a column of their own."""
    indent = " " * (LABEL + 2)
    lines = []
    for name, text in entries:
        wrapped = textwrap.wrap(text, min(width, WIDEST) - len(indent)) or [""]
        lines += [f"  {name:<{LABEL}}{wrapped[0]}", *(indent + line for line in wrapped[1:])]
    return lines


def split_entries(split: SplitFigures, audit: Audit, answers: Answers | None) -> list[Entry]:
    """Return the figures of a split."""
    rewards = answers is not None
    fates = [(split.cut, "cut"), (split.dropped, "dropped"), (split.rejected, "rejected")]
    fates.append((split.repeated, "left out as repeated"))
    out = "".join(f", {rows:,} {word}" for rows, word in fates if rows)
    entries = [("rows", f"{split.read:,} read, {split.used:,} used{out}")]
    if rewards:
        entries.append(("tokens", f"{split.tokens:,} of prompts"))
    else:
        entries.append(
            ("tokens", f"{split.tokens:,}, trained {split.targets:,} ({share(split.targets, split.tokens)})")
        )
    if split.cut_tokens:
        entries.append(("", f"{split.cut_tokens:,} cut off at {split.limit_key}={split.limit:,}"))
    entries.append(
        ("lengths", f"median {split.median:,}, 90 % {split.percentile_90:,}, 99 % {split.percentile_99:,}, longest "
         f"{split.longest:,}; {split.limit_key}={split.limit:,}")
    )  # fmt: skip
    most = max(rows for _, rows in split.histogram)
    entries += [
        ("", f"to {end:>7,} {rows:>9,} {'#' * -(-rows * BAR // most)}{' <- limit' if end == split.limit else ''}")
        for end, rows in split.histogram
    ]
    if split.over_budget:
        entries.append(
            ("", f"{split.over_budget:,} over batch.max_tokens={audit.config.batch.max_tokens:,}, each alone")
        )
    entries += reject_entries(split, audit.config.data.max_rejects)
    entries += copies_entries("duplicates", split.copies, split.used)
    if split.in_train is not None:
        entries += copies_entries("in data.train", split.in_train, split.used)
    if split.all_targets:
        entries.append(("all targets", f"{split.all_targets:,} rows have no context before what is trained"))
    if len(split.forms) > 1:
        entries.append(("forms", ", ".join(f"{rows:,} rows of {form}" for form, rows in split.forms.items())))
    entries += [
        ("remark", f"{split.remarks[name]:,} rows {text}") for name, text in MESSAGES.items() if split.remarks.get(name)
    ]
    if split.unused:
        entries.append(("not read", f"columns {printable(listed(split.unused))}"))
    return entries + (answer_entries(answers, audit) if answers is not None else [])


def reject_entries(split: SplitFigures, allowed: int) -> list[Entry]:
    """Return why rows are rejected."""
    if not split.rejected:
        return []
    entries = [
        ("rejected" if not number else "", f"{reason.rows:,}: {printable(reason.text)} ({', '.join(reason.places)})")
        for number, reason in enumerate(split.reasons)
    ]
    if split.rejected > allowed:
        entries.append(("", f"the run would stop: data.max_rejects={allowed}"))
    return entries


def copies_entries(name: str, copies: Copies, of: int) -> list[Entry]:
    """Return how many rows repeat others, with examples."""
    near = f"{copies.near:,} nearly ({share(copies.near, of)}; {SIMILAR:.0%} of their shingles)"
    entries = [(name, f"{copies.exact:,} exactly ({share(copies.exact, of)}), {near}")]
    return entries + [("", f"{row} = {other}") for row, other in copies.examples]


def answer_entries(answers: Answers, audit: Audit) -> list[Entry]:
    """Return what rewards make of the rows' own answers."""
    config = audit.config
    assert isinstance(config, RLConfig)
    full = full_reward(config)
    tried = answers.scored - answers.without
    rule = f"the full reward of {full:g}" if full is not None else "more than an empty completion"
    good = tried - len(answers.unscorable)
    entries = [("own answers", f"{good:,} of {tried:,} get {rule} from {', '.join(config.reward.function)}")]
    places = [(f"row {row}", reason) for row, reason in answers.unscorable.items()]
    entries += [
        ("unscorable" if not i else "", f"{r.rows:,}: {printable(r.text)}") for i, r in enumerate(grouped(places))
    ]
    if answers.without:
        entries.append(("no answer", f"{answers.without:,} rows, whose rewards were not tried"))
    entries += [
        ("no column", f"{rows:,} rows lack {column}, which a reward asks for")
        for column, rows in answers.lacking.items()
    ]
    return entries


def run_entries(audit: Audit) -> list[Entry]:
    """Return figures of steps and of the chat template."""
    steps, template, config = audit.steps, audit.template, audit.config
    unit = "prompts" if isinstance(config, RLConfig) else "rows"
    fewest, most = steps.micro_batches
    many = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    entries = [
        ("steps", f"{steps.total:,} of {steps.rows:,} {unit}; {steps.epoch:,.1f} are an epoch, so every row is taken "
         f"{steps.epochs:.3g} times"),
        ("micro-batches", f"{many} a step on one data-parallel rank, {steps.filled:.0%} of batch.max_tokens={config.batch.max_tokens:,} filled"),
    ]  # fmt: skip
    if template.ends:
        hint = f"; generation_config.json does not name {listed(template.undeclared)}" if template.undeclared else ""
        entries.append(("turns end with", f"{listed(template.ends)}{hint}"))
    if template.checked:
        same = template.checked - len(template.differing)
        entries.append(
            (
                "before answers",
                f"in {same:,} of {template.checked:,} rows looked at the model is prompted as it was trained",
            )
        )
        if template.differing:
            entries.append(
                ("", f"{template.differing[0]}: generation ...{template.generated!r}, training ...{template.trained!r}")
            )
    return entries


def rows_lines(rows: Sequence[ShownRow | str], colour: bool, whole: bool = False) -> list[str]:
    """Return the lines of rows, with the legend of their marks. A text stands for a row that cannot be shown."""
    if not rows:
        return []
    lines = ["", f"rows: {legend(colour)}"]
    for row in rows:
        lines += ["", printable(row)] if isinstance(row, str) else row_lines(row, colour, whole)
    return lines


def record(audit: Audit) -> dict[str, object]:
    """Return the figures as plain values, for JSON."""
    parts = zip_longest(audit.figures, audit.answers)
    return {
        "splits": [asdict(figures) | {"answers": answers and answers.record()} for figures, answers in parts],
        "steps": asdict(audit.steps),
        "template": asdict(audit.template),
        "findings": [asdict(finding) for finding in audit.findings],
    }


def row_lines(row: ShownRow, colour: bool, whole: bool = False) -> list[str]:
    """Return the lines of a row with its text. whole: show long texts in full."""
    targets = "" if row.answer is not None else f", {row.targets:,} trained"
    why = f": {printable('; '.join(row.why))}" if row.why else ""
    text = as_text(row.pieces, colour, None if whole else LONG)
    answer = [textwrap.indent(f"answer: {printable(row.answer)}", "  ")] if row.answer is not None else []
    return ["", f"{row.key} {row.place}: {row.length:,} tokens{targets}{why}", textwrap.indent(text, "  "), *answer]


def share(part: int, of: int) -> str:
    """Return a share in percent, which is 0 % for no part only."""
    percent = 100 * part / max(1, of)
    return f"{percent:.1f} %" if percent >= 0.1 or not part else "under 0.1 %"
