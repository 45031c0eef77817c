"""What a dry run waits for and launches, beside what is pinned: `device_counts.json`, by row, phase and place.

    cd tests; python -m support.plans.device_lint

writes numbers that fell into the table, and rows that are new. Numbers that rose are for a person to write, who knows
why. A place is a file and a function, which stay where they are
when lines move; what differs from the table is told by file:line.
"""

import ast
import functools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from isoloss.parallel.runtime.versions import SUPPORTED_MEGATRON
from isoloss.tools.plan.phases import HALF
from isoloss.tools.plan.recorder import SOURCES
from isoloss.tools.plan.report import PhaseReport, RankReport
from support.models import families
from support.plans import dry_runs

LOWER = "cd tests; python -m support.plans.device_lint"
PINNED = Path(__file__).parents[2] / "numerics/device_counts.json"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024, "head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA_OF = {"qwen3.5-moe": {"shared_expert_intermediate_size": 64}}  # families with more than these sizes
RL = ("rollout.backend=sglang", "rollout.servers=[http://a:1]", "reward.function=math", "data.train=[x]",
      "rollout.max_new_tokens=32")  # fmt: skip
# Recipe, family, rank of four, whether it saves, loads and exports, and keys.
ROWS = {
    "tp": ("sft", "qwen3", 0, True, "parallel.tp=2"),
    "interleaved": ("sft", "qwen3", 0, True, "parallel.pp=2", "parallel.vpp=2"),
    "ulysses and ring": ("sft", "qwen3", 0, False, "parallel.ulysses=2", "parallel.ring=2"),
    "experts": ("sft", "qwen3-moe", 0, True, "parallel.ep=2", "parallel.tp=2", "memory.recompute=full"),
    "adapter": ("sft", "qwen3", 0, False, "parallel.tp=2", "lora.rank=8"),
    "adapters of experts": ("sft", "qwen3-moe", 0, False, "parallel.ep=2", "parallel.tp=2", "memory.recompute=full",
                            "lora.rank=8"),
    "delta rule": ("sft", "qwen3.5", 0, True, "parallel.tp=2"),
    "delta rule and experts on the context axes": ("sft", "qwen3.5-moe", 0, False, "parallel.ulysses=2",
                                                   "parallel.ring=2", "parallel.ep=2"),
    "critic and reference on the last stage": ("grpo", "qwen3", 2, False, "parallel.pp=2", "algorithm.advantage=gae",
                                         "algorithm.kl_coef=0.1", *RL),
    "weights to servers without sequence parallelism": ("dapo", "qwen3", 0, False, "parallel.tp=2",
                                                    "parallel.sequence_parallel=false", "algorithm.overlong_buffer=8",
                                                    *RL),
}  # fmt: skip
Counts = Mapping[str, Mapping[str, int]]  # phase -> what and where -> how often


def row(folder: Path, name: str, *faults: str) -> dry_runs.Row:
    """folder: for the model and what is saved."""
    recipe, family, rank, files, *keys = ROWS[name]
    model = folder / f"model of {name}"
    model.mkdir(exist_ok=True)
    layers = {"num_hidden_layers": 4 if name == "interleaved" else 2}  # one a stage
    changes = SIZES | layers | (EXPERTS if "moe" in family else {})
    changes |= DELTA_OF.get(family, {})
    (model / "config.json").write_text(json.dumps(families.published(family, **changes)))
    given = [f"model.path={model}", "train.precision=bf16", "batch.max_tokens=512", "data.max_length=64", *keys]
    saved = str(folder / name) if files and not faults else None
    return dry_runs.Row(recipe, given, 4, rank, "gpu", halves=True, files=saved, faults=faults)


# ---- what was counted ------------------------------------------------------------------------------------------------


def sites(phase: PhaseReport) -> Counter[tuple[str, str]]:
    """(what, site) -> how often."""
    waits = Counter({(f"wait, {kind}", site): count for kind, site, count in phase.waits})
    return waits + Counter({("launches", site): count for site, count in phase.launch_sites.items()})


