"""The presets for clusters: what their first lines claim, and what dry runs plan. python -m
support.plans.planned_presets [RECIPE/NAME ...] writes the claims anew, and prints the rows of docs/presets.md."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.memory.limits import GIB
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout
from isoloss.recipes.launch import CONF, RECIPES, compose_config, presets
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.phases import GENERATION
from isoloss.tools.plan.report import PhaseReport, RankReport
from isoloss.tools.plan.search import Candidate, timed
from support.models import published
from support.plans import dry_runs

LONG = {"max_position_embeddings": 131072}  # what the presets of 128k take
# What a preset is planned for, by the beginning of its name.
MODELS = {
    "8b": published.QWEN3_8B | LONG,
    "32b": published.QWEN3_32B | LONG,
    "70b": published.LLAMA_70B,
    "30b_a3b": published.QWEN3_30B_A3B | LONG,
    "27b": published.QWEN35_27B,
    # Without the kinds of layers, which follow from their number.
    "26b_a4b": published.GEMMA_4_26B_A4B | {"layer_types": None},
}
# Layers after which the kinds of a model's layers come again.
UNITS = {"27b": 4, "26b_a4b": 6}
SERVERS = ["rollout.servers=[http://node1:30000]"]
CLAIM = re.compile(r"^# (\d+) GPUs?, ([a-z0-9+]+): (\d+\.\d) GiB, (\d+\.\d) s a step$", re.MULTILINE)
H100 = GPUS["h100"]


@dataclass(frozen=True)
class Claim:
    """A line of a preset. peak: GiB, of the pipeline stage that has most. seconds: of an optimizer step."""

    gpus: int
    layout: str
    peak: float
    seconds: float


@dataclass(frozen=True)
class Preset:
    recipe: str
    name: str

    @property
    def file(self) -> Path:
        return CONF / self.recipe / "preset" / f"{self.name}.yaml"

    @property
    def size(self) -> str:
        return next(size for size in MODELS if self.name.startswith(f"{size}_"))

    @property
    def claims(self) -> list[Claim]:
        return [Claim(int(n), layout, float(peak), float(s)) for n, layout, peak, s in CLAIM.findall(self.text)]

    @property
    def text(self) -> str:
        return self.file.read_text()

    def overrides(self, folder: Path, *more: str, model: dict | None = None) -> list[str]:
        """folder: where a config.json of its model is put."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model or MODELS[self.size]))
        servers = SERVERS if "backend: sglang" in self.text else []
        return [f"preset={self.name}", f"model.path={folder}", "data.train=[rows.jsonl]", *servers, *more]

    def config(self, folder: Path, *more: str, model: dict | None = None) -> Config:
        return compose_config(self.recipe, RECIPES[self.recipe].config, self.overrides(folder, *more, model=model))[0]

    def __str__(self) -> str:
        return f"{self.recipe}/{self.name}"


@cache
def architecture(folder: Path) -> Architecture:
    return read_architecture(folder)


def cluster_presets(*recipes: str) -> list[Preset]:
    return [
        Preset(recipe, name)
        for recipe in recipes or ("sft", "grpo", "dapo")
        for name in presets(recipe)
        if name.endswith(("_1gpu", "_h100"))
    ]


# Layers of a stage in dry runs: (computed again, kept).
BOTH, MORE_AGAIN, MORE_KEPT = (1, 1), (2, 1), (1, 2)
AGAIN, STILL_MORE_AGAIN = (1, 0), (2, 0)
KEPT, STILL_MORE_KEPT = (0, 1), (0, 2)


