"""Prove, on your data and configuration, that the loss and gradients of a step do not depend on the layout.

    python -m isoloss.tools.prove --layouts "tp2,pp2,ulysses2,ulysses8,tp2+pp2+ulysses2"
    python -m isoloss.tools.prove --layouts dp2,tp2 model.path=DIR data.train=FILE batch.global_size=64

One global batch runs under the reference layout (one rank, one micro-batch) and under every asked layout and token
budget. Loss, gradient norm and every parameter's gradient must agree up to rounding; the certificate is proof.json,
a table and a picture. `--plant BUG` plants a known bug, and the proof must then fail where the bug shows.
Exit status: 0 proved, 1 not (so it must be with a plant), 2 a mistake in the arguments, the configuration or the data.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from isoloss.engine import legality
from isoloss.engine.batch import Sample
from isoloss.engine.config import Config, LossConfig
from isoloss.engine.data import step_indices
from isoloss.engine.trainer import load_data
from isoloss.models.registry import read_architecture
from isoloss.parallel import Layout, UserError
from isoloss.recipes.launch import compose_config, tell_once
from isoloss.tools.parity import (
    TOLERANCE,
    Case,
    Comparison,
    Measurement,
    Tolerance,
    compare,
    freeze,
    measure,
    merge,
    reference_file,
)
from isoloss.tools.plants import NONE, PLANTS, Plant, Run
from isoloss.tools.pool import WorkerPool


@dataclass(frozen=True)
class Row:
    """One line of the certificate."""

    layout: str
    case: Case
    found: Measurement
    against: Comparison
    spoiled: bool  # whether the planted bug has to show here

    @property
    def as_expected(self) -> bool:
        return self.against.passed != self.spoiled


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m isoloss.tools.prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layouts", default="tp2,pp2,ulysses2,dp2,tp2+pp2+ulysses2", help="layouts, separated by commas"
    )
    parser.add_argument(
        "--budgets", default=None, help="token budgets of a micro-batch; default batch.max_tokens and 0 (all in one)"
    )
    parser.add_argument("--aggregations", default=None, help="aggregation modes; default loss.aggregation")
    parser.add_argument("--precision", choices=sorted(TOLERANCE), default="fp64")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a known bug to plant")
    parser.add_argument("--out", type=Path, help="folder of the certificate; default runs/proof, or runs/proof-BUG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="preset=NAME and keys of the sft recipe")
    arguments = parser.parse_args(argv)
    try:
        layouts = [Layout.parse(text) for text in arguments.layouts.split(",")]
        config, _, _ = compose_config("sft", Config, arguments.overrides)
        plant = PLANTS[arguments.plant] if arguments.plant else NONE
        budgets = [int(b) for b in arguments.budgets.split(",")] if arguments.budgets else [config.batch.max_tokens, 0]
        modes = arguments.aggregations.split(",") if arguments.aggregations else [config.loss.aggregation]
        losses = [loss_config(mode, config) for mode in modes]
        samples = first_batch(config, plant)
        rows = prove(
            config, samples, layouts, [Case(b, loss) for loss in losses for b in budgets], arguments.precision, plant
        )
    except UserError as error:
        tell_once(str(error))
        return 2
    out = arguments.out or Path("runs/proof" if plant is NONE else f"runs/proof-{plant.name}")
    return report(rows, out, config, TOLERANCE[arguments.precision], arguments.precision, plant)


def loss_config(mode: str, config: Config) -> LossConfig:
    """The configured loss in another mode."""
    length = (config.loss.norm_length or config.data.max_length) if mode == "seq-mean-token-sum-norm" else None
    return LossConfig(mode, length, config.loss.count_fully_masked)


def first_batch(config: Config, plant: Plant) -> list[Sample]:
    """The samples of optimizer step 0. With a plant, every token is a target (so that one at the border between two
    shards is) and a fully masked copy of a sample is added: some bugs show only there."""
    data = load_data(config)
    rows = step_indices(len(data.train), 0, config.batch.global_size, config.train.seed)
    samples = [dataclasses.replace(data.train[int(row)], group=index // 2) for index, row in enumerate(rows)]
    if plant is NONE:
        return samples
    everything = [dataclasses.replace(s, mask_T=torch.arange(len(s)) > 0) for s in samples]
    masked = dataclasses.replace(samples[0], mask_T=torch.zeros_like(samples[0].mask_T))
    return [*everything, masked]


def prove(
    config: Config,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    cases: Sequence[Case],
    precision: str,
    plant: Plant = NONE,
) -> list[Row]:
    """Run every case on every layout, against one rank with everything in one micro-batch, without the plant."""
    arch = read_architecture(config.model.path)
    for layout in layouts:
        legality.check(on_layout(config, layout, precision), arch, layout)
    frozen = freeze(samples)
    rows = []
    world = max(layout.world_size for layout in layouts)
    with tempfile.TemporaryDirectory(prefix="isoloss-proof-") as folder, WorkerPool(world) as pool:
        losses = list(dict.fromkeys(case.loss for case in cases))
        files = {loss: reference_file(folder, index) for index, loss in enumerate(losses)}
        whole = [Case(0, loss) for loss in losses]
        run = pool.run(
            1, measure, on_layout(config, Layout(), precision), frozen, whole, list(files.values()), NONE, True
        )
        references = dict(zip(losses, merge(run)))
        for layout in layouts:
            spread = on_layout(config, layout, precision)
            run = pool.run(layout.world_size, measure, spread, frozen, cases, [files[c.loss] for c in cases], plant)
            for case, found in zip(cases, merge(run)):
                against = compare(found, references[case.loss], TOLERANCE[precision])
                spoiled = plant.spoils(Run(layout, found.micro_batches, case.loss.aggregation))
                rows.append(Row(str(layout), case, found, against, spoiled))
                print(line(rows[-1]), flush=True)
    return rows


def on_layout(config: Config, layout: Layout, precision: str) -> Config:
    """The configuration of one world. Gradients are compared whole, so the optimizer is not the distributed one, nor on
    the host."""
    degrees = {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "ulysses", "ring", "ep", "etp")}
    stages = config.parallel.stage_layers
    parallel = dataclasses.replace(
        config.parallel,
        **degrees,
        stage_layers=stages if len(stages) == layout.pp * layout.vpp else (),
        sequence_parallel=layout.sequence_parallel,
        distributed_optimizer=False,
    )
    train = dataclasses.replace(config.train, precision=precision)
    memory = dataclasses.replace(config.memory, offload_optimizer=0.0)
    return dataclasses.replace(config, parallel=parallel, train=train, memory=memory)


def line(row: Row) -> str:
    budget = str(row.case.max_tokens or "all")
    against = row.against
    expected = "" if row.as_expected else "  (the plant shows here)" if against.passed else "  (nothing planted here)"
    return (
        f"{'pass' if against.passed else 'FAIL'}  {row.layout:24} {row.case.loss.aggregation:24} budget {budget:>6} "
        f"{row.found.micro_batches:3} micro-batches  loss {against.loss_error:.1e}  norm {against.norm_error:.1e}  "
        f"worst gradient {against.gradient_error:.1e} {against.worst}{expected}"
    )


def report(
    rows: Sequence[Row], folder: Path, config: Config, tolerance: Tolerance, precision: str, plant: Plant
) -> int:
    """Write proof.json and proof.png, say the verdict, return the exit status."""
    proved = all(row.against.passed for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    certificate = {
        "proved": proved,
        "plant": None if plant is NONE else plant.name,
        "precision": precision,
        "tolerance": dataclasses.asdict(tolerance),
        "versions": {name: version(name) for name in ("isoloss", "torch", "megatron-core")},
        "config": dataclasses.asdict(config),
        "runs": [
            {
                "layout": row.layout,
                "max_tokens": row.case.max_tokens,
                "aggregation": row.case.loss.aggregation,
                "loss": row.found.loss,
                "grad_norm": row.found.grad_norm,
                "weight_sum": row.found.weight_sum,
                "micro_batches": row.found.micro_batches,
                **dataclasses.asdict(row.against),
                "spoiled_by_plant": row.spoiled,
            }
            for row in rows
        ],
    }
    (folder / "proof.json").write_text(json.dumps(certificate, indent=2) + "\n")
    draw(rows, tolerance, folder / "proof.png")
    failed = [row for row in rows if not row.against.passed]
    if plant is not NONE:
        spoiled = [row for row in rows if row.spoiled]
        detected = sum(not row.against.passed for row in spoiled)
        untouched = len(rows) - len(spoiled)
        passed = sum(row.against.passed for row in rows if not row.spoiled)
        found = f"detected in {detected} of {len(spoiled)} spoiled runs"
        print(f"plant {plant.name}: {found}; {passed} of {untouched} others pass")
        caught = all(row.as_expected for row in rows)
        print("as it must be: the bug is caught" if caught else "the proof did NOT catch the bug as it must")
    for row in failed if plant is NONE else ():
        print(f"not proved on {row.layout}: {row.against.reason}")
    print(
        f"{'proved' if proved else 'NOT proved'}: {len(rows) - len(failed)} of {len(rows)} runs agree; "
        f"certificate in {folder}"
    )
    return 0 if proved else 1


def draw(rows: Sequence[Row], tolerance: Tolerance, path: Path) -> None:
    """The relative errors of every run on a logarithmic axis, with the tolerances."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.25 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.layout}  {row.case.loss.aggregation}  {row.case.max_tokens or 'all'}" for row in rows]
    floor = 1e-18  # a difference of exactly 0 has no logarithm
    for label, marker, limit, values in (
        ("loss", "o", tolerance.loss, [row.against.loss_error for row in rows]),
        ("worst gradient", "s", tolerance.gradient, [row.against.gradient_error for row in rows]),
    ):
        points = axes.plot([max(v, floor) for v in values], range(len(rows)), marker, label=label)
        axes.axvline(limit, linestyle="--", color=points[0].get_color(), label=f"{label}: tolerance")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("relative error against one rank and one micro-batch")
    axes.legend(fontsize=7, loc="best")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
