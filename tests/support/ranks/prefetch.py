"""When a step packs its rows, and what it makes of them; runs on every rank."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from isoloss.engine.step import forward_backward, step_batch
from isoloss.parallel import schedule
from support.models.families import VOCAB
from support.models.transformers_parity import TOKEN_MEAN, make_engine, make_samples

LENGTHS = (120, 101, 97, 110, 90, 125)  # each a row of its own
Event = tuple[str, int]


class AllAtOnce:
    """The slow twin of `schedule.OneAhead`: every row is packed before the first forward."""

    def __init__(self, items: Sequence, count: int):
        made = list(items)
        self.iterators = [iter(made) for _ in range(count)]

    def make_next(self) -> None: ...


def passed(folder: Path, parallel: dict, twin: bool) -> tuple[list[Event], float, list[Tensor]]:
    """What happened in forward and backward of a step, the loss, and the gradients of this rank.

    ("pack", k), ("forward", k) where it has been launched, and ("backward", k) where it begins.
    """
    engine = make_engine(folder, "fp32", **parallel)
    events: list[Event] = []
    rows: list[Tensor] = []
    pack, forward_row = step_batch.pack, forward_backward.forward_row

    def packing(*args, **options):
        packed = pack(*args, **options)
        events.append(("pack", len(rows)))
        rows.append(packed.tokens_R)
        return packed

    def forwarding(chunk, tokens_R, *args, **options):
        (k,) = (k for k, row in enumerate(rows) if row is tokens_R)
        out = forward_row(chunk, tokens_R, *args, **options)
        events.append(("forward", k))
        out.register_hook(lambda grad: events.append(("backward", k)))
        return out

    with (
        mock.patch.object(step_batch, "pack", packing),
        mock.patch.object(forward_backward, "forward_row", forwarding),
        mock.patch.object(schedule, "OneAhead", AllAtOnce if twin else schedule.OneAhead),
    ):
        metrics = engine.forward_backward(make_samples(LENGTHS, VOCAB), TOKEN_MEAN)
    gradients = [p.main_grad.clone() for chunk in engine.chunks for p in chunk.parameters()]
    return events, metrics.loss, gradients


def uploads(folder: Path, parallel: dict) -> list[tuple[int, int]]:
    """Of each forward of a chunk in a step: the row, and which of the tables of uploads it was given."""
    engine = make_engine(folder, "fp32", **parallel)
    given: list[tuple[Tensor, object]] = []
    forward_row = forward_backward.forward_row

    def forwarding(chunk, tokens_R, positions_R, row):
        given.append((tokens_R, row.uploads))
        return forward_row(chunk, tokens_R, positions_R, row)

    with mock.patch.object(forward_backward, "forward_row", forwarding):
        engine.forward_backward(make_samples(LENGTHS, VOCAB), TOKEN_MEAN)
    rows, tables = ([id(each) for each in column] for column in zip(*given))
    torch.testing.assert_close(len(set(rows)), len(LENGTHS))
    return [(rows.index(row), tables.index(table)) for row, table in zip(rows, tables)]