def layers_of_stage(config: Config, arch: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    """Those computed again, and those kept."""
    layers = stage_layers(arch, layout)[stage]
    again = 0 if config.memory.recompute == "none" else min(config.memory.recompute_layers or layers, layers)
    return again, layers - again


def depths(again: int, kept: int) -> Sequence[tuple[int, int]]:
    """Of the dry runs that tell what a layer of either kind adds."""
    if again and kept:
        return BOTH, MORE_AGAIN, MORE_KEPT
    return (AGAIN, STILL_MORE_AGAIN) if again else (KEPT, STILL_MORE_KEPT)


@dataclass(frozen=True)
class Plan:
    """Dry runs of a preset on the fewest GPUs that it claims, one rank of every pipeline stage.

    Of models with few layers: all layers of a model are alike, or every `unit` of them, so each adds the same. With the
    whole optimizer on the device, for a copy to CPU memory needs values: the share that is kept there is taken off
    after.
    """

    preset: Preset
    folder: Path

    @cached_property
    def layout(self) -> Layout:
        return self.config.parallel.layout().with_world(self.preset.claims[0].gpus)

    @cached_property
    def config(self) -> Config:
        return self.preset.config(self.folder)

    @cached_property
    def arch(self) -> Architecture:
        return architecture(self.folder)

    @property
    def unit(self) -> int:
        return UNITS.get(self.preset.size, 1)

    def _units(self, stage: int) -> tuple[int, int]:
        again, kept = layers_of_stage(self.config, self.arch, self.layout, stage)
        assert again % self.unit == kept % self.unit == 0
        return again // self.unit, kept // self.unit

    def depths(self) -> Iterator[tuple[int, tuple[int, int]]]:
        for stage in range(self.layout.pp):
            for depth in depths(*self._units(stage)):
                yield stage, depth

    def rows(self) -> Iterator[dry_runs.Row]:
        layout = self.layout
        for stage, (again, kept) in self.depths():
            layers = (again + kept) * self.unit
            model = MODELS[self.preset.size] | {"num_hidden_layers": layout.pp * layers}
            keys = [f"parallel.stage_layers={[layers] * layout.pp}".replace(" ", "")] if layout.pp > 1 else []
            keys += [f"memory.recompute_layers={again * self.unit}"] if again else []
            keys += ["memory.offload_optimizer=0"]
            folder = self.folder.with_name(f"{self.folder.name}-{again}-{kept}-{layout.pp}")
            given = self.preset.overrides(folder, *keys, model=model)
            rank = stage * layout.world_size // layout.pp
            yield dry_runs.Row(self.preset.recipe, given, layout.world_size, rank, micro_batches=layout.pp)

    def peaks(self, reports: Sequence[RankReport]) -> list[float]:
        """Bytes of each stage, with the whole optimizer on the device. reports: of `rows`."""
        return [_at(layers, of_stage) for layers, of_stage in self._stages(reports)]

    def while_servers_generate(self, reports: Sequence[RankReport]) -> list[float]:
        """GiB that the trainer has on the device of each stage then. reports: of `rows`."""
        return [
            _on_the_line(layers, {depth: report.phase(GENERATION).peak for depth, report in of_stage.items()}) / GIB
            for layers, of_stage in self._stages(reports)
        ]

    def _stages(self, reports: Sequence[RankReport]) -> Iterator[tuple[tuple[int, int], dict]]:
        """The units of every stage, and its reports by depth."""
        found: dict[int, dict[tuple[int, int], RankReport]] = {}
        for (stage, depth), report in zip(self.depths(), reports, strict=True):
            found.setdefault(stage, {})[depth] = report
        for stage, of_stage in found.items():
            yield self._units(stage), of_stage

    def on(self, gpus: int, peaks: Sequence[float]) -> list[float]:
        """GiB of each stage on so many GPUs: data-parallel ranks share the optimizer, and nothing else changes."""
        on_device = replace(self.config, memory=replace(self.config.memory, offload_optimizer=0.0))
        counted = step_memory(on_device, self.arch, self.layout)
        wanted = step_memory(self.config, self.arch, self.config.parallel.layout().with_world(gpus))
        return [(peak - a.optimizer + b.optimizer) / GIB for peak, a, b in zip(peaks, counted, wanted, strict=True)]

    def candidate(self, gpus: int) -> Candidate:
        """Time, and memory, by the formulas of the search."""
        layout = self.config.parallel.layout().with_world(gpus)
        peaks = [stage.peak for stage in step_memory(self.config, self.arch, layout)]
        return timed(self.config, self.arch, layout, peaks, H100)


def _at(layers: tuple[int, int], reports: Mapping[tuple[int, int], RankReport]) -> float:
    """Peak of a stage with so many layers, by the line through what fewer take, phase by phase. What weights on their
    way take besides does not grow: a bucket, and the largest tensor."""
    peaks = []
    for phase in next(iter(reports.values())).phases:
        counted = {depth: report.phase(phase.name).peak for depth, report in reports.items()}
        if phase.name == "weight sync":
            kept = {depth: resident(report.phase(phase.name)) for depth, report in reports.items()}
            peaks.append(_on_the_line(layers, kept) + max(counted[depth] - kept[depth] for depth in kept))
        else:
            peaks.append(_on_the_line(layers, counted))
    return max(peaks)


def resident(phase: PhaseReport) -> int:
    return sum(phase.peak_kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))


def _on_the_line(layers: tuple[int, int], counted: Mapping[tuple[int, int], int]) -> float:
    base, *others = counted
    value = float(counted[base])
    for other in others:
        kind = 0 if other[0] > base[0] else 1
        value += (layers[kind] - base[kind]) * (counted[other] - counted[base]) / (other[kind] - base[kind])
    return value


def written(plan: Plan, reports: Sequence[RankReport]) -> tuple[list[str], list[str]]:
    """The lines of claims as they should be, and the rows of docs/presets.md."""
    claims, page = [], []
    peaks = plan.peaks(reports)
    for claim in plan.preset.claims:
        stages, step = plan.on(claim.gpus, peaks), plan.candidate(claim.gpus)
        gpus = "1 GPU" if claim.gpus == 1 else f"{claim.gpus} GPUs"
        claims.append(f"# {gpus}, {step.layout}: {max(stages):.1f} GiB, {step.seconds:.1f} s a step")
        told = " / ".join(f"{peak:.1f}" for peak in stages)
        page.append(
            f"| `{plan.preset.name}` | {claim.gpus} | `{step.layout}` | {told} | {step.seconds:.1f} | "
            f"{step.tokens_per_gpu_second:,.0f} |"
        )
    return claims, page


def main() -> None:
    wanted = [preset for preset in cluster_presets("sft", "grpo") if not sys.argv[1:] or str(preset) in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as name:
        plans = [Plan(preset, Path(name) / preset.size) for preset in wanted]
        reports = iter(dry_runs.in_a_process([row for plan in plans for row in plan.rows()], Path(name) / "rows.json"))
        for plan in plans:
            claims, page = written(plan, list(islice(reports, len(list(plan.depths())))))
            twins = [plan.preset] if plan.preset.recipe == "sft" else [plan.preset, Preset("dapo", plan.preset.name)]
            for twin in twins:
                lines = iter(claims)
                twin.file.write_text(CLAIM.sub(lambda _, lines=lines: next(lines), twin.text))
            print(*page, sep="\n")


if __name__ == "__main__":
    main()
