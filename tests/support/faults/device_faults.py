"""Faults that a GPU refuses, or that make the host wait for it, to be planted into a dry run."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from isoloss.engine.step import forward_backward


def _changed(
    owner: Any, name: str, change: Callable[[Tensor], Tensor], place: int
) -> contextlib.AbstractContextManager:
    """A function whose tensor argument at `place` is another one."""
    function = getattr(owner, name)

    def with_another(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:place], change(args[place]), *args[place + 1 :], **kwargs)

    return mock.patch.object(owner, name, with_another)


def _strided(x: Tensor) -> Tensor:
    """The same numbers, with gaps between them."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _strided_send() -> contextlib.AbstractContextManager:
    """And no strided receive, which stands beside it."""
    message = dist.P2POp

    def strided(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> dist.P2POp:
        return message(op, _strided(x) if op is dist.isend else x, *args, **kwargs)

    return mock.patch.object(dist, "P2POp", strided)


def _asked(x: Tensor) -> Tensor:
    x.sum().item()
    return x


HIDDEN = 2  # its place among the arguments of step._token_inputs, which is called once for every micro-batch

FAULTS: Mapping[str, Callable[[], contextlib.AbstractContextManager]] = {
    "a host tensor into an all-gather": lambda: _changed(dist, "all_gather", Tensor.cpu, 1),
    "a strided send": _strided_send,
    "a strided all-gather": lambda: _changed(mappings, "dist_all_gather_func", _strided, 1),
    "an item for every micro-batch": lambda: _changed(forward_backward, "_token_inputs", _asked, HIDDEN),
    "a host tensor beside a device tensor": lambda: _changed(
        forward_backward, "_token_inputs", lambda x: x * torch.ones(x.shape), HIDDEN
    ),
}
