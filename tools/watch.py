"""Follow a training run of another process, or of another machine with the same file system.

    python -m isoloss.tools.watch runs/sft-tiny
    python -m isoloss.tools.watch runs/sft-tiny --once

Shows what the run shows itself, from the files of its folder, until the run or Ctrl-C ends: a live view on a terminal,
few lines in a log file. With --once it shows the newest step and ends. The run does not notice it.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.engine.run.records import CONFIG, EVALUATIONS, METRICS, NewRows, RunRecords
from isoloss.engine.run.screen import Screen, summary
from isoloss.parallel.runtime.console import duration, say
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools import command_line

POLL_SECONDS = 1.0
QUIET_SECONDS = 60.0  # without a step before a line says so; the next lines come after twice the time each


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 at the end of the run or by Ctrl-C, 2 a mistake of the user, in one line."""
    parser = command_line.parser("watch", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument("--once", action="store_true", help="show the newest step and end")
    arguments = parser.parse_args(argv)
    try:
        watch(Watched(arguments.run), arguments.once)
    except UserError as mistake:
        return command_line.tell_mistake(mistake)
    except KeyboardInterrupt:
        pass
    return 0


def watch(run: "Watched", once: bool) -> None:
    """Follow a run until it ends. Raises UserError for a folder that is none of a run."""
    say(run.opening())
    while True:
        running = run.records.is_running()  # before its rows are read, so that none is missed
        run.look()
        done = run.step == run.total_steps
        if once or running is False or (running is None and done):
            break
        time.sleep(POLL_SECONDS)
    run.screen.end()
    say(*run.closing(running is not False and not done))


class Watched:
    """A run that is followed by its files. Raises UserError for a folder that is none of a run.

    step: the newest optimizer step, 0 before the first one.
    """

    def __init__(self, folder: Path):
        if not (folder / CONFIG).is_file():
            raise UserError(f"{folder} is no folder of a run (it has no {CONFIG}): give the output_dir of a run")
        self.records = RunRecords(folder)
        self.total_steps = self.records.total_steps()
        self.step, self._seconds, self._quiet = 0, 0.0, QUIET_SECONDS
        self._steps, self._evaluations = NewRows(folder / METRICS), NewRows(folder / EVALUATIONS)
        self._evaluated: list[dict[str, Any]] = []
        self._begin()

    def opening(self) -> str:
        """Return a line about the run."""
        about = self.records.provenance()
        return f"{self.records.folder}: {self.total_steps:,} steps, layout {about['layout']} on {about['device']}"

    def look(self) -> None:
        """Show what the run has written since the last call."""
        rows = self._steps.read()
        if self._steps.replaced:
            self.screen.leave()
            self._begin()
            say(f"the run goes on after step {rows[-1]['step'] if rows else 0}")
        evaluations = self._evaluations.read()
        if self._evaluations.replaced:
            self._evaluated = []
        # Those of before the first look are history: the newest one stands for them.
        shown = evaluations if self._evaluated else evaluations[-1:]
        self._evaluated += evaluations
        for row in shown:
            self.screen.show_evaluation(row["step"], row)
        for row in rows:
            self._seconds += row["seconds"]
            if row is not rows[-1]:
                self.screen.add(row)
        if rows:
            self.step, self._quiet = rows[-1]["step"], QUIET_SECONDS
            self.screen.show(self.step, rows[-1], self._seconds)
        elif self.step and (seconds := time.time() - self.records.last_step_time()) > self._quiet:
            self._quiet = 2 * seconds
            say(f"no step for {duration(seconds)}: the run evaluates, saves, generates, waits or hangs", error=True)

    def closing(self, running: bool) -> list[str]:
        """Return the last lines. running: whether the run goes on."""
        lines = []
        if len(self._evaluated) > 1:
            first, last = self._evaluated[0], self._evaluated[-1]
            lines.append(f"evaluation after step {last['step']}: {summary(last)}; before: {summary(first)}")
        folder, of_total = self.records.folder, f"step {self.step} of {self.total_steps}"
        if running:
            return [*lines, f"the run goes on, after {of_total}"]
        if self.step == self.total_steps:
            return [*lines, f"done: {of_total}"]
        if not self.step:
            return [*lines, f"the run ended before its first step; start it again with output_dir={folder}"]
        last = self.records.last_step_time()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last))
        return [
            *lines,
            f"the run ended early, after {of_total}, at {at} ({duration(time.time() - last)} ago); go on with the same "
            f"command, checkpoint.resume=true and output_dir={folder}",
        ]

    def _begin(self) -> None:
        self._seconds = 0.0
        hidden = ("mfu",) if str(self.records.provenance().get("device")).startswith("CPU") else ()
        self.total_steps = self.records.total_steps()
        self.screen = Screen(0, self.total_steps, hidden)


if __name__ == "__main__":
    sys.exit(main())
