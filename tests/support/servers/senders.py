"""Weights on their way from the ranks that hold them to a server; runs on every rank."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import weight_sync
from isoloss.engine.rl.config import RolloutConfig
from support.models.transformers_parity import make_engine

OBJECTS = ("all_gather_object", "broadcast_object_list")  # names, shapes and failures, no weights
Traffic = Counter[tuple[str, tuple[int, ...]]]


class Between(TorchDispatchMode):
    """Bytes of tensors in collectives and messages, by op and ranks; those of other threads, where the groups with the
    servers are, and those of objects are left out."""

    def __init__(self):
        super().__init__()
        self.traffic: Traffic = Counter()
        self._objects = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not self._objects:
            tensors = [each for each in tree_leaves(args[0]) if isinstance(each, torch.Tensor)]
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0])))
            op = str(func._overloadpacket).removeprefix("c10d.")
            self.traffic[op, ranks] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def quiet(call):
            def called(*args: Any, **options: Any) -> Any:
                self._objects = True
                try:
                    return call(*args, **options)
                finally:
                    self._objects = False

            return called

        with contextlib.ExitStack() as stack:
            for name in OBJECTS:
                stack.enter_context(mock.patch.object(dist, name, quiet(getattr(dist, name))))
            stack.enter_context(self)
            yield


def sync(
    urls: tuple[str, ...],
    folder: Path,
    logs: Path,
    way: Literal["broadcast", "disk"],
    bucket_bytes: int,
    parallel: dict,
) -> tuple[list[Traffic], int]:
    """What went between the ranks of the trainer in each of two updates, and of how many groups a server is then."""
    engine = make_engine(folder, "fp32", **parallel)
    config = RolloutConfig(backend="sglang", servers=urls, weight_sync=way, timeout=60.0, sync_dir=str(logs / "sync"))
    backend = ServerBackend(config, folder, engine.arch.vocab_size, logs, SGLangServer, weight_sync)
    found = []
    try:
        for version in (1, 2):
            between = Between()
            with between.counting():
                backend.update_weights(engine.weight_stream(bucket_bytes, backend.receives), version)
            assert backend.weight_version() == version
            found.append(between.traffic)
        groups = len(backend._servers[0].get("/received")["groups"])
        dist.barrier()  # none has left its group
        return found, groups
    finally:
        backend.close()
