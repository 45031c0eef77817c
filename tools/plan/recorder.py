"""Record the work of a device op by op: memory, collectives, arithmetic, launches, and waits of the host."""

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import isoloss.engine
import isoloss.models
import isoloss.parallel
from isoloss.engine.memory.live_bytes import LiveBytes
from isoloss.parallel import Mesh
from isoloss.tools.plan.flops import flops_of

aten = torch.ops.aten
# Ops of torch that launch nothing: they allocate, or return a view.
NO_LAUNCH = {"aten.detach", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.alias",
             "aten._unsafe_view", "aten.new_empty_strided", "aten.lift_fresh", "aten.set_"}  # fmt: skip
# Answers where a made-up number would end the run, by the file that asks. This one: whether a rank failed to write.
ANSWERS = {"megatron/core/dist_checkpointing/strategies/state_dict_saver.py": False}
GROUPS = ("expert_dp", "etp", "ep", "stage", "dp_context", "dp", "context", "ring", "ulysses", "pp", "tp")


@dataclass(frozen=True)
class Collective:
    """A kind of exchange in a phase.

    op: c10d's name.
    group: axis of the mesh.
    nodes: number of nodes on which its ranks are.
    site: file:line of the caller.
    """

    op: str
    group: str
    ranks: int
    nodes: int
    dtype: str
    site: str


@dataclass
class Phase:
    """Record of a part of the run. Bytes are device memory, FLOPs count multiplications and additions.

    before, peak, after: live bytes. at_peak: live bytes at the peak by (phase, site) of the allocation.
    peak_site: file:line of the allocation at the peak. launch_sites: number of launches, by site.
    flops, launches, traffic: numbers by name of the op; traffic is bytes that ops without FLOPs read and write.
    waits: number of times that the host waits for the device or a copy between them, by (kind, site).
    """

    name: str
    before: int
    peak: int = 0
    after: int = 0
    peak_site: str = ""
    at_peak: Mapping[tuple[str, str], int] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    launch_sites: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[Collective] = field(default_factory=Counter)
    sent: Counter[Collective] = field(default_factory=Counter)


