"""Show completions of a reinforcement learning run: the best and the worst, those of a prompt, or those that failed.

    isoloss samples runs/grpo-tiny                       # the three best and the three worst of the newest step
    isoloss samples runs/grpo-tiny --step 20 --finish length --count 10
    isoloss samples runs/grpo-tiny --step all --id train.jsonl:17 --by step      # one prompt over the run
    isoloss samples runs/grpo-tiny --eval --contains Paris
    isoloss samples runs/grpo-tiny --step all --errors   # completions without a reward, and why

Reads rollouts.jsonl, or eval_rollouts.jsonl, from its beginning, also while the run goes on.
"""

import heapq
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss.engine.data.show_rows import printable
from isoloss.engine.run.records import RunRecords
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools import command_line

Row = dict[str, Any]
Found = tuple[float, int, Row]  # what rows are ordered by, and the number of the row
ORDERS: dict[str, Callable[[Row], float]] = {
    "reward": lambda row: row["reward"] if row["reward"] is not None else float("-inf"),
    "length": lambda row: row["tokens"],
    "step": lambda row: -row["step"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 shown, 2 a mistake of the user, in one line on standard error."""
    parser = command_line.parser("samples", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a run of grpo or dapo")
    parser.add_argument("--eval", action="store_true", help="completions of evaluations, not of training")
    parser.add_argument("--step", default="last", metavar="N", help="a step, last (default) or all")
    parser.add_argument("--id", default="", metavar="BEGIN", help="what ids begin with: FILE:ROW, or FILE:ROW/PROMPT")
    parser.add_argument("--contains", default="", metavar="TEXT", help="in the prompt or the completion")
    parser.add_argument("--finish", choices=("stop", "length", "abort"), help="how completions ended")
    parser.add_argument("--errors", action="store_true", help="completions without a reward alone")
    parser.add_argument("--by", choices=ORDERS, default="reward", help="order; default: reward, the best first")
    parser.add_argument("--count", type=int, default=6, metavar="N", help="how many are shown (6); 0: all")
    arguments = parser.parse_args(argv)
    try:
        lines = shown(select(arguments), arguments)
    except UserError as mistake:
        return command_line.tell_mistake(mistake)
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:  # by a pager or `head` that has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@dataclass
class Selection:
    """The rows that fit, of which the first and the last `most` by their order are kept.

    most: number of rows at each end; 0: all. rows, failed: numbers of rows that fit, and of those without a reward.
    rewards: sum of the rewards. steps: the first and the last step of them.
    """

    most: int
    rows: int = 0
    failed: int = 0
    rewards: float = 0.0
    steps: tuple[int, int] = (0, 0)
    high: list[Found] = field(default_factory=list)
    low: list[Found] = field(default_factory=list)

    def add(self, key: float, row: Row) -> None:
        """Count a row, and keep it if it is at an end. Memory does not grow with the rows, but with most=0."""
        self.steps = (min(self.steps[0], row["step"]) if self.rows else row["step"], row["step"])
        self.rows += 1
        self.failed += row["reward"] is None
        self.rewards += row["reward"] or 0.0
        for heap, sign in ((self.high, 1), (self.low, -1)):
            entry = (sign * key, -sign * self.rows, row)  # rows of the same key stay in the order of the file
            (heapq.heappushpop if self.most and len(heap) == self.most else heapq.heappush)(heap, entry)

    def ends(self, count: int) -> tuple[list[Row], list[Row]]:
        """Return the first and the last rows, `count` of them together, none twice; 0: all of them."""
        first = [row for *_, row in sorted(self.high, key=lambda found: found[:2], reverse=True)]
        if not count or self.rows <= count:
            return first, []
        last = [row for *_, row in sorted(self.low, key=lambda found: found[:2])]
        return first[: count - count // 2], last[len(last) - count // 2 :]


def select(arguments: Namespace) -> Selection:
    """Return the completions that the options ask for. Raises UserError."""
    records = RunRecords(arguments.run)
    if arguments.count < 0:
        raise UserError(f"--count {arguments.count} must be at least 0")
    if arguments.step not in ("all", "last") and not arguments.step.isdecimal():
        raise UserError(f"--step {arguments.step} must be a number, last or all")
    rows = records.eval_rollouts() if arguments.eval else records.rollouts()
    selection, newest, wanted = Selection(arguments.count), -1, arguments.step
    for row in rows:
        if wanted == "last" and row["step"] > newest:
            selection, newest = Selection(arguments.count), row["step"]
        if wanted in ("all", "last", str(row["step"])) and fits(row, arguments):
            selection.add(ORDERS[arguments.by](row), row)
    return selection


def fits(row: Row, arguments: Namespace) -> bool:
    """Return whether a completion is one of those that are asked for."""
    return (
        begins(row["id"], arguments.id)
        and (arguments.contains in text_of(row["prompt"]) or arguments.contains in row["completion"])
        and arguments.finish in (None, row["finish"])
        and not (arguments.errors and row["reward"] is not None)
    )


def begins(name: str, part: str) -> bool:
    """Return whether an id is that of a completion of this row or prompt: `a.jsonl:1` is not the beginning of
    `a.jsonl:17/0/0`."""
    return not part or name == part or name.startswith(part.rstrip("/") + "/") or name.startswith(part + ":")


def text_of(prompt: Any) -> str:
    """Return a prompt as text, with a line for each message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {content_of(message)}" for message in prompt)


def content_of(message: Row) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)


def shown(selection: Selection, arguments: Namespace) -> list[str]:
    """Return the lines about a selection. Raises UserError where it is empty."""
    if not selection.rows:
        asked = "no completion fits these options" if arguments.step != "last" else "none of the newest step fits"
        raise UserError(f"{arguments.run}: {asked}; take some away, or see all steps with --step all")
    first, last = selection.ends(arguments.count)
    begin, end = selection.steps
    scored = selection.rows - selection.failed
    about = [f"{selection.rows:,} completions of step{f's {begin} to' if begin != end else ''} {end}"]
    about += [f"mean reward {selection.rewards / scored:.3f}"] if scored else []
    about += [f"{selection.failed:,} without a reward"] if selection.failed else []
    hidden = selection.rows - len(first) - len(last)
    between = [f"... {hidden:,} more, --count 0 shows all ..."] if hidden else []
    return [", ".join(about), *blocks(first), *(["", *between] if between else []), *blocks(last)]


def blocks(rows: Iterable[Row]) -> list[str]:
    """Return completions as lines: what is known of each, its prompt and its text, both indented."""
    lines = []
    for row in rows:
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
        parts = [f"{name} {'none' if part is None else f'{part:.3g}'}" for name, part in row.get("parts", {}).items()]
        dropped = ["dropped"] if row.get("kept") is False else []
        known = [f"step {row['step']}", *parts, f"{row['tokens']:,} tokens", row["finish"], *dropped]
        lines += ["", printable(f"{reward}  {row['id']}  {'  '.join(known)}")]
        lines += [f"  answer: {printable(str(row['answer']))}"] if row.get("answer") is not None else []
        lines += [f"  error: {printable(row['error'])}"] if row.get("error") else []
        for text, mark in ((text_of(row["prompt"]), "  > "), (row["completion"], "  ")):
            lines += [mark + line for line in printable(text).splitlines() or [""]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
