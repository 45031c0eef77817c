"""Write an audit for a terminal: what the run will see of each split, then steps, chat template and rows."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

from isoloss.engine.config.schema import Config
from isoloss.engine.data.columns import mapping_lines
from isoloss.engine.data.remarks import MESSAGES
from isoloss.engine.data.rows import listed
from isoloss.engine.data.show_rows import printable
from isoloss.engine.rl.config import RLConfig
from isoloss.tools.audit.answers import Answers, full_reward
from isoloss.tools.audit.audit import Audit
from isoloss.tools.audit.figures import Copies, SplitFigures, grouped
from isoloss.tools.audit.pieces import LONG, as_text, legend
from isoloss.tools.audit.rows import Split
from isoloss.tools.audit.shown import ShownRow

LABEL = 15  # columns of the names of figures
WIDEST = 120  # columns of a line
BAR = 24  # columns of the longest bar

Entry = tuple[str, str]  # a name and a text; the name is empty where a figure has several lines


def lines_of(audit: Audit, width: int) -> list[str]:
    """Return the figures as lines of at most `width` or WIDEST columns. A longer word, such as a path, stays whole."""
    lines = []
    for title, entries in sections(audit):
        lines += ["", printable(title)]
        for name, text in entries:
            room = min(width, WIDEST) - LABEL - 2
            wrapped = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]
            lines += [f"  {name:<{LABEL}}{wrapped[0]}", *(" " * (LABEL + 2) + line for line in wrapped[1:])]
    return lines


def sections(audit: Audit) -> list[tuple[str, list[Entry]]]:
    """Return the titles of an audit's parts, and the figures of each."""
    parts = zip_longest(audit.splits, audit.figures, audit.answers)
    found = [
        (f"{figures.key}: {listed(figures.files)}", split_entries(split, figures, answers, audit))
        for split, figures, answers in parts
    ]
    return [*found, ("the run", run_entries(audit))]


def split_entries(split: Split, figures: SplitFigures, answers: Answers | None, audit: Audit) -> list[Entry]:
    """Return the figures of a split."""
    fates = [(figures.cut, "cut"), (figures.dropped, "dropped"), (figures.rejected, "rejected")]
    fates.append((figures.repeated, "left out as repeated"))
    out = "".join(f", {rows:,} {word}" for rows, word in fates if rows)
    trained = f", {figures.targets:,} trained ({share(figures.targets, figures.tokens)})" if answers is None else ""
    entries = [
        ("rows", f"{figures.read:,} read, {figures.used:,} used{out}"),
        *form_entries(figures, audit.config, prompts=answers is not None),
        ("tokens", f"{figures.tokens:,}{trained or ' of prompts'}"),
        *length_entries(figures, audit.config.batch.max_tokens),
        *reject_entries(figures, audit.config.data.max_rejects),
        *copies_entries("duplicates", figures.copies, figures.used),
        *(copies_entries("in data.train", figures.in_train, figures.used) if figures.in_train is not None else ()),
    ]
    if figures.all_targets:
        entries.append(("all targets", f"{figures.all_targets:,} rows: nothing but their first token is context"))
    for name, text in MESSAGES.items():
        if figures.remarks.get(name):
            entries.append(("turns", f"{figures.remarks[name]:,} rows {text}"))
    if figures.unused:
        entries.append(("not read", f"columns {listed(figures.unused)}"))
    return entries + (answer_entries(split, answers, audit.config) if answers is not None else [])


def form_entries(figures: SplitFigures, config: Config, prompts: bool) -> list[Entry]:
    """Return how many rows have which form, if there are several, and how those of other forms than isoloss's are read,
    as the banner of the run says it."""
    counts = ", ".join(f"{rows:,} rows of {form}" for form, rows in figures.forms.items())
    lines = mapping_lines(figures.key, figures.forms, config.data, prompts)
    found = [*([counts] if len(figures.forms) > 1 else []), *(line.removeprefix(f"{figures.key}: ") for line in lines)]
    return [("" if number else "forms", line) for number, line in enumerate(found)]


