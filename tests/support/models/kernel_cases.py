"""Inputs for every kernel of the product, as a layer would give them, in the precision that a GPU trains in."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import isoloss.models.mcore
import isoloss.parallel
from isoloss.models.mcore.layers import activations, grouped_attention, norm, residual_norm, rotary
from isoloss.models.mcore.moe import dispatch, grouped_experts
from isoloss.parallel.ops import block_attention
from isoloss.parallel.ops import loss_head_kernels as loss_head
from isoloss.parallel.ops.fused import Fused

Inputs = Sequence[Any]
ROWS, HEADS, WIDTH, COLUMNS = 300, 4, 64, 2003


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _bf16(*shape: int, seed: int = 0) -> Tensor:
    return _draw(*shape, seed=seed).bfloat16()


def _table() -> Tensor:
    inv_freq = 1e4 ** -torch.linspace(0, 1, WIDTH // 4)
    return rotary.rotary_table(torch.arange(ROWS), inv_freq, 1.0, torch.float32)


def _targets() -> Tensor:
    return torch.randint(-1, COLUMNS, (ROWS,), generator=torch.Generator().manual_seed(1))


def _turned() -> Inputs:
    return _bf16(ROWS, 1, HEADS, WIDTH), _table()


def _normed() -> Inputs:
    """Gradient, input, weight and scale of a norm over all heads together."""
    x, weight = _bf16(ROWS, 1, WIDTH, seed=1), 1 + _bf16(WIDTH, seed=2) / 4
    return _bf16(ROWS, 1, WIDTH), x, weight, torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


def _log_sum_exp() -> Tensor:
    return torch.logsumexp(3 * _draw(ROWS, COLUMNS), 1)


CASES: dict[str, tuple[Fused, Callable[[], Inputs]]] = {
    "turn_halves": (rotary.turn_halves, _turned),
    "turn_halves_back": (rotary.turn_halves_back, _turned),
    "turn_neighbours": (rotary.turn_neighbours, _turned),
    "turn_neighbours_back": (rotary.turn_neighbours_back, _turned),
    "sum_of_squares": (norm.sum_of_squares, lambda: _normed()[1:2]),
    "scaled": (norm.scaled, lambda: _normed()[1:]),
    "sum_along_the_norm": (norm.sum_along_the_norm, _normed),
    "unit_norm_forward": (norm.unit_norm_forward, lambda: (_bf16(ROWS, HEADS, WIDTH), 1e-6)),
    "unit_norm_backward": (
        norm.unit_norm_backward,
        lambda: (_bf16(ROWS, HEADS, WIDTH), _bf16(ROWS, HEADS, WIDTH, seed=1), _draw(ROWS, HEADS, 1, seed=2).abs()),
    ),
    "joint_norm_backward": (norm.joint_norm_backward, lambda: (*_normed(), _draw(ROWS, 1, 1, seed=3))),
    "swiglu_forward": (activations.swiglu_forward, lambda: (_bf16(ROWS, 2 * WIDTH),)),
    "swiglu_backward": (activations.swiglu_backward, lambda: (_bf16(ROWS, 2 * WIDTH), _bf16(ROWS, WIDTH, seed=1))),
    "clamped_swiglu_forward": (activations.clamped_swiglu_forward, lambda: (5 * _bf16(ROWS, 2 * WIDTH),)),
    "clamped_swiglu_backward": (
        activations.clamped_swiglu_backward,
        lambda: (5 * _bf16(ROWS, 2 * WIDTH), _bf16(ROWS, WIDTH, seed=1)),
    ),
    "geglu_forward": (activations.geglu_forward, lambda: (_bf16(ROWS, 2 * WIDTH),)),
    "geglu_backward": (activations.geglu_backward, lambda: (_bf16(ROWS, 2 * WIDTH), _bf16(ROWS, WIDTH, seed=1))),
    "weighted_swiglu": (grouped_experts.weighted_swiglu, lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs())),
    "weighted_swiglu_again": (
        grouped_experts.weighted_swiglu_again,
        lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs(), _bf16(ROWS, WIDTH, seed=1)),
    ),
    "weighted_swiglu_backward": (
        grouped_experts.weighted_swiglu_backward,
        lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs(), _bf16(ROWS, WIDTH, seed=1)),
    ),
    "weighted_geglu": (grouped_experts.weighted_geglu, lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs())),
    "weighted_geglu_again": (
        grouped_experts.weighted_geglu_again,
        lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs(), _bf16(ROWS, WIDTH, seed=1)),
    ),
    "weighted_geglu_backward": (
        grouped_experts.weighted_geglu_backward,
        lambda: (_bf16(ROWS, 2 * WIDTH), _draw(ROWS).abs(), _bf16(ROWS, WIDTH, seed=1)),
    ),
    "without_empty": (
        grouped_experts.without_empty,
        lambda: (_bf16(3, WIDTH, WIDTH), torch.tensor([4, 4, 9], dtype=torch.int32)),
    ),
    "add_rows": (
        dispatch.add_rows,
        lambda: (_bf16(ROWS, WIDTH), torch.randint(0, ROWS, (50, 4), generator=torch.Generator().manual_seed(1))),
    ),
    "add_and_norm": (
        residual_norm.add_and_norm,
        lambda: (_bf16(ROWS, 1, WIDTH), _bf16(ROWS, 1, WIDTH, seed=1), _bf16(WIDTH, seed=2), 1e-6, 1.0),
    ),
    "add_and_norm_backward": (
        residual_norm.add_and_norm_backward,
        lambda: (
            _bf16(ROWS, 1, WIDTH), _bf16(ROWS, 1, WIDTH, seed=1), _bf16(ROWS, 1, WIDTH, seed=2), _bf16(WIDTH, seed=3),
            _draw(ROWS, 1, 1).abs(), 1.0,
        ),
    ),
    "offset_norm": (norm.offset_norm, lambda: (_bf16(ROWS, 1, WIDTH), _bf16(WIDTH, seed=1), 1e-6, 1.0)),
    "norm_backward": (
        norm.norm_backward,
        lambda: (
            _bf16(ROWS, 1, WIDTH), _bf16(ROWS, 1, WIDTH, seed=1), _bf16(WIDTH, seed=2), _draw(ROWS, 1, 1).abs(), 1.0,
        ),
    ),
    "gated_norm_forward": (
        norm.gated_norm_forward,
        lambda: (_bf16(ROWS, 2, WIDTH), _bf16(ROWS, 2, WIDTH, seed=1), _bf16(WIDTH, seed=2), 1e-6),
    ),
    "gated_norm_backward": (
        norm.gated_norm_backward,
        lambda: (
            _bf16(ROWS, 2, WIDTH), _bf16(ROWS, 2, WIDTH, seed=1), _bf16(ROWS, 2, WIDTH, seed=2), _bf16(WIDTH, seed=3),
            1e-6,
        ),
    ),
    "gate_forward": (grouped_attention.gate_forward, lambda: (_bf16(ROWS, WIDTH), _bf16(ROWS, WIDTH, seed=1))),
    "gate_backward": (
        grouped_attention.gate_backward,
        lambda: (_bf16(ROWS, WIDTH), _bf16(ROWS, WIDTH, seed=1), _bf16(ROWS, WIDTH, seed=2)),
    ),
    "union": (block_attention.union, lambda: (_draw(ROWS, HEADS), _draw(ROWS, HEADS, seed=1))),
    "weighted": (
        block_attention.weighted,
        lambda: (_draw(ROWS, HEADS, WIDTH), _draw(ROWS, HEADS), _bf16(ROWS, HEADS, WIDTH), _draw(ROWS, HEADS, seed=1)),
    ),
    "statistics": (loss_head.statistics, lambda: (3 * _draw(ROWS, COLUMNS), _targets(), 0.7, None, True)),
    "statistics, capped": (loss_head.statistics, lambda: (3 * _draw(ROWS, COLUMNS), _targets(), 0.7, 5.0, True)),
    "gradient": (
        loss_head.gradient,
        lambda: (3 * _draw(ROWS, COLUMNS), _targets(), _log_sum_exp(), _draw(ROWS), 1.0, None, torch.bfloat16),
    ),
    "gradient, capped": (
        loss_head.gradient,
        lambda: (3 * _draw(ROWS, COLUMNS), _targets(), _log_sum_exp(), _draw(ROWS), 1.0, 5.0, torch.bfloat16),
    ),
    "gradient_with_entropy": (
        loss_head.gradient_with_entropy,
        lambda: (
            3 * _draw(ROWS, COLUMNS), _targets(), _log_sum_exp(), _draw(ROWS), _draw(ROWS, seed=1).abs(),
            _draw(ROWS, seed=2), 1.0, 5.0, torch.bfloat16,
        ),
    ),
}  # fmt: skip


def of_the_product() -> Iterator[Fused]:
    """Every kernel that some module of models/mcore or parallel holds."""
    for package in (isoloss.models.mcore, isoloss.parallel):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("te_attention"):  # which derives from Transformer Engine
                held = vars(importlib.import_module(module.name)).values()
                yield from (each for each in held if isinstance(each, Fused))


def exact(inputs: Inputs) -> Inputs:
    """The same numbers in fp64, where they are numbers, and a result that is not rounded."""
    return [
        torch.float64 if isinstance(each, torch.dtype)
        else each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in inputs
    ]  # fmt: skip


def errors(found: Any, right: Any) -> list[float]:
    """Of each result, relative."""
    results = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, right)), strict=True)
    return [float((a.double().cpu() - b.cpu()).norm() / b.cpu().norm().clamp(min=1e-30)) for a, b in results]
