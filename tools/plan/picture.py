"""Draw a plan: memory of every stage by kind, peaks of the phases, and the place of every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss.engine.memory.limits import GIB
from isoloss.parallel import Layout
from isoloss.tools.plan.hardware import GPUS_PER_NODE
from isoloss.tools.plan.report import RankReport

MIB = 1 << 20
FILLED = 1 / 3  # share of what fits that a peak has to fill, or the axis ends above the peak


@dataclass(frozen=True)
class Scale:
    """The axis of memory of both panels.

    unit, nbytes: name and bytes of the unit of the next two.
    top: end of the axis. limit: size that fits.
    """

    unit: str
    nbytes: int
    top: float
    limit: float

    @property
    def shown(self) -> bool:
        return self.limit <= self.top

    def label(self) -> str:
        if self.shown:
            return f"{self.unit} (dashed: {self.limit:.1f} fit)"
        return f"{self.unit} (of {self.limit * self.nbytes / GIB:.1f} GiB that fit)"


def scale_of(largest: float, most: float) -> Scale:
    """Return an axis for peaks of at most `largest` bytes: it ends at the limit of `most` bytes, if that is not far."""
    unit, nbytes = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    top = max(largest, most) if largest >= FILLED * most else largest
    return Scale(unit, nbytes, 1.1 * top / nbytes, most / nbytes)


def draw(stages: Sequence[RankReport], layout: Layout, most: float, subject: str, file: Path) -> None:
    """Draw a plan into `file`. most: bytes that tensors may take. subject: recipe, model and GPUs, for the title.
    Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure  # its import takes a second

    nodes = -(-layout.world_size // GPUS_PER_NODE)
    heights = 4.2, 0.6 + 0.4 * nodes  # inches
    figure = Figure(figsize=(11, sum(heights) + 0.8), layout="constrained")
    panels = figure.subplot_mosaic("MP;RR", height_ratios=heights)
    memory, phases, ranks = (panels[name] for name in "MPR")
    scale = scale_of(max(report.peak.peak for report in stages), most)
    _memory(memory, stages, scale)
    _phases(phases, stages, scale)
    _ranks(ranks, layout, nodes)
    figure.suptitle(f"{subject}, layout {layout}", fontsize="large")
    figure.savefig(file, dpi=100)


def _memory(panel, stages: Sequence[RankReport], scale: Scale) -> None:
    bottom = [0.0] * len(stages)
    for kind in dict.fromkeys(kind for report in stages for kind in report.peak.peak_kinds):
        heights = [report.peak.peak_kinds.get(kind, 0) / scale.nbytes for report in stages]
        panel.bar(range(len(stages)), heights, bottom=bottom, label=kind, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for stage, height in enumerate(bottom):
        panel.text(stage, height, f"{height:.1f}", ha="center", va="bottom", fontsize="small")
    panel.set_xticks(range(len(stages)), [f"stage {report.stage}" for report in stages])
    panel.set_xlim(-1, max(len(stages), 2))  # a single stage is no wall
    _axis(panel, scale)
    panel.set_title("memory of a rank at its peak, by kind")
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _phases(panel, stages: Sequence[RankReport], scale: Scale) -> None:
    for report in stages:
        peaks = [phase.peak / scale.nbytes for phase in report.phases]
        panel.plot(peaks, marker="o", label=f"stage {report.stage}")
    names = [phase.name for phase in stages[0].phases]
    panel.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize="small")
    panel.margins(x=0.15)
    _axis(panel, scale)
    panel.set_title("peak of each phase")
    panel.legend(fontsize="small")


def _axis(panel, scale: Scale) -> None:
    if scale.shown:
        panel.axhline(scale.limit, color="black", linestyle="--", linewidth=1)
    panel.set_ylabel(scale.label())
    panel.set_ylim(0, scale.top)
    panel.grid(axis="y", alpha=0.3)


def place(rank: int, layout: Layout) -> tuple[int, int]:
    """Return a rank's (pipeline rank, data-parallel rank): Megatron's order is tp, context, dp, pp, innermost first."""
    stage, of_stage = divmod(rank, layout.world_size // layout.pp)
    return stage, of_stage // (layout.tp * layout.context)


def _ranks(panel, layout: Layout, nodes: int) -> None:
    """Draw a row for each node, and in a cell the rank, its pipeline rank by colour, and its data-parallel rank."""
    columns = min(GPUS_PER_NODE, layout.world_size)
    grid = [[float("nan")] * columns for _ in range(nodes)]
    for rank in range(layout.world_size):
        row, column = divmod(rank, GPUS_PER_NODE)
        grid[row][column], dp = place(rank, layout)
        panel.text(column, row, f"rank {rank}, dp {dp}", ha="center", va="center", fontsize=7)
    panel.imshow(grid, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    panel.set_xticks([column + 0.5 for column in range(columns - 1)], minor=True)
    panel.set_yticks([row + 0.5 for row in range(nodes - 1)], minor=True)
    panel.grid(which="minor", color="white", linewidth=3)
    panel.tick_params(which="minor", length=0)
    panel.set_xticks(range(columns))
    panel.set_yticks(range(nodes))
    panel.set_xlabel("GPU of the node")
    panel.set_ylabel("node")
    panel.set_title("place of each rank" + ("; colour: pipeline rank" if layout.pp > 1 else ""))
