"""Run micro-batches through Megatron-Core's forward-backward schedules: no pipelining, 1F1B, interleaved."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor, nn

from isoloss.parallel.mesh import Mesh

MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")


def run_schedule(
    mesh: Mesh,
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    forward: Callable[[nn.Module, MicroBatch], Tensor],
    loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Output]],
    *,
    forward_only: bool = False,
) -> list[Output]:
    """Forward (and backward) of every micro-batch; gradients accumulate as plain sums.

    forward(chunk, micro_batch): a model chunk's output; loss(micro_batch, output): on the last stage, a scalar to be
    differentiated as it is, and anything to return. Megatron's own divisions never happen: the loss goes back as a
    3-tuple under `calculate_per_token_loss=True`, whose token count our finalize hook ignores (see
    docs/normalization.md).
    Returns what `loss` returned, one a micro-batch, on the last pipeline stage; [] elsewhere.
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
            return value, torch.zeros((), dtype=torch.int, device=value.device), returned

        return forward(chunk, micro_batch), loss_func

    run = get_forward_backward_func(layout.pp, layout.vpp if layout.vpp > 1 else None)
    iterators = [iter(micro_batches) for _ in chunks]
    return run(
        forward_step_func=forward_step,
        data_iterator=iterators if layout.vpp > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=mesh.row_multiple,  # placeholder: stages exchange the real shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
    )
