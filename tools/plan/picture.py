"""Draw a plan: memory of every stage by kind, peaks of the phases, and the place of every rank."""

from collections.abc import Sequence
from pathlib import Path

from isoloss.engine.memory.limits import GIB
from isoloss.parallel import Layout
from isoloss.tools.plan.hardware import GPUS_PER_NODE
from isoloss.tools.plan.report import RankReport


def draw(stages: Sequence[RankReport], layout: Layout, most: float, file: Path) -> None:
    """Draw a plan into `file`. most: bytes that tensors may take. Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure  # its import takes a second

    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplot_mosaic("MP;RR")
    memory, phases, ranks = (panels[name] for name in "MPR")
    _memory(memory, stages, most)
    _phases(phases, stages, most)
    _ranks(ranks, layout)
    figure.savefig(file, dpi=110)


def _memory(panel, stages: Sequence[RankReport], most: float) -> None:
    names = [f"stage {report.stage}" for report in stages]
    bottom = [0.0] * len(stages)
    for kind in dict.fromkeys(kind for report in stages for kind in report.peak.peak_kinds):
        heights = [report.peak.peak_kinds.get(kind, 0) / GIB for report in stages]
        panel.bar(names, heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights)]
    _limit(panel, most)
    panel.set_title("memory at the peak")
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _phases(panel, stages: Sequence[RankReport], most: float) -> None:
    for report in stages:
        panel.plot([phase.peak / GIB for phase in report.phases], marker="o", label=f"stage {report.stage}")
    names = [phase.name for phase in stages[0].phases]
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize="small")
    _limit(panel, most)
    panel.set_title("peak of each phase")
    panel.legend(fontsize="small")


def _limit(panel, most: float) -> None:
    panel.axhline(most / GIB, color="black", linestyle="--", linewidth=1)
    panel.set_ylabel("GiB (dashed: what fits)")
    panel.set_ylim(bottom=0)


def place(rank: int, layout: Layout) -> tuple[int, int]:
    """Return a rank's (pipeline rank, data-parallel rank): Megatron's order is tp, context, dp, pp, innermost first."""
    stage, of_stage = divmod(rank, layout.world_size // layout.pp)
    return stage, of_stage // (layout.tp * layout.context)


def _ranks(panel, layout: Layout) -> None:
    """Draw a row for each node, and in a cell the rank, its pipeline rank by colour, and its data-parallel rank."""
    nodes = -(-layout.world_size // GPUS_PER_NODE)
    grid = [[float("nan")] * min(GPUS_PER_NODE, layout.world_size) for _ in range(nodes)]
    for rank in range(layout.world_size):
        row, column = divmod(rank, GPUS_PER_NODE)
        grid[row][column], dp = place(rank, layout)
        panel.text(column, row, f"{rank}\ndp {dp}", ha="center", va="center", fontsize=6)
    panel.imshow(grid, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    panel.set_yticks(range(nodes))
    panel.set_xlabel("GPU of the node")
    panel.set_ylabel("node")
    panel.set_title(f"ranks of {layout}; colour: pipeline rank")
