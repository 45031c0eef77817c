"""The proof behind `isoloss.tools.prove`: the batch, its runs, the comparison with one rank, the certificate."""

import argparse
import contextlib
import dataclasses
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.balance import Plan
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.data.dataset import step_indices
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.sft.loop import load_data
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout, UserError
from isoloss.parallel.layout import MODEL_AXES
from isoloss.tools.prove.adapters import adapted_engine, adapter_traits
from isoloss.tools.prove.bugs import NO_BUG, PLANTED_BUGS, PlantedBug
from isoloss.tools.prove.certificate import ProofRun, line, report
from isoloss.tools.prove.parity import TOLERANCE, Case, compare, freeze, measure, merge, reference_file, thaw
from isoloss.tools.prove.rank_pool import WorkerPool

Runs = Mapping[Layout, Sequence[Case]]
MIN_BUDGET = 2  # the least that batch.max_tokens admits: a sample of at least two tokens is alone in its micro-batch


def run(arguments: argparse.Namespace, config: Config, layouts: Sequence[Layout], pool: WorkerPool | None) -> int:
    """Run the proof of the command line: print a line a run, write the certificate, and return the exit status.

    Raises UserError, before any rank starts, for a mistake in the arguments, the configuration or the data.
    """
    bug = planted(arguments.plant)
    for layout in layouts:
        rules.check(on_layout(config, layout, arguments.precision), read_architecture(config.model.path), layout)
    modes = arguments.aggregations.split(",") if arguments.aggregations else [config.loss.aggregation]
    policy = config if isinstance(config, RLConfig) else None
    losses = [Case(0, loss_config(mode, config), policy, lora=config.lora) for mode in modes]
    samples = first_batch(config, bug)
    runs = choose_runs(config, samples, layouts, losses, arguments.budgets)
    with ranks_for(layouts, pool) as ranks:
        if policy is not None:
            samples = with_rollout(policy, samples, arguments.precision, ranks)
        rows = prove(config, samples, runs, arguments.precision, bug, ranks)
    out = arguments.out or Path("runs/proof" if bug is NO_BUG else f"runs/proof-{bug.name}")
    return report(rows, samples, out, config, TOLERANCE[arguments.precision], arguments.precision, bug)


def planted(name: str | None) -> PlantedBug:
    if name is not None and name not in PLANTED_BUGS:
        raise UserError(f"--plant {name} is not one of {', '.join(sorted(PLANTED_BUGS))}")
    return PLANTED_BUGS[name] if name else NO_BUG


def loss_config(mode: str, config: Config) -> LossConfig:
    """Return the configured loss in another mode."""
    length = (config.loss.norm_length or config.data.max_length) if mode == "seq-mean-token-sum-norm" else None
    return LossConfig(mode, length, config.loss.count_fully_masked)