def length_entries(figures: SplitFigures, budget: int) -> list[Entry]:
    """Return the lengths of rows before any is cut, with their histogram."""
    limit = f"{figures.limit_key}={figures.limit:,}"
    marks = f"median {figures.median:,}, 90 % {figures.percentile_90:,}, 99 % {figures.percentile_99:,}"
    entries = [("lengths", f"{marks}, longest {figures.longest:,}; {limit}")]
    most = max(rows for _, rows in figures.histogram)
    for end, rows in figures.histogram:
        bar = "#" * -(-rows * BAR // most)
        entries.append(("", f"to {end:>7,} {rows:>9,} {bar}{' < limit' if end == figures.limit else ''}".rstrip()))
    if figures.cut_tokens:
        entries.append(("", f"{figures.cut_tokens:,} tokens are cut off at {limit}"))
    if figures.over_budget:
        entries.append(("", f"{figures.over_budget:,} rows over batch.max_tokens={budget:,}: each is alone in a "
                        "micro-batch"))  # fmt: skip
    return entries


def reject_entries(figures: SplitFigures, allowed: int) -> list[Entry]:
    """Return why rows are rejected, and whether the run would go on without them."""
    reasons = [f"{reason.rows:,}: {reason.text} ({', '.join(reason.places)})" for reason in figures.reasons]
    if figures.rejected > allowed:
        reasons.append(f"the run would end there: data.max_rejects={allowed}")
    return [("" if number else "rejected", reason) for number, reason in enumerate(reasons)]


def copies_entries(name: str, copies: Copies, of: int) -> list[Entry]:
    """Return how many rows repeat others, with examples. of: number of rows."""
    counts = [
        f"{rows:,} {word} ({share(rows, of)})"
        for rows, word in ((copies.exact, "exact"), (copies.near, "near"))
        if rows
    ]
    return [(name, ", ".join(counts) or "none"), *(("", str(copy)) for copy in copies.examples)]


def answer_entries(split: Split, answers: Answers, config: Config) -> list[Entry]:
    """Return what rewards make of the rows' own answers."""
    assert isinstance(config, RLConfig)
    full, tried = full_reward(config), answers.scored - answers.without
    rule = f"the full reward of {full:g}" if full is not None else "more than an empty completion"
    sampled = f"; {answers.scored:,} of {len(split):,} rows were tried" if answers.scored < len(split) else ""
    good = tried - len(answers.unscorable)
    functions = ", ".join(config.reward.function)
    entries = [("own answers", f"{good:,} of {tried:,} get {rule} from {functions}{sampled}")]
    reasons = grouped((split.place(row), reason) for row, reason in answers.unscorable.items())
    for number, reason in enumerate(reasons):
        entries.append(("" if number else "unscorable", f"{reason.rows:,}: {reason.text} ({', '.join(reason.places)})"))
    if answers.without:
        entries.append(("no answer", f"{answers.without:,} rows, whose rewards were not tried"))
    for column, rows in answers.lacking.items():
        entries.append(("no column", f"{rows:,} rows lack {column}, which a reward function asks for"))
    return entries


def run_entries(audit: Audit) -> list[Entry]:
    """Return figures of steps and of the chat template."""
    steps, template = audit.steps, audit.template
    unit = "prompts" if isinstance(audit.config, RLConfig) else "rows"
    fewest, most = steps.micro_batches
    many = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    passes = f"{steps.epochs:.3g} pass{'' if steps.epochs == 1 else 'es'} over data.train"
    budget = audit.config.batch.max_tokens
    entries = [
        ("steps", f"{steps.total:,} of {steps.rows:,} {unit}: {passes}; an epoch has {steps.epoch:,.1f}"),
        ("micro-batches", f"{many} a step on one data-parallel rank, {steps.filled:.0%} of batch.max_tokens={budget:,} "
         "filled"),
    ]  # fmt: skip
    if template.ends:
        hint = f"; generation_config.json does not name {listed(template.undeclared)}" if template.undeclared else ""
        entries.append(("turns end with", f"{listed(template.ends)}{hint}"))
    if template.checked:
        same = template.checked - len(template.differing)
        entries.append(
            ("before answers", f"as in generation in {same:,} of the first {template.checked:,} conversations")
        )
    if template.differing:
        ends = f"generation has ...{template.generated!r}, training ...{template.trained!r}"
        entries.append(("", f"{template.differing[0]}: {ends}"))
    return entries


def rows_lines(rows: Sequence[ShownRow | str], colour: bool, whole: bool = False) -> list[str]:
    """Return the lines of rows, with the legend of their marks.

    rows: a text stands for a row that cannot be shown.
    whole: whether long texts are shown in full.
    """
    if not rows:
        return []
    lines = ["", f"rows: {legend(colour)}"]
    for row in rows:
        lines += ["", printable(row, None)] if isinstance(row, str) else row_lines(row, colour, whole)
    return lines


def row_lines(row: ShownRow, colour: bool, whole: bool) -> list[str]:
    """Return the lines of a row with its text."""
    targets = f", {row.targets:,} trained" if row.answer is None else ""
    why = f": {printable('; '.join(row.why))}" if row.why else ""
    text = as_text(row.pieces, colour, None if whole else LONG).rstrip("\n")
    answer = [textwrap.indent(f"answer: {printable(row.answer)}", "  ")] if row.answer is not None else []
    head = f"{row.key} {printable(row.place)}: {row.length:,} tokens{targets}{why}"
    return ["", head, textwrap.indent(text, "  "), *answer]


def record(audit: Audit) -> dict[str, object]:
    """Return the figures as plain values, for JSON."""
    parts = zip_longest(audit.figures, audit.answers)
    return {
        "splits": [asdict(figures) | {"answers": answers and answers.record()} for figures, answers in parts],
        "steps": asdict(audit.steps),
        "template": asdict(audit.template),
        "findings": [asdict(finding) for finding in audit.findings],
    }


def share(part: int, of: int) -> str:
    """Return a share in percent. It is 0 % only for no part."""
    percent = 100 * part / max(1, of)
    return f"{percent:.1f} %" if percent >= 0.1 or not part else "under 0.1 %"