class Recorder(LiveBytes):
    """Counts ops on one type of device, in phases."""

    def __init__(self, device_type: str, gpus_per_node: int):
        super().__init__(device_type)
        self.phases: list[Phase] = []
        self.faults: Counter[tuple[str, str]] = Counter()  # ops that a device would refuse, by file:line
        self._gpus_per_node = gpus_per_node
        self._where = ""  # site of the op that runs
        self._origins: dict[tuple[str, str], int] = {}  # (phase, site) of an allocation -> index
        self._origin_of: dict[int, int] = {}  # storage -> index of its origin
        self._changes: list[tuple[int, int]] = []  # (origin, bytes more or fewer), in order
        self._sites_of_changes: list[str] = []
        self._groups: dict[str, str] = {}
        self._pinned: dict[int, weakref.ref] = {}  # pinned storages of the host

    # ---- phases ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name, self.live_bytes)
        self.phases.append(phase)
        start = len(self._changes)
        yield phase
        changes = np.array([nbytes for _, nbytes in self._changes[start:]], dtype=np.int64)
        levels = phase.before + np.concatenate([[0], np.cumsum(changes)])
        top = int(levels.argmax())
        phase.peak, phase.after = int(levels[top]), self.live_bytes
        phase.peak_site = self._sites_of_changes[start + top - 1] if top else ""
        origins, at_peak = list(self._origins), Counter()
        for origin, nbytes in self._changes[: start + top]:
            at_peak[origins[origin]] += nbytes
        phase.at_peak = {origin: nbytes for origin, nbytes in at_peak.most_common() if nbytes > 0}

    def name_groups(self, mesh: Mesh) -> None:
        """Name the groups of collectives by the axes of a mesh."""
        self._groups = {getattr(mesh, axis).group_name: axis for axis in GROUPS}

    def wait(self, kind: str, tensor: Tensor | None = None) -> None:
        """Count a wait of the host for the device, if the tensor is on the device."""
        if tensor is None or self.counts(tensor):
            self.phases[-1].waits[kind, site()] += 1

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _live_from_now(self, storage: torch.UntypedStorage) -> None:
        origin = self._origins.setdefault((self.phases[-1].name, self._where), len(self._origins))
        self._origin_of[storage._cdata] = origin
        super()._live_from_now(storage)

    def _changed(self, key: int, nbytes: int) -> None:
        self._changes.append((self._origin_of[key], nbytes))
        self._sites_of_changes.append(self._where)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._where = site()
        super().resized(storage, nbytes)

    def pin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping | None = None):
        if not self.phases:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _item(self, tensor: Tensor) -> float | int | bool:
        file = site().partition(":")[0]
        return ANSWERS[file] if file in ANSWERS else super()._item(tensor)

    def _goes_alone(self, args: Sequence[Any], kwargs: Mapping, host: Tensor) -> bool:
        asked = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        return bool(asked) and host.untyped_storage()._cdata in self._pinned

    def _of_device(self, tensor: Tensor) -> Tensor:
        if self.counts(tensor):
            return tensor
        with self.fake:
            return torch.empty_like(tensor, device=self._device_type)

    def _ran_kernel(self, name: str, args: Any, out: Any) -> None:
        self._where = site()
        phase = self.phases[-1]
        phase.launches[name] += 1
        phase.launch_sites[self._where] += 1
        phase.traffic[name] += _nbytes(args) + _nbytes(out)

    def _ran(self, func: Any, args: Any, kwargs: Any, out: Any, given: Sequence[Tensor]) -> None:
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self.counts(t)]
        if not taken and not given:
            return
        self._where, counted = site(), [*taken, *given]
        phase, name = self.phases[-1], str(func._overloadpacket)
        if func is aten._to_copy.default and not self.counts(args[0]):
            if not self._goes_alone(args, kwargs, args[0]):
                self.wait("to the device")
        elif func is aten.copy_.default and args[0].device.type != args[1].device.type:
            to, source = args[:2]
            if not self._goes_alone(args, kwargs, source if self.counts(to) else to):
                self.wait("to the device" if self.counts(to) else "to the host")
        elif name in ("aten.nonzero", "aten.masked_select", "aten._unique2", "aten.bincount"):
            self.wait(name.removeprefix("aten."))
        if func.is_view or name in NO_LAUNCH or _is_own_copy(func, args):
            return
        phase.launches[name] += 1
        phase.launch_sites[self._where] += 1
        flops = flops_of(func, args, kwargs, out)
        if flops is None:
            phase.traffic[name] += _nbytes(counted)
        else:
            phase.flops[name] += flops

    def _exchanged(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        op = str(func._overloadpacket).removeprefix("c10d.")
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if op == "barrier":  # torch makes the tensor of a barrier, on the host where it does not know the backend
            return args
        for tensor in tensors:
            if not self.counts(tensor):
                self.faults[f"{op} of a tensor of the host", site()] += 1
            elif not tensor.is_contiguous():
                self.faults[f"{op} of a tensor with gaps", site()] += 1
        args = tree_map_only(Tensor, self._of_device, args)  # a refused op is counted above, and goes on
        group = next((_unboxed(a) for a in args if isinstance(a, torch.ScriptObject)), None)
        if group is not None and tensors and self.counts(tensors[0]):
            key = Collective(
                op, self._groups.get(group.group_name, "world"), group.size(),
                len({rank // self._gpus_per_node for rank in dist.get_process_group_ranks(group)}),
                str(tensors[0].dtype).removeprefix("torch."), site(),
            )  # fmt: skip
            self.phases[-1].calls[key] += 1
            # Where inputs and outputs differ in size, the larger one: all ranks of the group together.
            self.phases[-1].sent[key] += max(map(_nbytes, args))
        return args


def _nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def _unboxed(argument: torch.ScriptObject) -> dist.ProcessGroup | None:
    with contextlib.suppress(RuntimeError, TypeError):
        return dist.ProcessGroup.unbox(argument)
    return None


def _is_own_copy(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a copy is that of `x[i] += y` onto itself, which torch leaves out."""
    if func is not aten.copy_.default:
        return False
    to, source = args[:2]
    return (
        to.untyped_storage()._cdata == source.untyped_storage()._cdata
        and to.storage_offset() == source.storage_offset()
        and to.stride() == source.stride()
    )


# ---- sites -----------------------------------------------------------------------------------------------------------

# Folders whose frames are named, and the names of their files in a report.
SOURCES = {
    str(Path(module.__path__[0])): f"isoloss/{module.__name__.split('.')[-1]}"
    for module in (isoloss.engine, isoloss.models, isoloss.parallel)
} | {str(Path(megatron.core.__path__[0])): "megatron/core"}
# Files that call an op on behalf of their callers.
TRANSPARENT = ("/cuda_stubs.py", "/fused.py", "/memory/live_bytes.py", "/memory/nowhere.py")


def site() -> str:
    """Return file:line of the innermost frame of isoloss or Megatron; in a backward with the node of autograd's graph,
    and that node alone in a thread of autograd."""
    node = torch._C._current_autograd_node()
    behind = f" {node.name()}" if node else ""
    frame = sys._getframe(1)
    while frame is not None:
        file = named(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}{behind}"
        frame = frame.f_back
    return f"torch{behind}"


@functools.cache
def named(path: str) -> str | None:
    """Return the name of a file in a report; None for a file that is not named."""
    for folder, title in SOURCES.items():
        if path.startswith(folder) and not path.endswith(TRANSPARENT):
            return title + path.removeprefix(folder)
    return None