def first_batch(config: Config, bug: PlantedBug) -> list[Sample]:
    """Return the samples of optimizer step 0; for a policy loss the answers of two rows to one prompt.

    For a planted bug every token is a target, also one at the border of two shards, and a fully masked copy of a sample
    is added: some bugs show only there.

    Raises UserError if there are not at least two different rows.
    """
    data = load_data(config, read_architecture(config.model.path))
    rows = step_indices(data.train.order, 0, config.batch.global_size, config.train.seed)
    if len(set(rows.tolist())) < 2:
        raise UserError(
            f"batch.global_size={config.batch.global_size} of the {len(data.train)} rows of data.train is one row over "
            "and over: a proof about micro-batches and means needs at least two rows in the batch"
        )
    samples = [dataclasses.replace(data.train[int(row)], group=index // 2) for index, row in enumerate(rows)]
    if isinstance(config, RLConfig):
        samples = [behind_the_prompt_of(samples[index // 2 * 2], sample) for index, sample in enumerate(samples)]
    if bug is NO_BUG:
        return samples
    everything = [dataclasses.replace(s, mask_T=torch.arange(len(s)) > 0) for s in samples]
    masked = dataclasses.replace(samples[0], mask_T=torch.zeros_like(samples[0].mask_T))
    return [*everything, masked]


def behind_the_prompt_of(first: Sample, sample: Sample) -> Sample:
    """Return a sample with its own answer behind the prompt of `first`."""
    prompt, own = (int(s.mask_T.int().argmax()) for s in (first, sample))
    tokens_T = torch.cat([first.tokens_T[:prompt], sample.tokens_T[own:]])
    mask_T = torch.cat([first.mask_T[:prompt], sample.mask_T[own:]])
    return dataclasses.replace(sample, tokens_T=tokens_T, mask_T=mask_T)


def choose_runs(
    config: Config,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    losses: Sequence[Case],
    budgets: Sequence[int] | None = None,
) -> Runs:
    """Return every loss with every budget that gives micro-batches of its own, by layout.

    budgets: None chooses them from the lengths of the samples: one micro-batch a rank, about three, and one sample
        each."""
    arch, total = read_architecture(config.model.path), sum(map(len, samples))

    def plan(layout: Layout, budget: int) -> Plan:
        return dataclasses.replace(losses[0], max_tokens=budget).plan(layout, samples, arch)

    def about_three(layout: Layout) -> int:
        multiple = layout.pp if layout.vpp > 1 else 1
        few = -(-3 // multiple) * multiple
        budgets = range(MIN_BUDGET, total)
        return MIN_BUDGET + bisect_left(budgets, True, key=lambda b: plan(layout, b).num_micro_batches <= few)

    runs = {}
    for layout in layouts:
        budget_of_plan: dict[Plan, int] = {}
        for budget in budgets or (0, about_three(layout), MIN_BUDGET):
            budget_of_plan.setdefault(plan(layout, budget), budget)
        runs[layout] = [dataclasses.replace(loss, max_tokens=b) for loss in losses for b in budget_of_plan.values()]
    return runs


def with_rollout(config: RLConfig, samples: Sequence[Sample], precision: str, pool: WorkerPool) -> list[Sample]:
    """Return the samples with all fields that a policy loss reads, near the log-probabilities of the model."""
    rng = np.random.default_rng(config.train.seed)
    one_rank = on_layout(config, Layout(), precision)
    near = pool.run(1, older_logprobs, one_rank, freeze(samples), config.train.seed)[0]
    made_up = [rollout_fields(near_T, s.mask_T, rng) for s, near_T in zip(samples, near, strict=True)]
    if not config.algorithm.uses_reference:  # as in a run
        for fields in made_up:
            del fields["ref_logprobs"]
    return [dataclasses.replace(sample, fields=fields) for sample, fields in zip(samples, made_up)]


def rollout_fields(near_T: np.ndarray, mask_T: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    """Make up the fields that policy and value losses read of a sample: [T] fp64 each, 0 where mask_T is False.

    near_T: log-probabilities of the policy that generated, near those of the model. The backend's get a tail.
    """
    length = len(near_T)
    fields = {
        "advantages": np.full(length, rng.normal()),
        "rollout_logprobs": near_T + rng.normal(0, 0.1, length) - 0.7 * (np.arange(length) % 11 == 7),
        "ref_logprobs": near_T + rng.normal(0, 0.2, length),
        "returns": rng.normal(0, 0.3, length),
        "old_values": rng.normal(0, 0.2, length),
        "train_logprobs": near_T,
    }
    return {name: torch.from_numpy(values) * mask_T for name, values in fields.items()}


def older_logprobs(config: RLConfig, frozen: bytes, seed: int) -> list[np.ndarray]:
    """Make up log-probabilities of an older policy for every sample's targets: 0.3 nats from those of the model, enough
    for ratios beyond the usual clipping on both sides. Runs on every rank; collectives as `Engine.logprobs`."""
    rng = np.random.default_rng(seed)
    own: Sequence[Tensor] = adapted_engine(config).logprobs(thaw(frozen), config.rollout.temperature)
    return [values_T.numpy(force=True) + rng.normal(0, 0.3, len(values_T)) for values_T in own]


def prove(
    config: Config,
    samples: Sequence[Sample],
    runs: Runs,
    precision: str,
    bug: PlantedBug = NO_BUG,
    pool: WorkerPool | None = None,
) -> list[ProofRun]:
    """Run the cases of every layout, against one rank with everything in one micro-batch, every sample whole, without
    the bug.

    pool: runs the ranks; default one of its own.
    Raises UserError for a planted bug that shows in none of the runs.
    """
    arch = read_architecture(config.model.path)
    moe = config.moe if arch.experts else None
    adapter = adapter_traits(config, arch)
    seen = {layout: [case.run(layout, samples, arch, moe, adapter) for case in cases] for layout, cases in runs.items()}
    if bug is not NO_BUG and not any(bug.must_fail_on(run) for layout_traits in seen.values() for run in layout_traits):
        raise UserError(f"--plant {bug.name} shows in none of these runs: it needs {bug.needs}")
    frozen = freeze(samples)
    rows = []
    with tempfile.TemporaryDirectory(prefix="isoloss-proof-") as folder, ranks_for(runs, pool) as ranks:
        losses = list(
            dict.fromkeys(dataclasses.replace(case, max_tokens=0) for cases in runs.values() for case in cases)
        )
        files = {case.loss: reference_file(folder, index) for index, case in enumerate(losses)}
        one_rank = on_layout(config, Layout(), precision)
        whole = dataclasses.replace(one_rank, batch=dataclasses.replace(config.batch, share_prefixes=False))
        run = ranks.run(1, measure, whole, frozen, losses, list(files.values()), NO_BUG, True)
        references = dict(zip(files, merge(run)))
        for layout, cases in runs.items():
            spread = on_layout(config, layout, precision)
            run = ranks.run(layout.world_size, measure, spread, frozen, cases, [files[c.loss] for c in cases], bug)
            for case, measured, as_seen in zip(cases, merge(run), seen[layout]):
                against = compare(measured, references[case.loss], TOLERANCE[precision])
                rows.append(ProofRun(layout, case, measured, against, as_seen.filled, bug.must_fail_on(as_seen)))
                print(line(rows[-1]), flush=True)
    return rows


def ranks_for(layouts: Iterable[Layout], pool: WorkerPool | None) -> contextlib.AbstractContextManager[WorkerPool]:
    """Return the pool, which stays open, or a new one that is large enough."""
    return contextlib.nullcontext(pool) if pool else WorkerPool(max(layout.world_size for layout in layouts))


def on_layout(config: Config, layout: Layout, precision: str) -> Config:
    """Return the configuration of one world. Gradients are compared whole, so the optimizer is neither the distributed
    one nor in CPU memory, and in the given precision."""
    degrees = {axis: getattr(layout, axis) for axis in MODEL_AXES}
    stages = config.parallel.stage_layers
    parallel = dataclasses.replace(
        config.parallel,
        **degrees,
        stage_layers=stages if len(stages) == layout.pp * layout.vpp else (),
        sequence_parallel=layout.sequence_parallel,
        distributed_optimizer=False,
        grad_reduce_dtype=config.parallel.grad_reduce_dtype if precision == "bf16" else "fp32",
        gradient_accumulation_fusion=None if precision == "fp64" else config.parallel.gradient_accumulation_fusion,
    )
    train = dataclasses.replace(config.train, precision=precision)
    memory = dataclasses.replace(config.memory, offload_optimizer=0.0)
    return dataclasses.replace(config, parallel=parallel, train=train, memory=memory)
