"""The rollout backend without a server: every rank generates its share with a transformers model of its own."""

import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from isoloss.engine.rl.backends.generation import check_requests, generate
from isoloss.engine.rl.backends.protocol import Bucket, Receives
from isoloss.engine.rl.backends.transformers_decoder import TransformersDecoder
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder, read_architecture, read_config
from isoloss.models.weights.weight_map import LM_HEAD, hf_shapes, weight_map
from isoloss.parallel.collectives import gather_objects

POLL_SECONDS = 0.05  # how often ranks other than 0 look whether to pause or to end


class InProcessBackend:
    """A whole copy of the model on every rank, besides the trainer's, in whatever layout that one is.

    folder: a Hugging Face folder or a checkpoint; only its config.json is read, weights come through `update_weights`.
    For small models: on a GPU the copy stays there while the trainer trains, however little the layout leaves there.

    concurrency: rows that decode together on this rank.
    dtype: of the weights here.
    Collective over the world.
    """

    receives: Receives = "every rank"

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device, concurrency: int):
        self.arch = read_architecture(folder)
        self.model = build(hf_folder(folder), self.arch, dtype, device)
        self.concurrency = concurrency
        self._slots = slots(self.model, self.arch)
        self._version: int | None = None
        self._gate = Gate()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """As `RolloutBackend.generate`; none is ever lost. One all-gather of the completions over the world.

        Each rank takes a block of neighbours, so that completions of one prompt mostly read it together. What a request
        gives depends on neither the ranks nor the other requests, beyond rounding.
        Raises UserError for a prompt that is empty or too long, ValueError before the first `update_weights`, and on
        every rank a RuntimeError where generation failed on one.
        """
        if self._version is None:
            raise ValueError("the model in this process has no weights yet: call update_weights before generate")
        check_requests(requests, sampling, self.arch.max_positions)
        self._gate.begin()
        rank, world = dist.get_rank(), dist.get_world_size()
        share = requests[rank * len(requests) // world : (rank + 1) * len(requests) // world]
        failure, mine = "", []
        try:
            mine = generate(
                TransformersDecoder(self.model), share, sampling, self.concurrency, self._version, self._gate.open
            )
        except Exception:  # the other ranks wait below and have to be told
            failure = traceback.format_exc()
        everyone = gather_objects((failure, mine))
        for rank, (failure, _) in enumerate(everyone):
            if failure:
                raise RuntimeError(f"generation failed on rank {rank}:\n{failure}")
        return [completion for _, completions in everyone for completion in completions]

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """As `RolloutBackend.update_weights`; tensors are copied, and rounded where `dtype` is narrower.

        Raises ValueError where a tensor is missing, unknown, of another shape, or comes twice.
        """
        self._version = None
        missing = set(self._slots)
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in missing:
                    raise ValueError(
                        f"{name} {'came twice' if name in self._slots else 'is not a tensor of the model'}"
                    )
                slot = self._slots[name]
                if slot.shape != tensor.shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}, the model's has {list(slot.shape)}")
                slot.copy_(tensor)
                missing.remove(name)
        if missing:
            raise ValueError(f"{min(missing)} is missing ({len(missing)} of {len(self._slots)} tensors are)")
        self._version = version

    def weight_version(self) -> int | None:
        """As `RolloutBackend.weight_version`. One all-gather over the world."""
        versions = gather_objects(self._version)
        return versions[0] if len(set(versions)) == 1 else None

    def pause(self) -> None:
        """As `RolloutBackend.pause`; other ranks follow after a twentieth of a second. Nothing on ranks but 0."""
        self._gate.pause()

    def resume(self) -> None:
        """As `RolloutBackend.resume`. Nothing on ranks but 0."""
        self._gate.resume()

    def abort(self) -> None:
        """As `RolloutBackend.abort`, also while paused; other ranks follow after a twentieth of a second. Nothing on
        ranks but 0, and nothing where `generate` is not under way."""
        self._gate.abort()

    def check_health(self) -> None:
        """A model in this process is there for as long as the process."""

    def take_counts(self) -> dict[str, int]:
        """As `RolloutBackend.take_counts`: none, for there is no server."""
        return {}

    def close(self) -> None:
        """Give the model's memory back; a closed backend serves no weights."""
        self._version = None
        self._slots.clear()
        nn.Module.to(self.model, device="meta")


