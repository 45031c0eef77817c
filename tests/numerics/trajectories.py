"""Trajectories of several turns and branches, cut into samples in two ways, and what every rank measures of them.

Shape suffixes: T tokens of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from support.models.families import VOCAB
from support.models.transformers_parity import gradients_by_hf_name
from torch import Tensor

from isoloss.engine.batching.prefixes import with_owned_tokens
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, LossConfig, ModelConfig, MoeConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.rl.experience import with_importance
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, TokenInputs
from isoloss.models.mcore.moe.router import routers
from isoloss.parallel import Layout
from isoloss.tools.prove.proof import on_layout

# Turns of each trajectory: the turn that it goes on from (-1: none), tokens that were read since, tokens of the reply.
TURNS = [
    [(-1, 9, 7), (0, 4, 12), (1, 6, 3)],
    [(-1, 9, 21)],
    [(-1, 5, 4), (0, 3, 6), (0, 7, 5), (2, 2, 4)],  # two sub-agents begin behind the first reply
    [(-1, 6, 5), (-1, 8, 6)],  # the history was rewritten
    [(-1, 11, 9), (0, 5, 14)],
]
PROMPTS = (0, 0, 1, 1, 2)
FIELDS = ("advantages", "rollout_logprobs", "train_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Turn:
    """context, reply: token ids. fields: of the reply's tokens, [reply] each."""

    parent: int
    context: list[int]
    reply: list[int]
    fields: dict[str, np.ndarray]


def trajectories() -> list[list[Turn]]:
    """Every token has fields of its own. The backend's log-probabilities have a tail."""
    rng, made = np.random.default_rng(8), []
    beginnings = [rng.integers(0, VOCAB, 40).tolist() for _ in range(3)]
    for group, shape in zip(PROMPTS, TURNS):
        turns: list[Turn] = []
        for number, (parent, read, said) in enumerate(shape):
            before = turns[parent].context + turns[parent].reply if parent >= 0 else []
            seen = beginnings[group][:read] if number == 0 else rng.integers(0, VOCAB, read).tolist()
            near = rng.normal(-np.log(VOCAB), 0.3, said)
            backend = near + rng.normal(0, 0.15, said) + 1.1 * (np.arange(said) % 7 == 5)
            values = rng.normal(0, 1, said), backend, near, near + rng.normal(0, 0.2, said)
            reply = rng.integers(0, VOCAB, said).tolist()
            turns.append(Turn(parent, before + seen, reply, dict(zip(FIELDS, values))))
        made.append(turns)
    return made


def by_turn(turns: Sequence[Turn]) -> list[list[int]]:
    return [[number] for number in range(len(turns))]


def by_branch(turns: Sequence[Turn]) -> list[list[int]]:
    """A path for each leaf; the first one that holds a reply trains it."""
    parents, taken, paths = {turn.parent for turn in turns}, set(), []
    for leaf in range(len(turns)):
        if leaf not in parents:
            path, at = [], leaf
            while at >= 0:
                path, at = [at, *path], turns[at].parent
            paths.append([turn for turn in path if turn not in taken])
            taken |= {*path}
    return paths


CUTS = {"branch": by_branch, "turn": by_turn}


def samples_of(cut: str) -> list[Sample]:
    """The samples of a trajectory are apart in the batch. One of a trajectory's samples alone names it as well."""
    samples = []
    for sequence, (group, turns) in enumerate(zip(PROMPTS, trajectories())):
        for part in CUTS[cut](turns):
            last = turns[part[-1]]
            tokens = torch.tensor(last.context + last.reply)
            mask = torch.zeros(len(tokens), dtype=torch.bool)
            fields = {name: torch.zeros(len(tokens), dtype=torch.float64) for name in FIELDS}
            for turn in (turns[number] for number in part):
                at = slice(len(turn.context), len(turn.context) + len(turn.reply))
                mask[at] = True
                for name, values in turn.fields.items():
                    fields[name][at] = torch.from_numpy(values)
            samples.append(Sample(tokens, mask, group, fields, f"{sequence}:{part}", 7 * sequence))
    return with_owned_tokens([*samples[::2], *samples[1::2]])


def own_loss(inputs: TokenInputs, algorithm: AlgorithmConfig) -> Tensor:
    """A user's: a sum of what depends on another sum."""
    del algorithm
    x_N = inputs.logprobs_N
    tokens_N = inputs.sequence_sum(torch.ones_like(x_N))
    mean_N = inputs.sequence_sum(x_N) / tokens_N
    spread_N = inputs.sequence_sum((x_N - mean_N).square() * inputs.fields["advantages"]) / tokens_N
    return -inputs.fields["advantages"] * x_N * torch.tanh(spread_N)


@dataclass(frozen=True)
class Case:
    """algorithm: keys of it; loss="own" for `own_loss`."""

    mode: str
    algorithm: tuple[tuple[str, object], ...] = ()
    count_fully_masked: bool = False

    @property
    def keys(self) -> AlgorithmConfig:
        return AlgorithmConfig(**{name: value for name, value in self.algorithm if value != "own"})  # pyright: ignore

    def build(self, config: RLConfig) -> Loss:
        own = own_loss if ("loss", "own") in self.algorithm else None
        length = 16 if self.mode == "seq-mean-token-sum-norm" else None
        loss = LossConfig(self.mode, length, count_fully_masked=self.count_fully_masked)
        return policy_loss(replace(config, loss=loss, algorithm=self.keys), own)


@dataclass(frozen=True)
class Found:
    """What a rank found of each case. loads: tokens of each expert, by layer, on this rank."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    micro_batches: list[int]
    rejected: list[float | None]
    loads: list[Tensor]


def measure(
    folder: Path, config: RLConfig, cut: str, cases: Sequence[Case], layout: str, moe: MoeConfig | None = None
) -> Found:
    """Runs on every rank. layout: with "-shared", what samples of a micro-batch begin with alike is computed once; with
    "-whole", all samples are in one row."""
    degrees, _, shared = layout.partition("-")
    made = Config(
        ModelConfig(str(folder), from_scratch=moe is not None),
        moe=moe or MoeConfig(),
        batch=BatchConfig(max_tokens=4096 if shared == "whole" else 64, share_prefixes=shared == "shared"),
        train=TrainConfig(precision="fp64"),
    )
    engine = Engine(on_layout(made, Layout.parse(degrees), "fp64"))
    found = Found([], [], [], [], [])
    for case in cases:
        metrics = engine.forward_backward(with_importance(samples_of(cut), case.keys), case.build(config))
        loads = torch.stack([router.load_E for router in routers(engine.chunks)]) if moe else torch.zeros(0)
        found.losses.append(metrics.loss)
        found.gradients.append(
            gradients_by_hf_name(engine) if moe is None else {n: g.clone() for n, g in engine.gradients()}
        )
        found.micro_batches.append(metrics.micro_batches)
        found.rejected.append(metrics.observed.get("rejected_fraction"))
        found.loads.append(loads.clone())
        engine.zero_grad()
    return found
