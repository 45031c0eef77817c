"""Does a run fit its GPUs, and what will a step cost? From its configuration, without a GPU and without weights.

    python -m isoloss.tools.plan sft preset=8b_h100 model.path=DIR --gpus 8
    python -m isoloss.tools.plan sft preset=32b_h100 model.path=DIR --gpus 64 --gpu h200 --json plan.json

The real Engine takes a step as one rank of every pipeline stage, on tensors that have shapes and no values. So memory
is counted, not guessed: rows are full (batch.max_tokens) and every token is a target. model.path needs no more than
config.json. Seconds are an estimate, from the data sheet of the GPU.
Exit status: 0 it fits, 1 it does not, 2 a mistake in the arguments or the configuration.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from isoloss.engine.config import Config
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.parallel import Layout, UserError
from isoloss.recipes.launch import compose_config, print_error_once
from isoloss.tools import command_line
from isoloss.tools.dryrun.estimate import Estimate, estimate
from isoloss.tools.dryrun.hardware import ASSUMPTIONS, GIB, GPUS, MARGIN, Gpu
from isoloss.tools.dryrun.report import RankReport
from isoloss.tools.dryrun.stages import dry_runs

KINDS = ("weights", "gradients", "optimizer", "activations", "loss head", "exchange")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)  # keys may stand on both sides of an option
    try:
        config, _, preset = compose_config(arguments.recipe, Config, arguments.overrides)
        layout = config.parallel.layout().with_world(arguments.gpus)
        arch = read_architecture(hf_folder(config.model.path))
        stages = dry_runs(arguments.recipe, arguments.overrides, layout)
    except UserError as error:
        print_error_once(str(error))
        return 2
    gpu = GPUS[arguments.gpu]
    step = estimate(config, arch, layout, stages, gpu)
    fits = all(report.peak.peak + MARGIN <= gpu.memory for report in stages)
    if arguments.json is not None:
        plan = {"gpu": asdict(gpu), "margin": MARGIN, "fits": fits, "estimate": asdict(step)}
        arguments.json.write_text(json.dumps(plan | {"stages": [asdict(report) for report in stages]}, indent=1) + "\n")
    print(f"{arguments.recipe} preset={preset} on {arguments.gpus} x {gpu.name}: {layout}")
    print(table(stages, gpu, layout))
    print(told(step, fits, config))
    return 0 if fits else 1


def parser() -> command_line.Parser:
    parser = command_line.parser("plan", __doc__)
    parser.add_argument("recipe", choices=("sft",))
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run, over all nodes")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was counted")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="preset=NAME and keys of the recipe")
    return parser


def table(stages: Sequence[RankReport], gpu: Gpu, layout: Layout) -> str:
    """GiB of a rank of every stage at its peak, by kind."""
    del layout
    rows = [["GiB", *(f"stage {report.stage}" for report in stages)]]
    rows += [[kind, *(gib(report.peak.peak_kinds.get(kind, 0)) for report in stages)] for kind in KINDS]
    rows += [
        ["peak", *(gib(report.peak.peak) for report in stages)],
        ["with the margin", *(gib(report.peak.peak + MARGIN) for report in stages)],
        [f"of {gib(gpu.memory)}", *("fits" if r.peak.peak + MARGIN <= gpu.memory else "TOO MUCH" for r in stages)],
    ]
    lines = [f"{name:16}" + "".join(f"{value:>10}" for value in values) for name, *values in rows]
    lines += [f"peak of stage {r.stage}: {r.peak.name}, {r.peak.peak_site}" for r in stages]
    return "\n".join(lines)


def told(step: Estimate, fits: bool, config: Config) -> str:
    lines = [
        f"estimate: {step.seconds:.1f} s a step of {config.batch.global_size} rows of {config.data.max_length} tokens "
        f"in {step.micro_batches} micro-batches, {step.tokens_per_gpu_second:,.0f} tokens/s a GPU, MFU {step.mfu:.0%}",
        f"assumed: {ASSUMPTIONS}",
    ]
    if not fits:
        lines.append(f"to fit: lower batch.max_tokens={config.batch.max_tokens}, or recompute (docs/memory.md)")
    return "\n".join(lines)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