def build(folder: Path, arch: Architecture, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of config.json with uninitialised weights; rotary frequencies, which are not weights, are computed."""
    # Grouped matrix products, the default for experts, know no fp64 and want rows of whole 16 bytes.
    sizes = (arch.hidden_size, arch.experts.intermediate_size) if arch.experts else ()
    grouped = dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)
    options = {} if grouped else {"experts_implementation": "eager"}
    with no_init_weights(), torch.device(device):
        config = _config(folder, arch)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # transformers 5.23 has Mistral 4's class and not its entry
            name = read_config(folder)["architectures"][0]
            AutoModelForCausalLM.register(type(config), getattr(transformers, name), exist_ok=True)
        # A file may name a kernel for attention, which transformers would download and run: None is its own choice.
        own = {"trust_remote_code": False, "attn_implementation": None}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **own, **options)
    model.tie_weights()  # part of the initialisation that was left out
    for weight in weight_map(arch):
        if not weight.trained:  # the experts' selection bias: rounded to bf16 it would choose other experts
            module, _, name = _transformers_name(weight.parts[0].tensor, arch).rpartition(".")
            owner = model.get_submodule(module)
            setattr(owner, name, getattr(owner, name).float())
    return model.eval()


def _config(folder: Path, arch: Architecture) -> PreTrainedConfig:
    """Of transformers' own class, whose name is that of the family, also where a file gives it a name that only the
    code beside the file knows (Kimi-K2)."""
    written = read_config(folder)
    if written.get("model_type") in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return CONFIG_MAPPING[arch.family].from_dict({**written, "model_type": arch.family})


def slots(model: PreTrainedModel, arch: Architecture) -> dict[str, Tensor]:
    """Where each Hugging Face tensor belongs: views of the model's parameters that cover all of them.

    transformers joins the experts of a layer in memory, though not in files: gate_up_proj [experts, 2 wide, hidden] and
    down_proj [experts, hidden, wide].
    """
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for weight in weight_map(arch):
        names = [part.tensor for part in weight.parts]
        if weight.expert is None or weight.parts[0].rows is not None:
            views = [state[_transformers_name(name, arch)] for name in names]
        else:
            joined = "gate_up_proj" if len(names) == 2 else "down_proj"
            views = state[f"model.layers.{weight.layer}.mlp.experts.{joined}"][weight.expert].chunk(len(names))
        tensors |= zip(names, views)
    for tensor, shape in hf_shapes(weight_map(arch)).items():
        assert tensors[tensor].shape == shape, (tensor, shape, tensors[tensor].shape)
    if arch.tie_embeddings:
        del state[LM_HEAD]  # the same memory as the embedding
    assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in state.values())
    return tensors


def _transformers_name(tensor: str, arch: Architecture) -> str:
    """What transformers calls in memory what the files of some families call otherwise."""
    if tensor.startswith(arch.tensor_prefix):
        tensor = "model." + tensor.removeprefix(arch.tensor_prefix)
    tensor = tensor.replace(f".self_attn.{arch.sinks_name}", ".self_attn.sinks")
    return tensor.replace(f".{arch.experts.names.module}.", ".mlp.") if arch.experts else tensor


class Gate:
    """Pause, resume and abort, called on rank 0 and obeyed by every rank.

    They travel through the process group's key-value store, not by collectives: ranks take different numbers of steps.
    Collective over the world: one broadcast.
    """

    def __init__(self):
        self._rank = dist.get_rank()
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        self._store = dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())
        self._changed = threading.Condition()
        self._call = 0  # number of the `generate` under way, or of the last one
        self._paused, self._aborted = False, 0  # whether to wait; the last call to be ended
        self._looked = 0.0
        self._set()
        dist.barrier()  # before anybody looks

    def begin(self) -> None:
        """A new call of generate. On every rank."""
        with self._changed:
            self._call += 1
        self._looked = 0.0

    def open(self) -> bool:
        """Wait while paused; then, or once this call is to be ended, whether to go on."""
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused or self._aborted == self._call)
                return self._aborted != self._call
        if time.monotonic() - self._looked > POLL_SECONDS:
            self._look()
            while self._paused and self._aborted != self._call:
                time.sleep(POLL_SECONDS)
                self._look()
        return self._aborted != self._call

    def pause(self) -> None:
        self._set(paused=True)

    def resume(self) -> None:
        self._set(paused=False)

    def abort(self) -> None:
        self._set(aborted=self._call)

    def _set(self, paused: bool | None = None, aborted: int | None = None) -> None:
        if self._rank == 0:
            with self._changed:
                self._paused = self._paused if paused is None else paused
                self._aborted = self._aborted if aborted is None else aborted
                self._store.set("state", f"{int(self._paused)} {self._aborted}")
                self._changed.notify_all()

    def _look(self) -> None:
        paused, self._aborted = map(int, self._store.get("state").split())
        self._paused = bool(paused)
        self._looked = time.monotonic()
