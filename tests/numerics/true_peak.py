"""The memory that a real step of this rank takes, counted twice: bytes of live tensors, and of torch's allocator.

The allocator also knows the copies that gloo makes of what it exchanges, which no GPU does: the two agree where nothing
is exchanged. Tensors of the host, which on a CPU are among the others, take next to nothing.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from isoloss.engine.config.schema import Config
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.plan.phases import full_rows


class LiveBytes(TorchDispatchMode):
    """most: bytes behind tensors that live at a time, looked at after every op."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        living = ((key, reference()) for key, reference in list(self._storages.items()))
        sizes = {key: storage.nbytes() for key, storage in living if storage is not None}
        self._storages = {key: self._storages[key] for key in sizes}
        self.most = max(self.most, sum(sizes.values()))
        return out


def peaks(config: Config) -> tuple[int, int]:
    """Of building the engine and of two steps: most bytes of live tensors, and most of the allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, LiveBytes() as live:
        engine = Engine(config)
        rows = full_rows(config.batch.max_tokens, engine.mesh.layout)
        torch.manual_seed(0)  # of rows of one token all would choose the same experts
        samples = [replace(row, tokens_T=torch.randint(0, engine.arch.vocab_size, row.tokens_T.shape)) for row in rows]
        for _ in range(2):
            engine.train_step(samples, cross_entropy(config.loss))
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    level = most = 0
    for _, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        level += nbytes
        most = max(most, level)
    return live.most, most
