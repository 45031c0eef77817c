"""Format plans as tables of text."""

import math
from collections.abc import Sequence

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.limits import GIB, room
from isoloss.parallel import Layout
from isoloss.tools.plan.data_file import DataPlan
from isoloss.tools.plan.estimate import Estimate, seconds_of, sequences
from isoloss.tools.plan.hardware import ASSUMPTIONS, Gpu
from isoloss.tools.plan.report import RankReport
from isoloss.tools.plan.rollout_batch import BatchEstimate
from isoloss.tools.plan.search import Candidate

EXCHANGES = 8  # kinds of exchange that are listed
BAR = 40  # characters of the longest bar of a histogram


def stage_table(stages: Sequence[RankReport], config: Config, gpu: Gpu) -> str:
    """Return the GiB of a rank of every stage at its peak, by kind, and the phase and line of the peak."""
    rows = [["GiB", *(f"stage {report.stage}" for report in stages)]]
    kinds = dict.fromkeys(kind for report in stages for kind in report.peak.peak_kinds)
    rows += [[kind, *(gib(report.peak.peak_kinds.get(kind, 0)) for report in stages)] for kind in kinds]
    rows += [
        ["peak", *(gib(report.peak.peak) for report in stages)],
        [f"of {gib(room(config, gpu.memory))}", *("fits" if fits(r, config, gpu) else "TOO MUCH" for r in stages)],
    ]
    lines = [f"{name:16}" + "".join(f"{value:>10}" for value in values) for name, *values in rows]
    lines += [f"peak of stage {r.stage}: {r.peak.name}, {r.peak.peak_site}" for r in stages]
    set_aside = gib(gpu.memory - room(config, gpu.memory))
    return "\n".join(
        [*lines, f"set aside of {gib(gpu.memory)} GiB for CUDA, NCCL, gaps and a sleeping server: {set_aside}"]
    )


def phase_table(stages: Sequence[RankReport], gpu: Gpu) -> str:
    """Return the work of each phase, for the rows of the dry run, on the stage with the highest peak."""
    report = max(stages, key=lambda stage: stage.peak.peak)
    lines = [f"phases of stage {report.stage}, {report.micro_batches} micro-batches of {report.tokens} tokens:"]
    lines.append(f"{'':28}{'peak GiB':>9}{'TFLOP':>9}{'GB moved':>10}{'GB sent':>9}{'ops':>8}{'waits':>7}{'s':>8}")
    for phase in report.phases:
        seconds = seconds_of(phase, gpu)
        sent = sum(exchange.nbytes for exchange in phase.exchanges if exchange.ranks > 1)
        lines.append(
            f"{phase.name:28}{gib(phase.peak):>9}{sum(phase.flops.values()) / 1e12:>9.0f}"
            f"{sum(phase.traffic.values()) / 1e9:>10.0f}{sent / 1e9:>9.1f}{sum(phase.launches.values()):>8}"
            f"{sum(count for *_, count in phase.waits):>7}"
            f"{seconds.compute + seconds.exchange + seconds.gradients + seconds.weights:>8.2f}"
        )
    return "\n".join(lines)


def fits(report: RankReport, config: Config, gpu: Gpu) -> bool:
    return report.peak.peak <= room(config, gpu.memory)


def estimate_lines(step: Estimate, config: Config) -> str:
    return (
        f"estimate: {decimals(step.seconds)} s a step of {sequences(config)} rows of {config.data.max_length} tokens "
        f"in {step.micro_batches} micro-batches, {step.tokens_per_gpu_second:,.0f} tokens/s a GPU, MFU {step.mfu:.0%}\n"
        f"assumed: {ASSUMPTIONS}"
    )


def search_table(candidates: Sequence[Candidate]) -> str:
    head = f"{'layout':28}{'max_tokens':>12}  {'recomputed':26}{'peak GiB':>9}{'s a step':>10}"
    head += f"{'tokens/s/GPU':>14}{'MFU':>6}"
    lines = [
        f"{c.layout!s:28}{c.config.batch.max_tokens:>12}  {recomputed(c.config):26}{gib(max(c.peaks)):>9}"
        f"{c.seconds:>10.1f}{c.tokens_per_gpu_second:>14,.0f}{c.mfu:>6.0%}"
        for c in candidates
    ]
    return "\n".join([head, *lines])