def sites_by_phase(report: RankReport) -> dict[str, Counter[tuple[str, str]]]:
    """Forward and backward is split into what every micro-batch does and what is done once.

    Raises ValueError where it is not the one plus so many of the other.
    """
    found = {phase.name: sites(phase) for phase in report.phases if not phase.name.startswith("build")}
    for shorter in [name for name in found if name.endswith(HALF)]:
        name = shorter.removesuffix(HALF)
        whole, half = found.pop(name), found.pop(shorter)
        each, rest = Counter(), Counter()
        for key in whole | half:
            each[key], left = divmod(2 * (whole[key] - half[key]), report.micro_batches)
            rest[key] = whole[key] - each[key] * report.micro_batches
            if left:
                raise ValueError(f"{name}: {key} {whole[key]} times, and {half[key]} of half the micro-batches")
        found |= {f"{name}, a micro-batch": +each, f"{name}, once": +rest}
    return found


def counts(report: RankReport) -> Counts:
    """By place: waits by function, launches by file."""
    found: dict[str, dict[str, int]] = {}
    for phase, by_site in sites_by_phase(report).items():
        total = Counter()
        for (what, site), count in by_site.items():
            total[f"{what}: {place(what, site)}"] += count
        found[phase] = dict(sorted(total.items()))
    return found


def place(what: str, site: str) -> str:
    file, _, line = site.partition(" ")[0].partition(":")
    return file if what == "launches" or not line else f"{file} {function_at(file, int(line))}"


def function_at(file: str, line: int) -> str:
    """The innermost function around a line, with what it stands in. file: as a dry run calls it."""
    around = [name for name, first, last in _functions(file) if first <= line <= last]
    return ".".join(around) or "module"


@functools.cache
def _functions(file: str) -> list[tuple[str, int, int]]:
    folder, title = next(each for each in SOURCES.items() if file.startswith(each[1]))
    nodes = ast.walk(ast.parse(Path(folder + file.removeprefix(title)).read_text(encoding="utf-8")))
    named = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return sorted(((n.name, n.lineno, n.end_lineno or n.lineno) for n in named), key=lambda each: each[1:])


# ---- beside what is pinned -------------------------------------------------------------------------------------------


def pinned() -> dict[str, Counts]:
    return json.loads(PINNED.read_text(encoding="utf-8")) if PINNED.exists() else {}


def differences(expected: Counts, report: RankReport) -> list[str]:
    """A line for every number that is not the pinned one. The numbers are those of one release of Megatron-Core; in
    another one fewer are right as well."""
    found, lines = counts(report), []
    for phase in dict.fromkeys([*expected, *found]):
        was, now = expected.get(phase, {}), found.get(phase, {})
        for key in sorted(was.keys() | now.keys()):
            before, after = was.get(key, 0), now.get(key, 0)
            if after > before:
                lines.append(f"{phase}: {key}: {after}, more than the pinned {before}: {_told(report, phase, key)}")
            elif after < before and version("megatron-core") == SUPPORTED_MEGATRON:
                lines.append(f"{phase}: {key}: {after}, fewer than the pinned {before}: lower the number: {LOWER}")
    return lines


def _told(report: RankReport, phase: str, key: str) -> str:
    found = sites_by_phase(report)[phase]
    told = [(count, site) for (what, site), count in found.items() if f"{what}: {place(what, site)}" == key]
    return ", ".join(f"{count} at {site}" for count, site in sorted(told, reverse=True))


def lowered(old: Mapping[str, Counts], reports: Mapping[str, RankReport]) -> dict[str, Counts]:
    """The table with what fell. Of rows that it has nothing is added; rows that are gone are left out."""
    table: dict[str, Counts] = defaultdict(dict)
    for name, report in reports.items():
        now = counts(report)
        if name in old:
            least = {
                phase: {key: min(count, now.get(phase, {}).get(key, 0)) for key, count in was.items()}
                for phase, was in old[name].items()
            }
            now = {phase: kept for phase, was in least.items() if (kept := {k: n for k, n in was.items() if n})}
        table[name] = now
    return table


def run_all(folder: Path, names: Iterable[str]) -> dict[str, RankReport]:
    rows = [row(folder, name) for name in names]
    return dict(zip(names, dry_runs.in_a_process(rows, folder / "rows.json")))


def main(argv: Sequence[str] | None = None) -> int:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        reports = run_all(Path(folder), [*ROWS])
    table = lowered(pinned(), reports)
    PINNED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    higher = [f"{name}: {line}" for name, report in reports.items() for line in differences(table[name], report)]
    print(*higher, sep="\n")
    return int(bool(higher))


if __name__ == "__main__":
    sys.exit(main())
