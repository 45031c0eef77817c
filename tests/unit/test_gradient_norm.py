"""The norm of the whole gradient, and clipping to it: what a loop over parameters gives, to the rounding of fp64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isoloss.engine.step import optimizer
from isoloss.engine.step.optimizer import clip_gradients, global_grad_norm


@pytest.fixture(params=(torch.float32, torch.float64), ids=str)
def parts(request, one_rank, monkeypatch):
    """An optimizer of two parts, the second one without parameters, as on a pipeline stage without experts."""
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=random, dtype=request.param) * 10**-size for size in (1, 2, 3, 4, 5, 6, 7)]
    parameters = [SimpleNamespace(grad=grad) for grad in grads] + [SimpleNamespace(grad=None)]
    monkeypatch.setattr(optimizer, "gradients_for_norm", lambda part: part.grads)
    return SimpleNamespace(
        chained_optimizers=[
            SimpleNamespace(grads=g, get_grad_stats_parallel_group=lambda: one_rank, get_parameters=lambda p=p: p)
            for g, p in ((grads, parameters), ([], []))
        ]
    )


def test_the_norm_is_that_of_a_loop(parts):
    total = torch.zeros((), dtype=torch.float64)
    for grad in parts.chained_optimizers[0].grads:
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    assert global_grad_norm(parts) == pytest.approx(math.sqrt(total.item()), rel=1e-15)


@pytest.mark.parametrize("size", [optimizer.BLOCK - 1, optimizer.BLOCK, 3 * optimizer.BLOCK + 5])
def test_every_block_counts_once(one_rank, monkeypatch, size):
    """Of a gradient of two dimensions as well, whose squares of fp32 numbers numpy sums in fp64."""
    grad = torch.randn(size, generator=torch.Generator().manual_seed(1)).repeat(2, 1) * 1e-3
    monkeypatch.setattr(optimizer, "gradients_for_norm", lambda part: [grad])
    part = SimpleNamespace(get_grad_stats_parallel_group=lambda: one_rank)
    wanted = np.sqrt((grad.numpy().astype(np.float64) ** 2).sum())
    assert global_grad_norm(SimpleNamespace(chained_optimizers=[part])) == pytest.approx(wanted, rel=1e-14)


def test_the_host_waits_once(parts, monkeypatch):
    asked = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: asked.append(self) or item(self))
    global_grad_norm(parts)
    assert len(asked) == 1


@pytest.mark.parametrize("clip", (0.0, 0.01, 1e9))
def test_clipping_is_that_of_a_loop(parts, clip):
    grads = parts.chained_optimizers[0].grads
    norm = global_grad_norm(parts)
    expected = [grad * (clip / norm) if 0 < clip < norm else grad.clone() for grad in grads]
    clip_gradients(parts, norm, clip)
    assert all(torch.equal(grad, wanted) for grad, wanted in zip(grads, expected))
