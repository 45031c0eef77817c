"""What a planted bug is, and how it gets into the engine."""

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

# Of what the engine looks up, the wrong thing that takes its place.
Wrong = Callable[[Any], Any]
# Of a step, what becomes of the weights [A, N] of its micro-batch number i.
Reweigh = Callable[[Sequence[Sample], Plan, Mesh], Callable[[int, Tensor], Tensor]]

PREPARE_STEP = "isoloss.engine.step.engine.prepare_step"
REDUCE_GRADIENTS = "isoloss.engine.step.engine.finalize_model_grads"


@dataclass(frozen=True)
class RunTraits:
    """What decides whether a bug shows.

    documents, targets: tokens and targets of every sample, by micro-batch, of all dp ranks; () of an empty one.
    aggregation: of the loss's first term.
    others: those of further terms, where they differ from it.
    policy: of a policy loss; None: cross-entropy.
    moe: of a model with experts; None: a dense one.
    biases: whether selection biases after some steps are compared, instead of loss and gradients.
    branches: whether two samples of a micro-batch go on from tokens that are computed once.
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

    @property
    def aggregations(self) -> tuple[str, ...]:
        return (self.aggregation, *self.others)

    @property
    def filled(self) -> int:
        """Micro-batches with a target, on the dp rank that has most of them."""
        per_rank = len(self.targets) // self.layout.dp
        ranks = (self.targets[first : first + per_rank] for first in range(0, len(self.targets), per_rank))
        return max(sum(map(any, tokens)) for tokens in ranks)

    @property
    def padded(self) -> bool:
        """Whether any packed row has padding behind it, or is nothing else."""
        shards = self.layout.context * (self.layout.tp if self.layout.sequence_parallel else 1)
        return any(sum(lengths) % shards or not lengths for lengths in self.documents)


def means_differ(micro_batches: tuple[tuple[int, ...], ...], mode: str) -> bool:
    """Whether the mean of the means over micro-batches weighs some token otherwise than `mode` does.

    micro_batches: the tokens of every sample that count. They can agree: for seq-mean-token-mean where every
    micro-batch holds one sequence, for token-mean where all hold as many tokens.
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
    """A bug, and where a proof must find it.

    changes: by the place where the engine looks a function up, what makes the wrong one of it.
    must_fail_on: the runs whose loss or gradient it makes wrong.
    needs: the same in words: what a run must have.
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
    """Within it, `place` ("package.module.name") holds wrong(right), where right is what it held before."""
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    right = getattr(owner, name)
    setattr(owner, name, wrong(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def weights_changed(reweigh: Reweigh) -> Mapping[str, Wrong]:
    """Changes of a bug in the weights of the tokens."""

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
    """Changes of a bug in the reduction of gradients: change(chunks, groups) follows it."""

    def wrong(finalize_model_grads: Callable) -> Callable:
        def reduce_wrongly(chunks, **kwargs):
            finalize_model_grads(chunks, **kwargs)
            change(chunks, kwargs["pg_collection"])

        return reduce_wrongly

    return {REDUCE_GRADIENTS: wrong}
