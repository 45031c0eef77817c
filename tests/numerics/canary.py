"""Runs of the recipe in which one rank goes wrong from the second step on; runs on every rank."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist

from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.config.schema import Config
from isoloss.engine.sft import loop
from isoloss.engine.step import forward_backward, step_batch
from isoloss.engine.step.forward_backward import CanaryError
from isoloss.parallel.normalizer import TokenCounts


def lost_target(batch: PackedBatch) -> PackedBatch:
    """Without its last target."""
    rest = {name: values[:-1] for name, values in batch.fields.items()}
    return dataclasses.replace(
        batch,
        labelled_N=batch.labelled_N[:-1],
        targets_N=batch.targets_N[:-1],
        document_N=batch.document_N[:-1],
        origin_N=batch.origin_N[:-1],
        weights_AN=batch.weights_AN[:, :-1],
        fields=rest,
    )


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """In the last rank alone, from the second call of the function on."""
    count, pack, schedule, calls = (
        step_batch.count_tokens,
        step_batch.pack,
        forward_backward.run_schedule,
        [],
    )

    def struck() -> bool:
        calls.append(None)
        return dist.get_rank() == dist.get_world_size() - 1 and len(calls) > 1

    def of_its_own(masks, group, **prompts) -> TokenCounts:
        """The counts of its own samples: a rank that left the others out."""
        found = count(masks, group, **prompts)
        own = int(found.tokens_S.sum())
        return dataclasses.replace(found, tokens=own) if struck() else found

    def packed(*arguments):
        """A micro-batch without its last target."""
        found = pack(*arguments)
        return lost_target(found) if struck() else found

    def scheduled(mesh, chunks, micro_batches, rows, *rest, **options):
        """The first micro-batch twice."""
        if struck():
            micro_batches, rows = [*micro_batches, micro_batches[0]], [*rows, rows[0]]
        return schedule(mesh, chunks, micro_batches, rows, *rest, **options)

    planted = {
        "counts": (step_batch, "count_tokens", of_its_own),
        "target": (step_batch, "pack", packed),
        "micro-batch": (forward_backward, "run_schedule", scheduled),
    }[name]
    with mock.patch.object(*planted):
        yield


def told(config: Config, name: str) -> str:
    """What the run ends with: the text of its CanaryError."""
    with fault(name):
        try:
            loop.train_sft(config, "test")
        except CanaryError as error:
            return str(error)
    return "nothing"
