"""Define planted bugs, and put them into the engine."""

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isoloss.engine.batching.balance import Plan
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import MoeConfig
from isoloss.engine.rl.config import AlgorithmConfig
from isoloss.parallel import Layout, Mesh

# From the right function, which the engine looks up by name, to the wrong one.
Wrong = Callable[[Any], Any]
# From the samples and the plan of a step to the function that changes the weights [A, N] of micro-batch i.
Reweigh = Callable[[Sequence[Sample], Plan, Mesh], Callable[[int, Tensor], Tensor]]

PREPARE_STEP = "isoloss.engine.step.engine.prepare_step"
REDUCE_GRADIENTS = "isoloss.engine.step.trained.finalize_model_grads"


@dataclass(frozen=True)
class AdapterTraits:
    """The traits of an adapter that decide whether a bug shows.

    divisions: pairs for the adapted matrices: whether one is an expert's, and what TP does with it: copied (every rank
        has it whole), or split by its rows (which are its inputs) or its columns, as Megatron-Core says.
    merges: True if Megatron-Core multiplies several adapted matrices as one. alternates: True if their rows alternate.
    scaled: True if a rank is above 1. recomputed: True if layers are computed again in the backward.
    """

    divisions: frozenset[tuple[bool, str]]
    merges: bool
    alternates: bool
    scaled: bool
    recomputed: bool

    def over(self, layout: Layout, *divisions: str) -> bool:
        """Return whether several ranks of the layout's tp, or etp, divide an adapted matrix in one of these ways."""
        sizes = {False: layout.tp, True: layout.etp}
        return any(sizes[expert] > 1 and division in divisions for expert, division in self.divisions)


@dataclass(frozen=True)
class RunTraits:
    """The traits of a run that decide whether a bug shows.

    documents, targets: numbers of tokens and targets of each sample, by micro-batch, on all dp ranks; () if empty.
    aggregation: the mode of the loss's first term. others: the modes of further terms, if they differ.
    policy: the configuration of a policy loss; None for cross-entropy.
    moe: the configuration of a model with experts; None for a dense one.
    biases: True if selection biases after some steps are compared, instead of loss and gradients.
    branches: True if two samples of a micro-batch continue a prefix that is computed once.
    adapter: the traits of the adapter; None without one.
    """

    layout: Layout
    documents: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    aggregation: str
    others: tuple[str, ...] = ()
    policy: AlgorithmConfig | None = None
    moe: MoeConfig | None = None
    biases: bool = False
    branches: bool = False
    adapter: AdapterTraits | None = None

    @property
    def aggregations(self) -> tuple[str, ...]:
        return (self.aggregation, *self.others)

    @property
    def filled(self) -> int:
        """Return the number of micro-batches with a target, on the dp rank that has most of them."""
        per_rank = len(self.targets) // self.layout.dp
        ranks = (self.targets[first : first + per_rank] for first in range(0, len(self.targets), per_rank))
        return max(sum(map(any, tokens)) for tokens in ranks)

    @property
    def padded(self) -> bool:
        """Return whether a packed row ends with padding, or is nothing else."""
        shards = self.layout.context * (self.layout.tp if self.layout.sequence_parallel else 1)
        return any(sum(lengths) % shards or not lengths for lengths in self.documents)


def means_differ(micro_batches: tuple[tuple[int, ...], ...], mode: str) -> bool:
    """Return whether the mean of the means over micro-batches weighs a token otherwise than `mode` does.

    The two agree for seq-mean-token-mean if each micro-batch holds one sequence, and for token-mean if all hold equally
    many tokens.

    micro_batches: numbers of tokens that count, by micro-batch and sample.
    """
    counts = [count for tokens in micro_batches for count in tokens if count]
    for tokens in micro_batches:
        for count in filter(None, tokens):
            right = {"token-mean": sum(counts), "seq-mean-token-mean": len(counts) * count}.get(mode)
            if right != sum(tokens) * len(micro_batches):  # both are the inverse of a weight
                return True
    return False


@dataclass(frozen=True)
class PlantedBug:
    """A bug, and the runs in which a proof must find it.

    changes: the function that makes the wrong function, by the place where the engine looks the right one up.
    must_fail_on: True for a run whose loss or gradient the bug makes wrong. needs: the same in words.
    """

    name: str
    changes: Mapping[str, Wrong]
    must_fail_on: Callable[[RunTraits], bool]
    needs: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for place, wrong in self.changes.items():
                stack.enter_context(replaced(place, wrong))
            yield


NO_BUG = PlantedBug("none", {}, lambda run: False, "")


@contextlib.contextmanager
def replaced(place: str, wrong: Wrong) -> Iterator[None]:
    """Let `place` ("package.module.name") hold wrong(right) for a while, where right is what it held before."""
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    right = getattr(owner, name)
    setattr(owner, name, wrong(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def weights_changed(reweigh: Reweigh) -> Mapping[str, Wrong]:
    """Return the changes of a bug in the weights of the tokens."""

    def wrong(prepare_step: Callable) -> Callable:
        def prepare_wrongly(samples, loss, plan, mesh, device):
            batch = prepare_step(samples, loss, plan, mesh, device)
            change = reweigh(samples, plan, mesh)
            micro_batches = tuple(
                dataclasses.replace(m, weights_AN=change(i, m.weights_AN)) for i, m in enumerate(batch.micro_batches)
            )
            return dataclasses.replace(batch, micro_batches=micro_batches)

        return prepare_wrongly

    return {PREPARE_STEP: wrong}


def gradients_changed(change: Callable[[Any, Any], None]) -> Mapping[str, Wrong]:
    """Return the changes of a bug in the reduction of gradients: change(chunks, groups) follows it."""

    def wrong(finalize_model_grads: Callable) -> Callable:
        def reduce_wrongly(chunks, **kwargs):
            finalize_model_grads(chunks, **kwargs)
            change(chunks, kwargs["pg_collection"])

        return reduce_wrongly

    return {REDUCE_GRADIENTS: wrong}
