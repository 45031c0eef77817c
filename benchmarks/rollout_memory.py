"""The memory of a generated batch on the host: what completions take, and what each rank of a run holds of them.

    python benchmarks/rollout_memory.py [--out rollout_memory.json] [--completions 512] [--tokens 8192] [--ranks 4]

First what `Completion` makes of a server's answer, which is JSON, beside a completion that keeps tuples of Python's own
numbers: each is built, one answer after the other, pickled and read back, in a process of its own.

Then a batch on data-parallel ranks, from the answers to the first optimizer step: once as rank 0 holds it and sends
each rank what the plan places there (`engine/batching/distribute.py`), and once as if every rank were given all of it.

The figures are a process's resident set less that before, and the largest (VmHWM). The allocator is told to give every
freed tensor back, so that nothing hides in memory that was freed before.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from logprob_memory import MIB, of_status

from isoloss.engine.batching.balance import CostModel, Plan
from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.batching.plan import plan_step
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, ModelConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.rl.experience import RolloutBatch, minibatches, with_advantages, with_logprobs
from isoloss.engine.rl.trajectory import Completion, Group, Prompt, Trajectory
from isoloss.parallel import Layout
from isoloss.parallel.rank0 import RankZero
from isoloss.tools.prove.rank_pool import WorkerPool

FORMS = ("tuples", "arrays")
HOLDERS = ("every rank", "rank 0")
GENERATIONS, STEPS, PROMPT = 8, 4, 256  # completions of a prompt, optimizer steps of a batch, tokens of a prompt


@dataclass(frozen=True)
class OfTuples:
    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def answer(random: np.random.Generator, tokens: int) -> tuple[list[int], list[float], list[int]]:
    """As it comes out of JSON: every number an object of its own."""
    ids, logprobs = random.integers(1000, 100_000, tokens), -random.random(tokens)
    text = json.dumps([ids.tolist(), logprobs.tolist(), [1000] * tokens])
    found = json.loads(text)
    return found[0], found[1], found[2]


class Memory:
    """Of this process, from now on, in MiB."""

    def __init__(self) -> None:
        answer(np.random.default_rng(0), 8192)  # what the first one leaves in the allocator belongs to none
        self.before = of_status("VmRSS")
        self.reset()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew

    def held(self) -> float:
        return (of_status("VmRSS") - self.before) / MIB

    def most(self) -> float:
        return (of_status("VmHWM") - self.before) / MIB


def of_form(form: str, completions: int, tokens: int) -> dict[str, float]:
    """MiB held, and MiB at most while the completions travel."""
    random, memory = np.random.default_rng(0), Memory()
    held = []
    for index in range(completions):
        ids, logprobs, versions = answer(random, tokens)
        if form == "tuples":
            held.append(OfTuples(str(index), tuple(ids), tuple(logprobs), tuple(versions)))
        else:
            held.append(Completion(str(index), ids, logprobs, versions, "length"))
    after = memory.held()
    memory.reset()
    arrived = pickle.loads(pickle.dumps(held))
    assert len(arrived) == completions
    return {"held": after, "peak": memory.most()}


class EveryRank:
    """What a `Scatter` does, where every rank is given everything."""

    here = True

    def make(self, call):
        return call()

    def hold(self, samples):
        return samples


def generated(completions: int, tokens: int) -> list[list[Trajectory]]:
    """What rank 0 has when the last reward is there."""
    random, groups = np.random.default_rng(0), []
    for number in range(completions // GENERATIONS):
        prompt = Prompt(f"train.jsonl:{number}", tuple(random.integers(1000, 100_000, PROMPT).tolist()), "a question")
        group = []
        for k in range(GENERATIONS):
            completion = Completion(f"{prompt.id}/{number}/{k}", *answer(random, tokens), "length")
            group.append(Trajectory.of_one_turn(prompt, completion, "word " * tokens, float(k % 2)))
        groups.append(group)
    return groups


def outlines(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    return [[trajectory.outline() for trajectory in group] for group in groups]


def of_rank(holder: str, completions: int, tokens: int) -> dict[str, float]:
    """MiB of a batch on this rank: held for its steps, and at most, from the answers to the first step."""
    ranks = dist.get_world_size()
    config = RLConfig(
        ModelConfig("unread"),
        batch=BatchConfig(global_size=completions // GENERATIONS),
        rollout=RolloutConfig(num_generations=GENERATIONS, max_new_tokens=tokens),
        algorithm=AlgorithmConfig(minibatches=STEPS, old_logprobs="rollout"),
    )
    of_ranks: Any = SimpleNamespace(dp=dist.group.WORLD)
    rank0, scatter = RankZero(), Scatter(of_ranks)
    holds = scatter if holder == "rank 0" else EveryRank()
    memory = Memory()
    trajectories = rank0.run(lambda: generated(completions, tokens), outlines if holder == "rank 0" else list)
    groups = [Group(number, group[0].prompt, tuple(group)) for number, group in enumerate(trajectories)]
    del trajectories
    models: Any = SimpleNamespace(scatter=holds, reference=None, critic=None)
    samples = with_logprobs(groups, models, config)
    samples = holds.make(lambda made=samples, kept=groups: with_advantages(made, kept, config))
    batch = RolloutBatch(tuple(samples), minibatches([sample.group for sample in samples], 0, config))
    del samples, groups
    held = memory.held()
    of_step, batch = batch.next()

    def plan(samples: Sequence[Sample]) -> Plan:
        return plan_step(samples, Layout(dp=ranks), 4 * tokens, CostModel(1.0, 0.0), share_prefixes=True)

    if holder == "rank 0":
        _, of_step = scatter.planned(of_step, plan)
    else:
        plan(of_step)
    most = memory.most()
    scatter.close()
    rank0.close()
    return {"held": held, "peak": most}


def measure(*arguments: object) -> dict:
    """In processes that have done nothing before."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="rollout_memory.json")
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--holder", choices=HOLDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.completions, options.tokens
    if options.form:
        print(json.dumps(of_form(options.form, *sizes)))
        return
    if options.holder:
        with WorkerPool(options.ranks) as pool:
            print(json.dumps(pool.run(options.ranks, of_rank, options.holder, *sizes)))
        return
    rows: dict[str, dict] = {}
    same = "--completions", options.completions, "--tokens", options.tokens, "--ranks", options.ranks
    for form in FORMS:
        rows[form] = measure("--form", form, *same)
        held, peak = rows[form]["held"], rows[form]["peak"]
        each = held * MIB / (options.completions * options.tokens)
        print(f"{form:12} {held:8.0f} MiB held ({each:.0f} bytes a token), {peak:8.0f} MiB at most on the way")
    print(f"held: {rows['tuples']['held'] / rows['arrays']['held']:.1f} times less in arrays")
    for holder in HOLDERS:
        first, *others = measure("--holder", holder, *same)
        rows[holder] = {"rank 0": first, "others": others}
        for name, ranks in (("rank 0", [first]), ("another", others)):
            held, peak = (max(rank[key] for rank in ranks) for key in ("held", "peak"))
            print(f"{holder:12} {name:8} {held:8.0f} MiB held for the steps, {peak:8.0f} MiB at most")
    Path(options.out).write_text(json.dumps({"sizes": dict(zip(same[::2], same[1::2])), **rows}))


if __name__ == "__main__":
    main()
