"""Adapters of low rank on SGLang servers. The servers have the model itself from its files, and no weight of it is ever
sent; an update is one more adapter.

An adapter has a name of its own, that of its version, and is loaded while servers generate. From the update on,
requests name it; those under way end with the one that they began with, which is unloaded when none is left. Keys and
values are cached by adapter, so nothing is flushed. SGLang does not say which adapter made a token, nor that none did:
the version of a completion is the adapter that its request named, where the server has it by that name.

A server is for one run: what others have left there is unloaded.
"""

import hashlib
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.backends.servers.health import check_alike
from isoloss.engine.rl.backends.servers.server import Server, ServerLost, WeightSync, on_all
from isoloss.engine.rl.backends.sglang.adapter_server import AdapterServer, InUse, Named
from isoloss.engine.rl.backends.sglang.bucket import FlatBucket, flatten, serialize
from isoloss.engine.rl.backends.sglang.group import is_here
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import sync_folder
from isoloss.engine.rl.config import RolloutConfig
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.peft_folder import CONFIG, TENSORS
from isoloss.models.lora.served import served_config, served_shapes, target_names
from isoloss.parallel import UserError

PREFIX = "policy-"
IN_A_BATCH = 3  # adapters that a server computes with at a time: the new one, the one before it, and none (/health)


