"""Run micro-batches through Megatron-Core's forward-backward schedules: no pipelining, 1F1B, interleaved."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from isoloss.parallel.mesh import Mesh

MicroBatch = TypeVar("MicroBatch")
Item = TypeVar("Item")
Output = TypeVar("Output")


def run_schedule(
    mesh: Mesh,
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    rows: Sequence[int],
    forward: Callable[[nn.Module, MicroBatch], Tensor],
    loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Output]],
    *,
    forward_only: bool = False,
) -> list[Output]:
    """Run the forward (and backward) of every micro-batch; gradients accumulate as plain sums.

    Returns on the last pipeline stage the second result of `loss` for each micro-batch; [] on other stages.

    rows: tokens of each micro-batch's whole row, with padding. Every stage derives the shapes of messages from it.
    forward: function from a model chunk and a micro-batch to the chunk's output.
    loss: function from a micro-batch and the output of the last stage to a scalar, which is differentiated as it is,
        and a second result.
    Raises ValueError if an interleaved schedule gets no multiple of pp micro-batches.
    Collectives: those of the model, and point-to-point messages between pipeline stages.
    """
    layout = mesh.layout
    if layout.vpp > 1 and len(micro_batches) % layout.pp:
        raise ValueError(
            f"an interleaved schedule needs a multiple of pp={layout.pp} micro-batches, not {len(micro_batches)}"
        )

    def forward_step(iterator, chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro_batch = next(iterator)

        def loss_func(output: Tensor):
            value, returned = loss(micro_batch, output)
            # Under `calculate_per_token_loss=True`, a 3-tuple keeps Megatron from dividing the loss; our finalize hook
            # ignores the token count (docs/normalization.md).
            return value, torch.zeros((), dtype=torch.int, device=value.device), returned

        output = forward(chunk, micro_batch)
        # The host packs the next row while the device computes this forward, so the row's upload waits for nothing.
        ahead.make_next()
        return output, loss_func

    run = get_forward_backward_func(layout.pp, layout.vpp if layout.vpp > 1 else None)
    ahead = OneAhead(micro_batches, len(chunks))
    iterators = ahead.iterators
    messages = Messages(mesh, get_model_config(chunks[0]), rows)
    return run(
        forward_step_func=forward_step,
        data_iterator=iterators if layout.vpp > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=mesh.row_multiple,  # placeholder: `messages` knows the real shapes
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=messages,
        pg_collection=mesh.megatron,
    )


def through_stages(
    mesh: Mesh, chunks: Sequence[nn.Module], rows: int, forward: Callable[[nn.Module], Tensor]
) -> Tensor | None:
    """Run the forward of one row through all stages, without gradients.

    Returns the output of the last stage on this stage; None on other stages.

    rows: first dimension of the hidden states that stages send each other.
    forward: function from a model chunk to its output.
    Collectives: those of the model, and point-to-point messages between pipeline stages.
    """
    pp, config = mesh.pp, get_model_config(chunks[0])
    stages = range(pp.size() * len(chunks))
    for number in stages:
        if number % pp.size() != pp.rank():
            continue
        chunk = chunks[number // pp.size()]
        if number > 0:
            shape, device = (rows, 1, config.hidden_size), torch.cuda.current_device()
            received = torch.empty(shape, dtype=config.pipeline_dtype, device=device)
            dist.recv(received, group=pp, group_src=(number - 1) % pp.size())
            unwrapped: Any = get_attr_wrapped_model(chunk, "set_input_tensor", return_model_obj=True)
            unwrapped.set_input_tensor(received)
        output = forward(chunk)
        if number == stages[-1]:
            return output
        dist.send(output, group=pp, group_dst=(number + 1) % pp.size())
    return None


class OneAhead(Generic[Item]):
    """Iterators over the same items. An item is made once, and kept until the last iterator has taken it.

    `make_next` makes at most one item before an iterator asks for it. (`itertools.tee` would keep up to 57 items that
    all iterators have taken.)
    """

    def __init__(self, items: Sequence[Item], count: int):
        self._items, self._made = items, 0
        self._waiting = [deque[Item]() for _ in range(count)]
        self._untaken = False  # True while no iterator has taken the newest item
        self.iterators = [self._taken_from(own) for own in self._waiting]

    def make_next(self) -> None:
        """Make the next item, unless no iterator has taken the newest item yet, or no item is left."""
        if self._untaken or self._made == len(self._items):
            return
        item = self._items[self._made]
        self._made, self._untaken = self._made + 1, True
        for queue in self._waiting:
            queue.append(item)

    def _taken_from(self, own: deque[Item]) -> Iterator[Item]:
        for index in range(len(self._items)):
            if index == self._made:
                self.make_next()
            self._untaken = self._untaken and index + 1 < self._made
            yield own.popleft()


class Messages(P2PCommunicator):
    """Megatron's messages between pipeline stages, with shapes from the plan.

    With `variable_seq_lengths`, Megatron sends the shape of every message first, and the host waits for it. Here each
    stage computes the shapes: on every channel, micro-batches come in the order of Megatron's table of the schedule. An
    assertion fails on a stage that is about to send a shape that the plan does not have next.

    rows: tokens of each micro-batch's whole row.
    """

    def __init__(self, mesh: Mesh, config: TransformerConfig, rows: Sequence[int]):
        super().__init__(mesh.pp, config)
        layout = mesh.layout
        shards = layout.context * (layout.tp if layout.sequence_parallel else 1)
        table = get_schedule_table(len(rows), layout.vpp, config.microbatch_group_size_per_vp_stage)

        def shapes(*, at_end: bool) -> Iterator[list[int]]:
            # The first stage receives nothing in its first chunk, and the last stage sends nothing from its last one;
            # the backward is the reverse. Every chunk has the micro-batches of a group in the same order, so it does
            # not matter which chunk is left out.
            return ([rows[index] // shards, 1, config.hidden_size] for index, chunk in table if chunk or not at_end)

        first, last = mesh.pp.rank() == 0, mesh.pp.rank() == layout.pp - 1
        self._from_prev, self._to_prev = shapes(at_end=first), shapes(at_end=first)
        self._from_next, self._to_next = shapes(at_end=last), shapes(at_end=last)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        for sent, planned in ((tensor_send_next, self._to_next), (tensor_send_prev, self._to_prev)):
            assert sent is None or list(sent.shape) == next(planned), f"{[*sent.shape]} is not what the plan says"
        return next(self._from_prev) if recv_prev else None, next(self._from_next) if recv_next else None
