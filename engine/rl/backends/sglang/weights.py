"""Three ways for weights to reach SGLang servers: through a process group, by handles to memory, from disk.

Each is a `WeightSync`. A bucket travels as one tensor of bytes, its tensors one after the other (SGLang's
`load_format="flattened_bucket"`).
"""

import contextlib
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.server import Refused, Server, ServerInfo, ServerLost, WeightSync, on_all
from isoloss.engine.rl.backends.sglang.bucket import FlatBucket, flatten, serialize
from isoloss.engine.rl.backends.sglang.group import new_group, own_address, together
from isoloss.engine.rl.config import RolloutConfig
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.weights.hf_checkpoint import Entry, finish, write_shards
from isoloss.models.weights.side_files import SideFiles
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.runtime import versions

# ---- broadcast -------------------------------------------------------------------------------------------------------


class BroadcastSync(WeightSync):
    """A process group of a rank that holds weights and every process of every server: NCCL between GPUs, gloo on CPUs.

    SGLang receives from the first rank of a group only, and is a member of as many groups as it is asked to form, by
    name. So each rank that sends forms its own, when it first has something, and no weight goes from one rank of the
    trainer to another. The group stays from one update to the next. A server that leaves it, or never joins, fails the
    update after `timeout` seconds at most.
    """

    receives = "owner"

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._outdated = False
        self._name = ""
        self._device = torch.device("cpu")

    def prepare(self, bucket: Bucket) -> FlatBucket | None:
        return flatten(bucket) if bucket else None

    def forget(self) -> None:
        self._outdated = True

    def send(self, servers: Sequence[Server], payload: FlatBucket) -> None:
        if self._outdated:
            self._leave(servers)
            self._outdated = False
        if self._group is None:
            self._join(servers)
        body = {
            "names": [part.name for part in payload.layout],
            "dtypes": [str(part.dtype).removeprefix("torch.") for part in payload.layout],
            "shapes": [list(part.shape) for part in payload.layout],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

        group = self._group

        def broadcast() -> None:
            work = dist.broadcast(payload.flat_bytes.to(self._device), src=0, group=group, async_op=True)
            assert work is not None
            try:
                work.wait()
            except RuntimeError as error:
                raise ServerLost(f"the broadcast of weights broke off: {str(error).splitlines()[0]}") from None

        together(servers, lambda server: server.post("/update_weights_from_distributed", body), broadcast)

    def close(self, servers: Sequence[Server]) -> None:
        self._leave(servers)

    def _join(self, servers: Sequence[Server]) -> None:
        """Form the group: this process is its rank 0, the processes of the servers follow in order."""
        infos = on_all(servers, lambda server: server.info())
        on_gpu = any(info.device.startswith("cuda") for info in infos)
        if on_gpu:
            _check_nccl(dict(zip(servers, infos)))
        backend = "nccl" if on_gpu else "gloo"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        address = own_address(servers[0].url)
        timeout = timedelta(seconds=self._timeout)
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._name = f"isoloss-{uuid.uuid4().hex[:8]}"  # never that of a group which a server failed to leave
        world = 1 + sum(info.tp_size for info in infos)
        first = {server: 1 + sum(info.tp_size for info in infos[:k]) for k, server in enumerate(servers)}
        body = {
            "master_address": address, "master_port": store.port, "world_size": world, "group_name": self._name,
            "backend": backend,
        }  # fmt: skip

        def form() -> None:
            try:
                self._group = new_group(backend, store, world, self._name, timeout)
            except RuntimeError as error:
                raise UserError(
                    f"rollout.weight_sync='broadcast': the servers did not join the group at {address}:{store.port} in "
                    f"rollout.timeout={self._timeout:g} seconds ({str(error).splitlines()[0]}); let their machines "
                    "reach this one, or use rollout.weight_sync=disk"
                ) from None

        together(
            servers,
            lambda server: server.post("/init_weights_update_group", {**body, "rank_offset": first[server]}),
            form,
        )

    def _leave(self, servers: Sequence[Server]) -> None:
        if self._group is None:
            return

        def leave(server: Server) -> None:
            # Refused, or no answer: it was restarted, or is gone, and either way is not in the group any more.
            with contextlib.suppress(Refused, ServerLost):
                server.post("/destroy_weights_update_group", {"group_name": self._name})

        on_all(servers, leave)
        group, self._group = self._group, None
        dist.destroy_process_group(group)


def _check_nccl(infos: Mapping[Server, ServerInfo]) -> None:
    """Raises UserError where a server is of a release whose NCCL forms no group with the one here: NCCL itself would
    say so only in the first broadcast, and only in its log."""
    here = versions.installed_nccl(torch.version.cuda)
    for server, info in infos.items():
        theirs = versions.foreign_nccl(torch.__version__, here, info.release)
        if theirs is not None:
            raise UserError(
                f"rollout.weight_sync='broadcast': {server} is SGLang {info.release}, which comes with NCCL {theirs}, "
                f"and here is NCCL {here}, which forms no group with another version; set rollout.weight_sync=tensor "
                "(servers on the trainer's GPUs) or disk"
            )


# ---- tensor ----------------------------------------------------------------------------------------------------------


class TensorSync(WeightSync):
    """Handles to memory of this machine: CUDA memory on GPUs, shared memory on a CPU. Nothing is copied on the way.

    On GPUs each process of a server opens memory of its own device, from the rank that shares the device with it: the
    servers' processes, in the order of rollout.servers, go with ranks 0, 1, 2 ... On a CPU all read rank 0's.
    """

    receives = "every rank"

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._tp_sizes: dict[Server, int] = {}
        self._held: FlatBucket | None = None

    def prepare(self, bucket: Bucket) -> list[str]:
        """The handles of all ranks to their copy of the bucket, on rank 0. Collective over the world on GPUs."""
        flat = flatten(bucket) if bucket else None
        handles: list[Any] = [serialize(flat) if flat else None]
        if flat and flat.flat_bytes.is_cuda:
            torch.cuda.synchronize()  # the bytes must be there before another process looks
            handles = gather_objects(serialize(flat), self._group)
        # The bucket before this one is freed only here: rank 0 came to the gathering after the servers had read it.
        self._held = flat
        return handles

    def begin(self, servers: Sequence[Server]) -> None:
        self._tp_sizes = dict(zip(servers, [info.tp_size for info in on_all(servers, lambda server: server.info())]))

    def send(self, servers: Sequence[Server], payload: list[str]) -> None:
        payloads: dict[Server, list[str]] = {}
        if self._held is not None and self._held.flat_bytes.is_cuda:
            wanted, start = sum(self._tp_sizes.values()), 0
            if wanted != len(payload):
                raise UserError(
                    f"rollout.weight_sync='tensor' needs a rank on the GPU of every server process: {len(payload)} "
                    f"ranks, but {wanted} processes on {len(servers)} servers; use rollout.weight_sync=broadcast"
                )
            for server, size in self._tp_sizes.items():
                payloads[server] = payload[start : start + size]
                start += size
        else:
            payloads = {server: payload * size for server, size in self._tp_sizes.items()}

        def post(server: Server) -> None:
            body = {
                "serialized_named_tensors": payloads[server],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            server.post("/update_weights_from_tensor", body)

        on_all(servers, post)

    def release(self) -> None:
        self._held = None


# ---- disk ------------------------------------------------------------------------------------------------------------


class DiskSync(WeightSync):
    """A Hugging Face folder in `sync_dir`, which trainer and servers see under the same name. The last one is kept."""

    receives = "rank 0"

    def __init__(self, sync_dir: Path, model: str | Path):
        self._sync_dir = sync_dir
        folder = hf_folder(model)
        self._arch, self._side_files = read_architecture(folder), SideFiles.of(folder)
        self._entries: list[dict[str, Entry]] = []
        self._folder = self._sync_dir
        self._dtype = ""

    def prepare(self, bucket: Bucket) -> Bucket:
        return bucket

    def begin(self, servers: Sequence[Server]) -> None:
        self._folder = self._sync_dir / f"weights-{uuid.uuid4().hex[:8]}"
        self._entries, self._dtype = [], ""

    def send(self, servers: Sequence[Server], payload: Bucket) -> None:
        self._dtype = self._dtype or str(payload[0][1].dtype).removeprefix("torch.")
        self._entries.append(write_shards(self._folder, f"bucket-{len(self._entries):05d}", payload))

    def end(self, servers: Sequence[Server], version: int) -> None:
        finish(self._folder, self._entries)
        self._side_files.write(self._folder, replace(self._arch, dtype=self._dtype))
        # "auto", since a server that was started without weights (--load-format dummy) would else make some up again.
        body = {"model_path": str(self._folder), "load_format": "auto", "flush_cache": False}
        on_all(servers, lambda server: server.post("/update_weights_from_disk", body))
        for older in self._sync_dir.glob("weights-*"):
            if older != self._folder:
                shutil.rmtree(older)


def weight_sync(config: RolloutConfig, model: str | Path, group: dist.ProcessGroup) -> WeightSync:
    """The way of config.weight_sync. group: of the whole world, on CPUs. Raises UserError for disk without a folder."""
    if config.weight_sync == "broadcast":
        return BroadcastSync(config.timeout)
    if config.weight_sync == "tensor":
        return TensorSync(group)
    return DiskSync(sync_folder(config), model)


def sync_folder(config: RolloutConfig) -> Path:
    """Return the folder of rollout.weight_sync=disk. Raises UserError where none is named."""
    if config.sync_dir is None:
        raise UserError(
            "rollout.sync_dir=None must name a folder that trainer and servers see, with rollout.weight_sync=disk"
        )
    return Path(config.sync_dir).absolute()