class AdapterSync(WeightSync):
    """An adapter's tensors in the request, or on the same machine in memory that the request refers to; with `sync_dir`
    in a folder there, as PEFT writes it, which trainer and servers see under the same name.

    shapes: shapes of all tensors by name. A server dies of another one, when the first request comes.
    """

    receives = "rank 0"
    of_adapter = True

    def __init__(self, arch: Architecture, lora: LoraConfig, base: str, adapters: InUse, sync_dir: Path | None):
        self._config, self._shapes = served_config(arch, lora, base), served_shapes(arch, lora)
        self._rank, self._targets = lora.rank, target_names(arch, lora)
        self._adapters, self._sync_dir = adapters, sync_dir
        self._tensors: dict[str, Tensor] = {}
        self._flat: FlatBucket | None = None
        self._unknown: list[AdapterServer] = []
        self._tp_sizes: dict[AdapterServer, int] = {}
        self.server_options = (
            "--enable-lora", "--max-lora-rank", str(lora.rank), "--max-loras-per-batch", str(IN_A_BATCH),
            "--lora-strict-loading", "--lora-target-modules", *self._targets,
        )  # fmt: skip

    def open(self, servers: Sequence[Server]) -> None:
        on_all(of_adapters(servers), self._check)

    def prepare(self, bucket: Bucket) -> Bucket:
        """Copies, since the tensors may be the parameters themselves, or a buffer."""
        return [(f"base_model.model.{name}", tensor.to("cpu", copy=True).contiguous()) for name, tensor in bucket]

    def begin(self, servers: Sequence[Server]) -> None:
        self._tensors = {}
        mine = of_adapters(servers)
        versions = on_all(mine, lambda server: server.weight_version())
        # Those that were started again, or have had no adapter yet.
        self._unknown = [server for server, version in zip(mine, versions) if version is None]
        on_all(self._unknown, self._check)

    def send(self, servers: Sequence[Server], payload: Bucket) -> None:
        self._tensors |= dict(payload)

    def end(self, servers: Sequence[Server], version: int) -> None:
        self._check_tensors()
        # Never the name of one before: SGLang refuses a name that it has, and would serve what it had by that name.
        adapter = Named(version, f"{PREFIX}{version}-{uuid.uuid4().hex[:8]}")
        load = self._by_folder(adapter) if self._sync_dir is not None else self._by_tensors(adapter)
        on_all(of_adapters(servers), load)
        if self._unknown:
            check_alike(servers)
        self._adapters.loaded = adapter

    def tidy(self, servers: Sequence[Server]) -> None:
        """Unload the adapters that no request names: versions before, and those of an update that failed."""
        needed = self._adapters.needed()

        def unload(server: AdapterServer) -> None:
            with suppress(ServerLost):  # who asks it next will see
                for name in server.loaded():
                    if name.startswith(PREFIX) and name not in needed:
                        server.unload(name)

        on_all(of_adapters(servers), unload)
        for folder in () if self._sync_dir is None else self._sync_dir.glob(f"{PREFIX}*"):
            if folder.name not in needed:
                shutil.rmtree(folder)

    def release(self) -> None:
        self._tensors, self._flat = {}, None

    def _by_tensors(self, adapter: Named) -> Callable[[AdapterServer], None]:
        flat = self._flat = flatten(list(self._tensors.items()))
        sums = {name: sha256(tensor) for name, tensor in self._tensors.items()}

        def load(server: AdapterServer) -> None:
            handle = serialize(flat, in_memory=is_here(server.url))
            body = {
                "config_dict": self._config,
                "serialized_named_tensors": [handle] * self._tp_sizes[server],
                "load_format": "flattened_bucket",
                "expected_checksums": sums,
            }
            server.load(adapter.name, "/load_lora_adapter_from_tensors", body)

        return load

    def _by_folder(self, adapter: Named) -> Callable[[AdapterServer], None]:
        assert self._sync_dir is not None
        folder = self._sync_dir / adapter.name
        folder.mkdir(parents=True)
        save_file(self._tensors, folder / TENSORS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(dumps(self._config, indent=2) + "\n", encoding="utf-8")
        return lambda server: server.load(adapter.name, "/load_lora_adapter", {"lora_path": str(folder)})

    def _check_tensors(self) -> None:
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        wrong = [name for name in {**self._shapes, **found} if found.get(name) != self._shapes.get(name)]
        if wrong:
            first = wrong[0]
            raise UserError(
                f"lora: {len(wrong)} of {len(self._shapes)} tensors of the adapter are not those of the model, the "
                f"first of them {first}: {found.get(first)} where the model has {self._shapes.get(first)}; nothing was "
                "sent"
            )

    def _check(self, server: AdapterServer) -> None:
        """Raises UserError for a server that would not serve this adapter on the model's own weights."""
        told = server.get("/server_info")
        self._tp_sizes[server] = int(told.get("tp_size") or 1)
        why = self._unfit(told)
        if why is not None:
            raise UserError(
                f"rollout.servers: {server} {why} (lora.rank={self._rank}); start it with "
                f"{' '.join(self.server_options)}"
            )
        version = SGLangServer.weight_version(server)
        if version is not None:
            raise UserError(
                f"rollout.servers: {server} serves weights of version {version} that a run has sent to it, and an "
                "adapter (lora.rank) goes with those of model.path; start it again"
            )

    def _unfit(self, told: Mapping[str, Any]) -> str | None:
        if not told.get("enable_lora"):
            return "was started without adapters"
        rank, batch, kept = (told.get(key) for key in ("max_lora_rank", "max_loras_per_batch", "max_loaded_loras"))
        if isinstance(rank, int) and rank < self._rank:
            return f"takes adapters of rank {rank} at most"
        if isinstance(batch, int) and batch < 2:
            return f"computes with {batch} adapter at a time, and during an update there are two"
        if isinstance(kept, int) and kept < 2:
            return f"keeps {kept} adapter (--max-loaded-loras), and during an update there are two"
        if int(told.get("dp_size") or 1) > 1:
            return f"has --dp-size {told['dp_size']}, with which SGLang loads no adapter"
        targets = told.get("lora_target_modules")
        if isinstance(targets, list) and not {"all", *MERGED} & set(targets):
            missing = [name for name in self._targets if name not in targets]
            if missing:
                return f"has no adapters for {', '.join(missing)}"
        return None


MERGED = ("qkv_proj", "gate_up_proj")  # SGLang's names of several matrices in one


def of_adapters(servers: Sequence[Server]) -> list[AdapterServer]:
    """Return the servers, which are all of this kind."""
    return [cast(AdapterServer, server) for server in servers]


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def adapter_fleet(
    arch: Architecture, lora: LoraConfig
) -> tuple[
    Callable[[str, float, ApiKey | None], Server],
    Callable[[RolloutConfig, str | Path, dist.ProcessGroup], WeightSync],
]:
    """Return how a `ServerBackend` makes its clients and its way of weights, for an adapter of a model."""
    adapters = InUse()

    def sync(config: RolloutConfig, model: str | Path, group: dist.ProcessGroup) -> WeightSync:
        del group
        if not any(hf_folder(model).glob("*.safetensors")):
            raise UserError(
                f"model.path={model} holds no model files that servers could read, and with an adapter (lora.rank) no "
                "weights are sent to them; write such a folder with isoloss-convert mcore-to-hf and name that"
            )
        folder = sync_folder(config) if config.weight_sync == "disk" else None
        return AdapterSync(arch, lora, str(model), adapters, folder)

    return partial(AdapterServer, adapters=adapters), sync
