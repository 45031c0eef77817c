"""Record the work of a device op by op: memory, collectives, arithmetic, launches, and waits of the host."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from isoloss.parallel import Mesh
from isoloss.tools.plan.flops import flops_of
from isoloss.tools.plan.sites import site

aten = torch.ops.aten
ALLOCATION = 512  # bytes: PyTorch's caching allocator rounds up to a multiple of it
# Ops of torch that launch nothing: they allocate, or return a view.
NO_LAUNCH = {"aten.detach", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.alias",
             "aten._unsafe_view", "aten.new_empty_strided", "aten.lift_fresh", "aten.set_"}  # fmt: skip
# Answers where a made-up number would end the run, by the file that asks. This one: whether a rank failed to write.
ANSWERS = {"megatron/core/dist_checkpointing/strategies/state_dict_saver.py": False}
LARGEST_HOST_COPY = 1 << 20  # bytes of the largest copy to the host that is really allocated there
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


class Recorder(TorchDispatchMode):
    """Counts ops on one type of device, in phases. Numbers that the host reads from the device are made up.

    device_type: type of the device whose tensors are counted; tensors of the host are not.
    """

    def __init__(self, device_type: str, gpus_per_node: int):
        super().__init__()
        self.phases: list[Phase] = []
        self.faults: Counter[tuple[str, str]] = Counter()  # ops that a device would refuse, by file:line
        self.share_selected = 1.0  # share of a mask that `masked_select` selects
        self.fake: contextlib.AbstractContextManager = (
            contextlib.nullcontext()
        )  # the mode in which tensors of the device are made
        self._within_kernel = False
        self._device_type, self._gpus_per_node = device_type, gpus_per_node
        self._live: dict[int, tuple[weakref.ref, int, int]] = {}  # storage -> reference to it, bytes, origin
        self._origins: dict[tuple[str, str], int] = {}  # (phase, site) of an allocation -> index
        self._changes: list[tuple[int, int]] = []  # (origin, bytes more or fewer), in order
        self._sites_of_changes: list[str] = []
        self._groups: dict[str, str] = {}
        self._pinned: dict[int, weakref.ref] = {}  # pinned storages of the host

    # ---- phases ------------------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self._live.values())

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
        if tensor is None or self._counted(tensor):
            self.phases[-1].waits[kind, site()] += 1

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _track(self, tensor: Tensor, where: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        origin = self._origins.setdefault((self.phases[-1].name, where), len(self._origins))
        gone = weakref.ref(storage, lambda reference: self._forget(key, reference))
        self._live[key] = (gone, 0, origin)
        self._resize(key, storage.nbytes(), where)

    def _forget(self, key: int, reference: weakref.ref) -> None:
        if key in self._live and self._live[key][0] is reference:
            self._resize(key, 0, "")
            del self._live[key]

    def _resize(self, key: int, nbytes: int, where: str) -> None:
        reference, before, origin = self._live[key]
        nbytes = -(-nbytes // ALLOCATION) * ALLOCATION
        self._live[key] = (reference, nbytes, origin)
        self._changes.append((origin, nbytes - before))
        self._sites_of_changes.append(where)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Record a new size of a live storage: Megatron frees activations so that it recomputes."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, nbytes, site())

    def pin(self, tensor: Tensor) -> None:
        """Record a tensor of pinned host memory, which is copied to the device while the host goes on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping | None = None):
        del types
        kwargs = kwargs or {}
        if func.namespace == "prim" or not self.phases or self._within_kernel:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func is aten._local_scalar_dense.default and self._has_no_value(args[0]):
            self.wait("item", args[0])
            file = site().partition(":")[0]
            return ANSWERS[file] if file in ANSWERS else made_up(args[0].dtype)
        if func is aten.equal.default and self._has_no_value(args[0]):
            self.wait("equal", args[0])
            return True
        if func is aten._to_copy.default and self._counted(args[0]) and _asks_for_host(kwargs):
            self.wait("to the host")
            return self._host_copy(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and self._counted(args[1]) and not self._has_no_value(args[0]):
            if not self._goes_alone(args, kwargs, args[0]):
                self.wait("to the host")
            return args[0]  # its old values stay
        if func is aten.masked_select.default and self._counted(args[0]):
            out = args[0].new_empty(round(args[1].numel() * self.share_selected))
        elif func is aten._to_copy.default and self._asks_for_device(args[0], kwargs):
            with self.fake:
                out = torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=kwargs["device"])
        elif func is aten.addmm.dtype_out and self._counted(args[0]):
            out = kwargs["out"]  # torch 2.11 mistakes the arguments of this op where tensors have no values
        elif func is aten.nonzero.default and self._counted(args[0]):
            out = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        else:
            out = func(*args, **kwargs)
        counted = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and self._counted(t)]
        if counted:
            where = site()
            self._count(func, args, kwargs, out, counted, where)
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and self._counted(tensor):
                    self._track(tensor, where)
        return out

    def one_kernel(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Count a function as one kernel, as a compiler makes it: it reads the inputs and writes the outputs only."""
        self._within_kernel = True
        out = function(*args)
        self._within_kernel = False
        phase, where = self.phases[-1], site()
        phase.launches[function.__name__] += 1
        phase.launch_sites[where] += 1
        phase.traffic[function.__name__] += _nbytes(args) + _nbytes(out)
        for tensor in tree_leaves(out):
            self._track(tensor, where)
        return out

    def _host_copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a made-up copy; a large one has no values either, and is not counted. It stays on the device, so an
        op that mixes it with tensors of the device is not noticed: the models of a lint are small."""
        if tensor.nbytes <= LARGEST_HOST_COPY:
            return torch.full(tensor.shape, made_up(dtype), dtype=dtype)
        copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        storage = copy.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda reference: self._forget(key, reference))
        self._live[key] = (gone, 0, self._origins.setdefault((self.phases[-1].name, "host"), len(self._origins)))
        return copy

    def _asks_for_device(self, tensor: Tensor, kwargs: Mapping) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type and not self._has_no_value(tensor)

    def _goes_alone(self, args: Sequence[Any], kwargs: Mapping, host: Tensor) -> bool:
        """Return whether a copy between host and device goes on without a wait of the host."""
        asked = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        return bool(asked) and host.untyped_storage()._cdata in self._pinned

    def _of_device(self, tensor: Tensor) -> Tensor:
        if self._counted(tensor):
            return tensor
        with self.fake:
            return torch.empty_like(tensor, device=self._device_type)

    def _has_no_value(self, tensor: Tensor) -> bool:
        return self._counted(tensor) or isinstance(tensor, FakeTensor)

    def _counted(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, counted: Sequence[Tensor], where: str) -> None:
        phase, name = self.phases[-1], str(func._overloadpacket)
        if func is aten._to_copy.default and not self._counted(args[0]):
            if not self._goes_alone(args, kwargs, args[0]):
                self.wait("to the device")
        elif func is aten.copy_.default and args[0].device.type != args[1].device.type:
            to, source = args[:2]
            if not self._goes_alone(args, kwargs, source if self._counted(to) else to):
                self.wait("to the device" if self._counted(to) else "to the host")
        elif name in ("aten.nonzero", "aten.masked_select", "aten._unique2", "aten.bincount"):
            self.wait(name.removeprefix("aten."))
        if func.is_view or name in NO_LAUNCH or _is_own_copy(func, args):
            return
        phase.launches[name] += 1
        phase.launch_sites[where] += 1
        flops = flops_of(func, args, kwargs, out)
        if flops is None:
            phase.traffic[name] += _nbytes(counted)
        else:
            phase.flops[name] += flops

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping) -> Any:
        op = str(func._overloadpacket).removeprefix("c10d.")
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if op == "barrier":  # torch makes the tensor of a barrier, on the host where it does not know the backend
            return func(*args, **kwargs)
        for tensor in tensors:
            if not self._counted(tensor):
                self.faults[f"{op} of a tensor of the host", site()] += 1
            elif not tensor.is_contiguous():
                self.faults[f"{op} of a tensor with gaps", site()] += 1
        args = tree_map_only(Tensor, self._of_device, args)  # a refused op is counted above, and goes on
        group = next((_unboxed(a) for a in args if isinstance(a, torch.ScriptObject)), None)
        if group is not None and tensors and self._counted(tensors[0]):
            key = Collective(
                op, self._groups.get(group.group_name, "world"), group.size(),
                len({rank // self._gpus_per_node for rank in dist.get_process_group_ranks(group)}),
                str(tensors[0].dtype).removeprefix("torch."), site(),
            )  # fmt: skip
            self.phases[-1].calls[key] += 1
            # Where inputs and outputs differ in size, the larger one: all ranks of the group together.
            self.phases[-1].sent[key] += max(map(_nbytes, args))
        if "coalesced" in op:  # torch has no kernel of these for tensors without values
            return FakeWork().boxed()
        return func(*args, **kwargs)


def _asks_for_host(kwargs: Mapping) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


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


def made_up(dtype: torch.dtype) -> float | int | bool:
    """Return a number for the host to read from a tensor without values."""
    return 2.0 if dtype.is_floating_point else True if dtype == torch.bool else 2
