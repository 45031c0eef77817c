"""Show the steps of a run: on a terminal a live view, in a log file few lines. Needs no torch."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from isoloss.parallel.runtime.console import Bar, LivePart, duration, on_terminal, say

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

Row = Mapping[str, float]

PLAIN_LINE_SECONDS = 10.0  # seconds between lines in a log file
TREND_STEPS = 10  # steps whose mean a trend compares with that of as many steps before
# Parts of a line, by the key of the row that a part needs. A line has the reward or the loss: in reinforcement learning
# the loss is about 0 by construction.
HEADLINES = {"reward_mean": ("reward", 3), "loss": ("loss", 4)}  # name and decimals; the first that the row has
FIELDS = {
    "pass@1": "pass@1 {pass@1:.3f}",
    "groups_drawn": "no variance {groups_without_variance}/{groups_drawn}",
    "truncated_fraction": "truncated {truncated_fraction:.0%}",
    "response_length_mean": "length {response_length_mean:,.0f}",
    "kl": "KL {kl:.2g}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
    "mfu": "MFU {mfu:.1%}",
}
# Those that the live view has room for too.
MORE_FIELDS = {
    "grad_norm": "grad norm {grad_norm:.3g}",
    "lr": "lr {lr:.2e}",
    "entropy": "entropy {entropy:.3f}",
    "seconds": "{seconds:.1f} s/step",
}
LEVELS = "▁▂▃▄▅▆▇█"
MOST_LEVELS = 60  # columns of a curve
MOST_LINES = 3  # of numbers, in the live view


def summary(row: Row, hidden: Collection[str] = (), trend: float | None = None) -> str:
    """Return the line about a step or an evaluation. hidden: keys to leave out. trend: of the reward or the loss."""
    return "  ".join([*headline(row, trend), *fields(row, FIELDS, hidden)])


def headline(row: Row, trend: float | None = None) -> list[str]:
    """Return the reward or the loss with its trend."""
    for key in headlines(row):
        name, decimals = HEADLINES[key]
        change = "" if trend is None else f" ({trend:+.{decimals}f})"
        return [f"{name} {row[key]:.{decimals}f}{change}"]
    return []


def headlines(row: Row) -> list[str]:
    return [key for key in HEADLINES if key in row]


def fields(row: Row, of: Mapping[str, str], hidden: Collection[str] = ()) -> list[str]:
    """Return the parts of a line. A KL of exactly 0 is left out: the policy is compared with itself, in the first step,
    or in every step of a run with one step a batch and no reference. It would look like a run that does not learn."""
    still = {key for key in ("kl",) if row.get(key) == 0}
    return [text.format_map(row) for key, text in of.items() if key in row and key not in {*hidden, *still}]


def trend(values: Sequence[float]) -> float | None:
    """Return the mean of the last TREND_STEPS values less that of as many before; of a shorter run, of its halves."""
    count = min(TREND_STEPS, len(values) // 2)
    if count < 2:
        return None
    return (sum(values[-count:]) - sum(values[-2 * count : -count])) / count


class Screen:
    """Shows the steps of a run on standard error, and the lines of its evaluations.

    start_step: optimizer steps done before.
    hidden: keys that say nothing in this run.
    """

    def __init__(self, start_step: int, total_steps: int, hidden: Collection[str] = ()):
        self._start_step, self._total_steps, self._hidden = start_step, total_steps, hidden
        self._history: list[float] = []
        self._last_line = -math.inf
        self._live = LivePart() if on_terminal() else None
        self._latest: StepView | None = None

    def add(self, row: Row) -> None:
        """Add a step that is not shown, before those that are, to the trend."""
        value = next((row[key] for key in headlines(row)), math.nan)
        if math.isfinite(value):
            self._history.append(value)

    def show(self, step: int, row: Row, seconds: float) -> None:
        """Show a step. seconds: time since start_step."""
        self.add(row)
        left = seconds / max(1, step - self._start_step) * (self._total_steps - step)
        of_total = f"step {step}/{self._total_steps}"
        if self._live is not None:
            times = f"{duration(seconds)}  ETA {duration(left)}"
            bar = Bar(of_total, step / max(1, self._total_steps), times)
            self._latest = StepView(bar, row, self._history, self._hidden)
            self._live.draw(self._latest)
        elif seconds - self._last_line >= PLAIN_LINE_SECONDS or step >= self._total_steps:
            self._last_line = seconds
            line = summary(row, self._hidden, trend(self._history))
            say(f"{of_total}  {line}  ETA {duration(left)}", error=True)

    def show_evaluation(self, step: int, row: Row) -> None:
        say(f"evaluation after step {step}: {summary(row)}", error=True)

    def end(self) -> None:
        """Draw the last step and leave it on the screen, so that later lines stand below it. May be called again."""
        if self._live is not None and (view := self._latest):
            self._live.draw(view, now=True)
            self.leave()

    def leave(self) -> None:
        """Leave the screen as it is: see `LivePart.leave`. May be called again."""
        self._latest = None
        if self._live is not None:
            self._live.leave()


class StepView:
    """A view of a step for a terminal: a bar, the numbers in columns, and the curve of the reward or the loss."""

    def __init__(self, bar: Bar, row: Row, history: Sequence[float], hidden: Collection[str]):
        self._bar, self._row, self._history, self._hidden = bar, row, history, hidden

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        change = trend(self._history)
        good = change is not None and (change > 0) == ("reward_mean" in self._row)
        first = [Text(text, "bold green" if good else "bold") for text in headline(self._row, change)]
        others = [Text(text) for text in fields(self._row, FIELDS, self._hidden)]
        more = [Text(text, "dim") for text in fields(self._row, MORE_FIELDS, self._hidden)]
        yield self._bar
        yield _arranged([*first, *others, *more], console, options)
        for key in headlines(self._row)[:1] if len(self._history) > 1 and not options.ascii_only else ():
            name, decimals = HEADLINES[key]
            ends = f"{min(self._history):.{decimals}f} to {max(self._history):.{decimals}f}"
            room = min(MOST_LEVELS, options.max_width - len(name) - len(ends) - 2)
            if room >= Bar.LEAST:
                yield Text.assemble(f"{name} ", (curve(self._history, room), "cyan"), f" {ends}")


def _arranged(texts: "Sequence[Text]", console: "Console", options: "ConsoleOptions") -> "RenderableType":
    """Return numbers in columns; without room for these, one behind the other, and without those at the end that do not
    fit."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    columns = Columns(texts, padding=(0, 3))
    if len(console.render_lines(columns, options)) <= MOST_LINES:
        return columns
    lines: list[list[Text]] = []
    for text in texts:
        if lines and sum(len(other) + 2 for other in lines[-1]) + len(text) <= options.max_width:
            lines[-1].append(text)
        elif len(lines) < MOST_LINES:
            lines.append([text])
    return Group(*(Text("  ").join(line) for line in lines))


def curve(values: Sequence[float], columns: int) -> str:
    """Return a line of block characters: the means of equal parts of the values."""
    count = min(columns, len(values))
    parts = [values[k * len(values) // count : (k + 1) * len(values) // count] for k in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((mean - low) * scale)] for mean in means)
