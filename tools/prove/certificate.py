"""Write the result of a proof: a line a run, the claims with the runs that exercised them, proof.json and proof.png."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.parallel import Layout
from isoloss.tools.prove.bugs import NO_BUG, PlantedBug
from isoloss.tools.prove.parity import Case, Comparison, Measurement, Tolerance

# Ways to exercise a claim that no run did.
MENDS = {
    "layouts": "name a layout of more than one rank in --layouts",
    "micro-batches": "leave --budgets out, or name one below the tokens of the batch",
}
MISSED = 3  # the exit status of a proof that does not notice the planted bug where it must, or fails elsewhere
MEND_OF_A_MODE = "it needs a layout of several ranks or two micro-batches"


@dataclass(frozen=True)
class ProofRun:
    """A line of the certificate. filled: number of micro-batches with a target, on the rank that has most of them."""

    layout: Layout
    case: Case
    measured: Measurement
    against: Comparison
    filled: int
    must_fail: bool  # whether the planted bug has to show here

    @property
    def as_expected(self) -> bool:
        return self.against.passed != self.must_fail

    @property
    def budget(self) -> str:
        return str(self.case.max_tokens or "all")


def line(row: ProofRun) -> str:
    against = row.against
    base = "" if against.base_error is None else f"base {against.base_error:.1e}  "
    expected = "" if row.as_expected else "  (must fail)" if against.passed else "  (must pass)"
    return (
        f"{'pass' if against.passed else 'FAIL'}  {row.layout!s:24} {row.case.loss.aggregation:24} "
        f"budget {row.budget:>6} {micro_batches(row):>16}  "
        f"loss {against.loss_error:.1e}  {base}norm {against.norm_error:.1e}  "
        f"worst gradient {against.gradient_error:.1e} {against.worst}{expected}"
    )


def micro_batches(row: ProofRun) -> str:
    count = row.measured.micro_batches
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def claims(rows: Sequence[ProofRun], samples: Sequence[Sample]) -> Mapping[str, Sequence[ProofRun]]:
    """Return the runs that exercise each claim. About a claim without runs the proof says nothing.

    An aggregation is exercised if the step is cut, over ranks or micro-batches; a mean over prompts only if a prompt
    has two samples with targets.
    """
    cut = [row for row in rows if row.layout.world_size > 1 or row.filled > 1]
    valid = [sample.group for sample in samples if sample.mask_T.any()]
    repeated = len(set(valid)) < len(valid)

    def exercising(mode: str) -> list[ProofRun]:
        exercised = repeated or mode != "prompt-mean-token-mean"
        return [row for row in cut if row.case.loss.aggregation == mode and exercised]

    return {
        "layouts": [row for row in rows if row.layout.world_size > 1],
        "micro-batches": [row for row in rows if row.filled > 1],
        **{mode: exercising(mode) for mode in dict.fromkeys(row.case.loss.aggregation for row in rows)},
    }


def verdict(claim: str, exercised: Sequence[ProofRun]) -> str:
    """Return `proved`, `not proved` or `not exercised` for a claim, and by which runs."""
    if not exercised:
        return f"not exercised: {MENDS.get(claim, MEND_OF_A_MODE)}"
    failed = [row for row in exercised if not row.against.passed]
    if failed:
        return f"not proved: {len(failed)} of {len(exercised)} runs differ"
    counts = sorted({row.measured.micro_batches for row in exercised})
    seen = {
        "layouts": ", ".join(dict.fromkeys(str(row.layout) for row in exercised)),
        "micro-batches": f"{', '.join(map(str, counts))} of a rank",
    }
    return f"proved by {len(exercised)} runs" + (f": {seen[claim]}" if claim in seen else "")


def report(
    rows: Sequence[ProofRun],
    samples: Sequence[Sample],
    folder: Path,
    config: Config,
    tolerance: Tolerance,
    precision: str,
    bug: PlantedBug,
) -> int:
    """Write proof.json and proof.png, print the verdict, return the exit status: 0 if every claim is proved, else 1.
    With a planted bug: 1 if it is caught, else MISSED."""
    exercised = claims(rows, samples)
    verdicts = {claim: verdict(claim, proving) for claim, proving in exercised.items()}
    agree = sum(row.against.passed for row in rows)
    proved = agree == len(rows) and all(exercised.values())
    folder.mkdir(parents=True, exist_ok=True)
    certificate = {
        "proved": proved,
        "claims": verdicts,
        "planted_bug": None if bug is NO_BUG else bug.name,
        "loss": rows[0].case.name,
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
        "precision": precision,
        "tolerance": dataclasses.asdict(tolerance),
        "versions": {name: version(name) for name in ("isoloss", "torch", "megatron-core")},
        "config": dataclasses.asdict(config),
        "runs": [
            {
                "layout": str(row.layout),
                "max_tokens": row.case.max_tokens,
                "micro_batches": row.measured.micro_batches,
                "aggregation": row.case.loss.aggregation,
                "loss": row.measured.loss,
                "grad_norm": row.measured.grad_norm,
                "weight_sum": row.measured.weight_sum,
                **dataclasses.asdict(row.against),
                "must_fail": row.must_fail,
            }
            for row in rows
        ],
    }
    (folder / "proof.json").write_text(json.dumps(certificate, indent=2) + "\n")
    title = f"{rows[0].case.name} of {Path(config.model.path).resolve().name}, {len(samples)} samples, {precision}:\n"
    verdict_of_all = f"{agree} of {len(rows)} runs agree" if bug is NO_BUG else bug_summary(rows, bug)
    draw(rows, tolerance, title + verdict_of_all, folder / "proof.png")
    if bug is NO_BUG:
        for row in rows:
            if not row.against.passed:
                print(f"not proved on {row.layout}: {row.against.reason}")
        for claim, text in verdicts.items():
            print(f"{claim:24} {text}")
        one_rank = "one rank with merged weights" if config.lora.rank > 0 else "one rank"
        print(
            f"{'proved' if proved else 'NOT proved'}: {agree} of {len(rows)} runs agree with {one_rank} and one "
            f"micro-batch; certificate in {folder}"
        )
        return 0 if proved else 1
    print(f"{bug_summary(rows, bug)}; certificate in {folder}")
    return 1 if all(row.as_expected for row in rows) else MISSED


def bug_summary(rows: Sequence[ProofRun], bug: PlantedBug) -> str:
    must_fail = [row for row in rows if row.must_fail]
    detected = sum(not row.against.passed for row in must_fail)
    passed = sum(row.against.passed for row in rows if not row.must_fail)
    caught = "caught" if all(row.as_expected for row in rows) else "NOT caught as it must be"
    return (
        f"planted bug {bug.name}: {caught} in {detected} of {len(must_fail)} runs that must fail; "
        f"{passed} of {len(rows) - len(must_fail)} others pass"
    )


def draw(rows: Sequence[ProofRun], tolerance: Tolerance, title: str, path: Path) -> None:
    """Draw the relative errors of every run on a logarithmic axis, with the tolerances."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.25 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots()
    names = [f"{row.layout}  {row.case.loss.aggregation}  {micro_batches(row)}" for row in rows]
    floor = 1e-18  # a difference of exactly 0 has no logarithm
    for label, marker, limit, values in (
        ("loss", "o", tolerance.loss, [row.against.loss_error for row in rows]),
        ("worst gradient", "s", tolerance.gradient, [row.against.gradient_error for row in rows]),
        ("gradient norm", "d", None, [row.against.norm_error for row in rows]),
    ):
        points = axes.plot([max(v, floor) for v in values], range(len(rows)), marker, label=label)
        if limit is not None:  # the norm has that of the gradient
            axes.axvline(limit, linestyle="--", color=points[0].get_color(), label=f"{label}: tolerance")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("relative error against one rank and one micro-batch")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))  # outside: it would hide points
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