def recomputed(config: Config) -> str:
    """Describe recomputation, and the share of the optimizer in CPU memory."""
    memory = config.memory
    told = "nothing"
    if memory.recompute == "full":
        told = "all layers" if memory.recompute_layers is None else f"{memory.recompute_layers} layers a stage"
    if memory.recompute == "selective":
        told = "+".join(memory.recompute_modules)
    return told + (f"; offload {memory.offload_optimizer:g}" if memory.offload_optimizer else "")


def gib(nbytes: float) -> str:
    return decimals(nbytes / GIB)


def decimals(value: float) -> str:
    """Return a number with one decimal, or with four where that would be 0.0, as in the plan of a small model."""
    return f"{value:.4f}" if 0 < value < 0.05 else f"{value:.1f}"


def exchange_table(stages: Sequence[RankReport]) -> str:
    """Return the exchanges with the most bytes, of all phases, on the stage with the highest peak."""
    report = max(stages, key=lambda stage: stage.peak.peak)
    exchanges = [(exchange, phase.name) for phase in report.phases for exchange in phase.exchanges]
    exchanges = sorted((each for each in exchanges if each[0].ranks > 1), key=lambda each: -each[0].nbytes)
    if not exchanges:
        return "no exchange with other ranks"
    lines = [f"largest exchanges of stage {report.stage}, {len(exchanges)} kinds in all:"]
    lines.append(f"{'GB':>9}{'calls':>8}  {'group':12}{'ranks':>6}{'nodes':>6}  {'dtype':10}{'op, phase, line'}")
    for exchange, phase in exchanges[:EXCHANGES]:
        lines.append(
            f"{exchange.nbytes / 1e9:>9.2f}{exchange.calls:>8}  {exchange.group:12}{exchange.ranks:>6}"
            f"{exchange.nodes:>6}  {exchange.dtype:10}{exchange.op} in {phase}, {exchange.site}"
        )
    return "\n".join(lines)


def data_table(plan: DataPlan, config: Config, layout: Layout) -> str:
    """Return the lengths of the data file's rows, and how its steps divide them."""
    counts = (("dropped", plan.dropped), ("truncated", plan.truncated), ("bad and left out", plan.rejected))
    left_out = [f"{count:,} {what}" for what, count in counts if count]
    lines = [f"data: {', '.join([f'{plan.rows:,} rows of {plan.tokens:,} tokens', *left_out])}"]
    most = max(rows for _, rows in plan.histogram)
    for length, rows in plan.histogram:
        lines.append(f"{f'to {length:,}':>12} {rows:>10,}  {'#' * math.ceil(BAR * rows / most)}".rstrip())
    fewest, largest = plan.micro_batches
    lines.append(
        f"steps: {fewest} to {largest} micro-batches on each of {layout.dp} data-parallel ranks, {plan.filled:.0%} "
        f"full; costliest rank over the mean {plan.imbalance[0]:.3f}, at worst {plan.imbalance[1]:.3f}"
    )
    if plan.over_budget:
        lines.append(
            f"{plan.over_budget:,} rows exceed batch.max_tokens={config.batch.max_tokens}, the longest with "
            f"{plan.longest:,} tokens; each runs alone, and takes more memory than planned"
        )
    return "\n".join(lines)


def batch_lines(batch: BatchEstimate) -> str:
    return (
        f"a generated batch: {batch.seconds:.0f} s = generate {batch.generate:.0f} (on {batch.servers} server(s) of "
        f"{batch.server_gpus} GPU(s), {batch.running} completions at a time) + log-probabilities "
        f"{batch.logprobs:.0f} + train {batch.train:.0f} + weights to "
        f"servers {batch.sync:.1f}; if every completion is of the full length"
    )
