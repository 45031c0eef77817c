"""Draw the reward of reinforcement learning runs over their optimizer steps.

    python -m isoloss.tools.reward_curve runs/grpo-tiny
    python -m isoloss.tools.reward_curve runs/grpo-tiny runs/dapo-tiny --labels GRPO,DAPO --out rewards.png

Reads eval.jsonl of each run: the reward on held-out prompts. Of a run without data.eval it draws the mean reward of the
training batches, from metrics.jsonl, and the title says so. Groups that dynamic sampling dropped and redrew get a panel
of their own. Prints a line for each run: where its reward started, where it ended, and the rise.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss.engine.run.records import METRICS, RunRecords
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools import command_line


@dataclass(frozen=True)
class Curve:
    """The rewards of a run.

    steps, rewards: optimizer steps and mean reward of each evaluation, or of each batch. held_out: whether the rewards
    are of held-out prompts, not of training. batches: for each generated batch the first
    optimizer step that it feeds, and the numbers of groups drawn and dropped.
    """

    label: str
    steps: tuple[int, ...]
    rewards: tuple[float, ...]
    batches: tuple[tuple[int, int, int], ...] = ()
    held_out: bool = True

    @property
    def drawn(self) -> int:
        return sum(drawn for _, drawn, _ in self.batches)

    @property
    def dropped(self) -> int:
        return sum(dropped for _, _, dropped in self.batches)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 drawn, 2 a mistake of the user, in one line on standard error."""
    parser = command_line.parser("reward_curve", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run of grpo or dapo")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: reward_curve.png in the first RUN")
    parser.add_argument("--labels", metavar="A,B,...", help="one for each RUN; default: their paths")
    arguments = parser.parse_args(argv)
    labels = arguments.labels.split(",") if arguments.labels else [str(run) for run in arguments.runs]
    out = arguments.out or arguments.runs[0] / "reward_curve.png"
    try:
        if len(labels) != len(arguments.runs):
            raise UserError(f"--labels={arguments.labels} names {len(labels)} of {len(arguments.runs)} runs: name each")
        curves = [read_curve(run, label) for run, label in zip(arguments.runs, labels)]
        if out.suffix != ".png" or not out.parent.is_dir():
            raise UserError(f"--out={out} must be a .png file in a folder that exists")
    except UserError as mistake:
        print(f"isoloss: error: {mistake}", file=sys.stderr)
        return 2
    draw(curves, out)
    print(f"reward curve in {out}")
    print(*map(summary, curves), sep="\n")
    return 0


def read_curve(run: Path, label: str) -> Curve:
    """Read the curve of a run. Raise UserError if the folder holds no run with rewards."""
    records = RunRecords(run)
    evaluations = [row for row in records.evaluations() if "reward_mean" in row]
    # Every optimizer step has the numbers of its batch, and several may share one: the count of prompts identifies it.
    rows = [row for row in records.metrics() if "prompts_drawn" in row]
    first = list({row["prompts_drawn"]: row for row in reversed(rows)}.values())[::-1]
    rewarded = evaluations or [row for row in first if "reward_mean" in row]
    if not rewarded:
        raise UserError(f"{run}/eval.jsonl and {METRICS} hold no reward_mean: give a run of grpo or dapo")
    return Curve(
        label,
        tuple(row["step"] for row in rewarded),
        tuple(row["reward_mean"] for row in rewarded),
        tuple((row["step"], row["groups_drawn"], row["groups_dropped"]) for row in first),
        held_out=bool(evaluations),
    )


def summary(curve: Curve) -> str:
    """Describe a run in one line."""
    start, end = curve.rewards[0], curve.rewards[-1]
    kind = "held-out" if curve.held_out else "training"
    line = f"{curve.label}: {kind} reward {start:.3f} -> {end:.3f} ({end - start:+.3f}) in {curve.steps[-1]} steps"
    if curve.dropped:
        line += f"; dynamic sampling dropped and redrew {curve.dropped} of {curve.drawn} groups"
    return line


def title(curves: Sequence[Curve]) -> str:
    """Return the title of the picture."""
    if all(curve.held_out for curve in curves):
        return "Mean reward on held-out prompts"
    if not any(curve.held_out for curve in curves):
        return "Mean reward of training batches (no held-out prompts)"
    return "Mean reward on held-out prompts, or of training batches (dashed)"


def draw(curves: Sequence[Curve], out: Path) -> None:
    from matplotlib.figure import Figure  # imported only when all is read: it takes a second
    from matplotlib.ticker import MaxNLocator

    sampled = [curve for curve in curves if curve.dropped]
    figure = Figure(figsize=(7, 6 if sampled else 4), layout="constrained")
    panels = figure.subplots(2 if sampled else 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + bool(sampled)])
    for curve in curves:
        mixed = not curve.held_out and any(other.held_out for other in curves)
        style = {"marker": "o", "markersize": 3, "linestyle": "--" if mixed else "-"}
        (line,) = panels[0, 0].plot(curve.steps, curve.rewards, **style, label=curve.label)
        if curve.dropped:
            shares = [dropped / drawn for _, drawn, dropped in curve.batches]
            panels[1, 0].plot([step for step, _, _ in curve.batches], shares, color=line.get_color())
    panels[0, 0].set_title(title(curves))
    panels[0, 0].set_ylabel("mean reward")
    rewards = [reward for curve in curves for reward in curve.rewards]
    panels[0, 0].set_ylim(min(0.0, *rewards) - 0.02, max(1.0, *rewards) + 0.02)
    panels[0, 0].legend()
    if sampled:
        panels[1, 0].set_ylabel("groups dropped / drawn")
        panels[1, 0].set_ylim(0, 1)
    panels[-1, 0].set_xlabel("optimizer steps")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
