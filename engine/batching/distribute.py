"""Hold samples on rank 0 alone. The other ranks have outlines, and are sent the samples that they compute.

A generated batch is large and is made on rank 0; another rank needs only the samples that the plan of an optimizer
step places there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batching.balance import Plan
from isoloss.engine.batching.plan import Planner
from isoloss.engine.batching.sample import Sample, known_routes, outline
from isoloss.parallel import Mesh
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.rank0 import RankZero
from isoloss.parallel.runtime.process_group import own_host_group


class Scatter:
    """Carry samples from rank 0 to the ranks that compute them, over gloo: to the first rank of each replica of the
    model, and on to the replica's other ranks.

    The constructor is collective over the world.

    here: whether this rank holds them.
    """

    def __init__(self, mesh: Mesh):
        self._rank0 = RankZero()
        self.here = self._rank0.here
        self._dp_rank = mesh.dp.rank()
        dp_ranks = gather_objects(self._dp_rank, self._rank0.group)
        replicas = [[rank for rank, of in enumerate(dp_ranks) if of == dp_rank] for dp_rank in range(mesh.dp.size())]
        self._firsts = [min(ranks) for ranks in replicas]
        self._replica = own_host_group(replicas)

    def make(self, call: Callable[[], list[Sample]]) -> list[Sample]:
        """Return call() on rank 0, outlines of it on the other ranks; or raise its UserError on all. Collective over
        the world."""
        return self._rank0.compute(call, lambda samples: [outline(sample) for sample in samples])

    def hold(self, samples: Sequence[Sample]) -> "RankZeroSamples":
        """Return samples that `make` gave as a `Holder`, for an engine's methods."""
        return RankZeroSamples(samples, self)

    def planned(self, samples: Sequence[Sample], plan: Planner) -> tuple[Plan, list[Sample]]:
        """Return the plan of samples that `make` gave, and the samples: whole where this rank computes them.

        Collectives: a broadcast of the plan over the world; for each replica but rank 0's own a message for each
        of tokens, masks, fields, own targets, owned tokens and routes, and a broadcast of these in every replica.
        """
        step_plan, samples_here = self._rank0.compute(lambda: plan(samples)), list(samples)
        for dp_rank, first in enumerate(self._firsts):
            indices = [*chain.from_iterable(step_plan.micro_batches[dp_rank])]
            if indices and (self.here or dp_rank == self._dp_rank):
                sent = self._sent([samples[index] for index in indices], dp_rank, first)
                for index, sample in zip(indices, sent):
                    samples_here[index] = sample
        return step_plan, samples_here

    def _sent(self, samples: Sequence[Sample], dp_rank: int, first: int) -> list[Sample]:
        """Return the samples, whole, on the ranks of this replica, whose first rank is `first`."""

        def sent(values: Sequence[Tensor]) -> list[Tensor]:
            return self._sent_together(values, dp_rank, first)

        tokens, masks = sent([sample.tokens_T for sample in samples]), sent([sample.mask_T for sample in samples])
        names = [*samples[0].fields]
        fields = [dict(zip(names, of_one)) for of_one in zip(*(sent([s.fields[n] for s in samples]) for n in names))]
        targets = iter(sent(given) if (given := [s.targets_T for s in samples if s.targets_T is not None]) else [])
        owned = iter(sent(given) if (given := [s.owned_T for s in samples if s.owned_T is not None]) else [])
        given = [known_routes(s.routes) for s in samples if s.routes is not None]
        routes = iter(sent(given) if given else [])
        parts = zip(samples, tokens, masks, fields or [{} for _ in samples])
        whole = [
            replace(s, tokens_T=t, mask_T=m, fields=f, targets_T=None if s.targets_T is None else next(targets))
            for s, t, m, f in parts
        ]
        whole = [s if s.owned_T is None else replace(s, owned_T=next(owned)) for s in whole]
        return [s if s.routes is None else replace(s, routes=next(routes)) for s in whole]

    def _sent_together(self, values: Sequence[Tensor], dp_rank: int, first: int) -> list[Tensor]:
        """Send tensors of one type in one message."""
        if self.here:
            if first == 0 and self._replica.size() == 1:
                return [*values]
            flat = torch.cat([each.flatten() for each in values])
        else:
            flat = torch.empty(sum(each.numel() for each in values), dtype=values[0].dtype)
        if first != 0:
            if self.here:
                dist.send(flat.view(torch.uint8), first, group=self._rank0.group)
            elif dist.get_rank() == first:
                dist.recv(flat.view(torch.uint8), 0, group=self._rank0.group)
        if dp_rank == self._dp_rank and self._replica.size() > 1:
            dist.broadcast(flat.view(torch.uint8), first, group=self._replica)
        if self.here:
            return [*values]
        return [part.view(of.shape) for part, of in zip(flat.split([each.numel() for each in values]), values)]

    def close(self) -> None:
        """Destroy the groups. Collective over the world."""
        dist.destroy_process_group(self._replica)
        self._rank0.close()


class RankZeroSamples(Sequence[Sample]):
    """The samples of a step, whole on rank 0; on the other ranks their lengths, ids and the fields' names."""

    def __init__(self, samples: Sequence[Sample], scatter: Scatter):
        self._samples, self._scatter = samples, scatter

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index):
        return self._samples[index]

    def planned(self, plan: Planner) -> tuple[Plan, list[Sample]]:
        """See `Scatter.planned`."""
        return self._scatter.planned(self._samples, plan)
