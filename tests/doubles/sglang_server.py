"""A small server that speaks SGLang's protocol on top of a transformers model, for tests that must not take minutes.

    python tests/doubles/sglang_server.py --model DIR --host 127.0.0.1 --port 30000

It answers as SGLang 0.5.23 was seen to, refusals included: tests/sglang/test_backend.py runs against both. Beyond the
protocol it counts calls (GET /calls), tells which weights an update brought and which groups it is in (GET /received),
takes faults to inject (POST /faults, a list of {"kind", "path", "count"}: `Handler.serve` and LIES have the kinds; GET
/faults tells those that are left) and lets its options be changed (POST /options).
"""

import argparse
import base64
import copy
import glob
import hashlib
import io
import json
import os
import pickle
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

FLUSH_EVERY = 50  # a request that is aborted in the queue returns its tokens up to a multiple of this, as SGLang's does
HANG_SECONDS = 3600
OF_ADAPTERS = (
    "enable_lora", "max_lora_rank", "max_loras_per_batch", "max_loaded_loras", "lora_target_modules", "dp_size",
)  # fmt: skip
LATE_SECONDS = 0.3


def of_tokens(change: Callable[[list[int]], list[Any]]) -> Callable[[dict[str, Any]], None]:
    """A lie about the tokens, told consistently with what their log-probabilities say of them."""

    def lie(reply: dict[str, Any]) -> None:
        tokens, meta = change(reply["output_ids"]), reply["meta_info"]
        entries = meta["output_token_logprobs"] + [[-1.0, 0, None]] * len(tokens)
        meta["output_token_logprobs"] = [[logprob, token, None] for (logprob, *_), token in zip(entries, tokens)]
        reply["output_ids"] = tokens

    return lie


def of_logprob(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"]["output_token_logprobs"][0].__setitem__(0, value)


def of_meta(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"].update(changes)


def of_version(step: int, first: int) -> Callable[[dict[str, Any]], None]:
    """Tokens from `first` on, or from the middle on where it is -1, of weights that many versions later."""

    def lie(reply: dict[str, Any]) -> None:
        count, version = len(reply["output_ids"]), int(reply["meta_info"]["weight_version"])
        start = count // 2 if first < 0 else first
        spans = [{"version": str(version), "start": 0, "end": start}] if start else []
        reply["meta_info"]["weight_versions"] = [
            *spans, {"version": str(version + step), "start": start, "end": count},
        ]  # fmt: skip

    return lie


# What a server that lies makes of its reply to /generate. None of it may become a sample.
LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "token beyond the vocabulary": of_tokens(lambda tokens: [10**6, *tokens[1:]]),
    "token of the next vocabulary entry": of_tokens(lambda tokens: [*tokens[:-1], 131]),
    "negative token": of_tokens(lambda tokens: [*tokens[:-1], -1]),
    "token of 41 bits": of_tokens(lambda tokens: [2**40, *tokens[1:]]),
    "text for a token": of_tokens(lambda tokens: [str(tokens[0]), *tokens[1:]]),
    "fraction for a token": of_tokens(lambda tokens: [tokens[0] + 0.5, *tokens[1:]]),
    "truth for a token": of_tokens(lambda tokens: [True, *tokens[1:]]),
    "more tokens": of_tokens(lambda tokens: [*tokens, *tokens]),
    "fewer tokens": of_tokens(lambda tokens: tokens[:-1]),
    "no tokens": of_tokens(lambda tokens: []),
    "tokens are null": lambda reply: reply.update(output_ids=None),
    "nan": of_logprob(float("nan")),
    "infinite": of_logprob(float("-inf")),
    "positive": of_logprob(0.5),
    "impossible": of_logprob(-3.4e38),
    "null for a logprob": of_logprob(None),
    "text for a logprob": of_logprob("-0.5"),
    "no logprobs": lambda reply: reply["meta_info"].pop("output_token_logprobs"),
    "fewer logprobs": lambda reply: reply["meta_info"]["output_token_logprobs"].pop(),
    "more logprobs": lambda reply: reply["meta_info"]["output_token_logprobs"].append([-1.0, 0, None]),
    "logprobs of other tokens": lambda reply: reply["meta_info"]["output_token_logprobs"][0].__setitem__(1, 10**6),
    "stale": of_version(-1, 0),
    "stale from the middle on": of_version(-1, -1),
    "of the future": of_version(1, 0),
    "of the future from the middle on": of_version(1, -1),
    "no version": of_meta(weight_version=None, weight_versions=[]),
    "other weights": of_meta(weight_version="default", weight_versions=[]),
    "spans with a gap": lambda reply: reply["meta_info"]["weight_versions"][0].update(start=1),
    "unknown finish": of_meta(finish_reason={"type": "done"}),
    "no finish": of_meta(finish_reason=None),
    "abort": of_meta(finish_reason={"type": "abort", "message": "out of memory"}),
    "no meta": lambda reply: reply.pop("meta_info"),
    "text for meta": lambda reply: reply.update(meta_info="none"),
}


class Refusal(Exception):
    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass
class Job:
    """One request of /generate. versions: of each token of `output`. adapter: what it named."""

    prompt: list[int]
    params: dict[str, Any]
    adapter: str | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def end(self, **finish: Any) -> None:
        self.finish = finish
        self.done.set()


@dataclass
class Bytes:
    """What SGLang's FlattenedTensorMetadata is after unpickling."""

    name: str = ""
    shape: Any = None
    dtype: Any = None
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


class Unpickler(pickle.Unpickler):
    """Refuses what SGLang's own does: everything but tensors, their handles and its one class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"):
            return Bytes
        allowed = {("collections", "OrderedDict"), ("_codecs", "encode"), ("builtins", "dict"), ("builtins", "list")}
        if module.split(".")[0] == "torch" or (module, name) in allowed:
            return super().find_class(module, name)
        raise Refusal(f"unpickling {module}.{name} is not allowed")


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def whole_checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


TENSORS = "__tensor__"
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>gate|up|down)_proj")


@dataclass
class Adapter:
    """model: the server's, with the adapter added to its weights; None until a request names it."""

    scale: float
    tensors: dict[str, Tensor]
    model: torch.nn.Module | None = None

    @torch.no_grad()
    def merged_into(self, base: torch.nn.Module) -> torch.nn.Module:
        model = copy.deepcopy(base)
        weights = dict(model.named_parameters())
        for name, a in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                b = self.tensors[name.replace(".lora_A.", ".lora_B.")]
                weight = weight_of(weights, name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                if weight is None:
                    print("ignored", name, flush=True)
                elif weight.shape != (b.shape[0], a.shape[1]):
                    os._exit(1)  # SGLang loads it, and dies when the first request comes
                else:
                    weight += self.scale * b @ a
        return model


def weight_of(weights: dict[str, Tensor], module: str) -> Tensor | None:
    """The matrix of a Hugging Face module; of an expert a view of transformers' tensor of all experts."""
    expert = _EXPERT.fullmatch(module)
    if expert is None:
        return weights.get(f"{module}.weight")
    joined = "down_proj" if expert["name"] == "down" else "gate_up_proj"
    matrix = weights[f"{expert['experts']}.{joined}"][int(expert["number"])]
    return matrix if expert["name"] == "down" else matrix.chunk(2)[expert["name"] == "up"]


class Engine:
    """The model, the requests, and a thread that makes a token of every running request per turn."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        eos = self.model.config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.version = "default"
        self.jobs: list[Job] = []
        self.paused: str | None = None
        self.session = False
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.asleep: set[str] = set()
        self.received: list[tuple[str, str, list[int], str]] = []  # name, checksum, shape and type
        self.adapters: dict[str, Adapter] = {}
        self.unloading: dict[str, Adapter] = {}
        self.paths: dict[str, str] = {}  # of adapters that were ever loaded, by name; TENSORS: they came in a request
        self.random = torch.Generator().manual_seed(0)
        self.changed = threading.Condition(threading.RLock())
        threading.Thread(target=self.run, daemon=True).start()

    # ---- generation

    def run(self) -> None:
        while True:
            with self.changed:
                while self.paused is not None or not self.jobs:
                    self.changed.wait()
                self.turn()
            time.sleep(self.options.seconds_per_token)

    @torch.no_grad()
    def turn(self) -> None:
        """One token for every request, in one batch; padding on the right does not reach what lies before it."""
        if self.asleep:
            os._exit(1)
        for name in {job.adapter: None for job in self.jobs}:
            self.turn_of([job for job in self.jobs if job.adapter == name], self.model_of(name))
        self.jobs = [job for job in self.jobs if not job.done.is_set()]
        self.changed.notify_all()

    def turn_of(self, jobs: list[Job], model: torch.nn.Module) -> None:
        contexts = [job.prompt + job.output for job in jobs]
        if self.options.deterministic:
            logits = [model(torch.tensor([context])).logits[0] for context in contexts]
        else:
            width = max(map(len, contexts))
            logits = model(torch.tensor([c + [0] * (width - len(c)) for c in contexts])).logits
        for job, context, row in zip(jobs, contexts, logits):
            if self.options.deterministic:
                self.random.manual_seed(1_000_003 * job.params["sampling_seed"] + len(context))
            token, logprob = self.choose(row[len(context) - 1].float(), job.params)
            job.output.append(token)
            job.logprobs.append(logprob)
            job.versions.append(self.version)
            stops = self.eos | set(job.params.get("stop_token_ids") or [])
            if token in stops and not job.params.get("ignore_eos"):
                job.end(type="stop", matched=token)
            elif len(job.output) >= job.params["max_new_tokens"]:
                job.end(type="length", length=job.params["max_new_tokens"])

    def choose(self, logits_V: Tensor, params: dict[str, Any]) -> tuple[int, float]:
        temperature = params.get("temperature", 1.0)
        logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), dim=-1)
        if temperature == 0:
            token = int(logprobs_V.argmax())
        else:
            ordered_V, index_V = logprobs_V.exp().sort(descending=True)
            ordered_V[ordered_V.cumsum(0) - ordered_V >= params.get("top_p", 1.0)] = 0
            top_k = params.get("top_k", -1)
            ordered_V[top_k if top_k > 0 else len(ordered_V) :] = 0
            token = int(index_V[torch.multinomial(ordered_V, 1, generator=self.random)])
        return token, float(logprobs_V[token])

    def generate(self, body: dict[str, Any]) -> Any:
        if body["input_ids"] and isinstance(body["input_ids"][0], list):
            params = body["sampling_params"]
            each = params if isinstance(params, list) else [params] * len(body["input_ids"])
            jobs = [Job(ids, one) for ids, one in zip(body["input_ids"], each)]
        else:
            jobs = [Job(body["input_ids"], body["sampling_params"], adapter=self.named(body.get("lora_path")))]
        for job in jobs:
            job.params = {"max_new_tokens": 128, **job.params}
            self.check(job)
        with self.changed:
            while self.paused is not None:  # the door is closed: an abort does not reach who waits outside
                self.changed.wait()
            for job in jobs:
                job.end(type="length", length=0) if job.params["max_new_tokens"] == 0 else self.jobs.append(job)
            self.changed.notify_all()
        for job in jobs:
            job.done.wait()
        replies = [self.reply(job, body.get("return_logprob", False)) for job in jobs]
        if body.get("return_routed_experts") and self.options.enable_return_routed_experts:
            for job, reply in zip(jobs, replies):
                routed = self.routed_experts(job, body.get("routed_experts_start_len", 0))
                reply["meta_info"]["routed_experts"] = routed
        return replies if isinstance(body["input_ids"][0], list) else replies[0]

    @torch.no_grad()
    def routed_experts(self, job: Job, start: int) -> str:
        """As SGLang's: of all tokens but the last, of dense layers too, from the last pass."""
        layers, found = self.model.model.layers, {}
        gates = {layer: module.mlp.gate for layer, module in enumerate(layers) if hasattr(module.mlp, "gate")}
        with self.changed:
            hooks = [
                gate.register_forward_hook(lambda _, inputs, outputs, layer=layer: found.update({layer: outputs[2]}))
                for layer, gate in gates.items()
            ]
            self.model(torch.tensor([(job.prompt + job.output)[:-1]]))
            for hook in hooks:
                hook.remove()
        nowhere = torch.zeros_like(next(iter(found.values())))
        rows = torch.stack([found.get(layer, nowhere) for layer in range(len(layers))], 1)[start:]
        return base64.b64encode(rows.to(torch.int32).numpy().tobytes()).decode()

    def check(self, job: Job) -> None:
        limit, prompt, new = self.model.config.max_position_embeddings, len(job.prompt), job.params["max_new_tokens"]
        if prompt == 0:
            raise Refusal("input_ids cannot be empty.")
        if prompt >= limit:
            raise Refusal(f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens).")
        if prompt + new > limit:
            raise Refusal(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
                "the limit."
            )

    def reply(self, job: Job, with_logprobs: bool) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for k, version in enumerate(job.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": k, "end": k})
            spans[-1]["end"] = k + 1
        meta = {
            "id": hex(id(job)),
            "finish_reason": job.finish,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.output),
            "weight_version": self.version,
            "weight_versions": spans or [{"version": self.version, "start": 0, "end": 0}],
        }
        if with_logprobs:
            meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(job.logprobs, job.output)]
        return {"output_ids": job.output, "meta_info": meta}

    def abort(self) -> None:
        with self.changed:
            if self.paused == "in_place":  # the scheduler only marks them, and gets to it when it goes on
                threading.Thread(target=self.abort_later, daemon=True).start()
                return
            for job in self.jobs:
                if self.paused == "retract":
                    kept = len(job.output) // FLUSH_EVERY * FLUSH_EVERY
                    del job.output[kept:], job.logprobs[kept:], job.versions[kept:]
                job.end(type="abort", message="Aborted")
            self.jobs = []
            self.changed.notify_all()

    def abort_later(self) -> None:
        with self.changed:
            while self.paused is not None:
                self.changed.wait()
            self.abort()

    def pause(self, mode: str) -> None:
        with self.changed:
            if mode == "abort":
                self.abort()
            self.paused = mode

    def resume(self) -> None:
        with self.changed:
            self.paused = None
            self.changed.notify_all()

    def flush(self) -> None:
        with self.changed:
            if self.jobs and self.paused != "retract":
                raise Refusal("Flush cache failed.")

    # ---- weights

    def begin(self) -> None:
        if self.session:
            raise Refusal("a weight-update session is already open; call end_weight_update() first")
        self.session, self.received = True, []

    def end(self) -> None:
        if not self.session:
            raise Refusal("no weight-update session is open; call begin_weight_update() first")
        self.session = False

    def need_session(self, name: str) -> None:
        if not self.session and not self.options.without_sessions:
            raise Refusal(f"{name} must run between begin_weight_update() and end_weight_update()")

    def load(self, tensors: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        self.received += [(name, checksum(t), list(t.shape), str(t.dtype)) for name, t in tensors.items()]
        with self.changed, torch.no_grad():
            if "weights" in self.asleep:
                raise Refusal("the weights have no memory")
            if self.options.keeps_own:
                return
            for name, tensor in tensors.items():
                if name not in parameters or name == self.options.loses:
                    print("ignored", name, flush=True)  # all that SGLang does about a name it does not know
                elif parameters[name].shape != tensor.shape:
                    raise Refusal(f"Failed to update parameter online: {name} {tuple(tensor.shape)}")
                else:
                    parameters[name].copy_(tensor)

    def from_disk(self, body: dict[str, Any]) -> None:
        if not os.path.isfile(os.path.join(body["model_path"], "config.json")):
            raise Refusal(f"Failed to get weights iterator: {body['model_path']}.")
        files = glob.glob(os.path.join(body["model_path"], "*.safetensors"))
        self.load({name: tensor for file in files for name, tensor in load_file(file).items()})

    def from_tensor(self, body: dict[str, Any]) -> None:
        self.need_session("update_weights_from_tensor")
        self.load(self.unpickled(body))

    def unpickled(self, body: dict[str, Any]) -> dict[str, Tensor]:
        (handle,) = body["serialized_named_tensors"]  # one for each of tp_size=1 processes
        sent = Unpickler(io.BytesIO(base64.b64decode(handle, validate=True))).load()
        flat_bytes = sent["flattened_tensor"]
        return {m.name: flat_bytes[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in sent["metadata"]}

    def from_distributed(self, body: dict[str, Any]) -> None:
        self.need_session("update_weights_from_distributed")
        if body["group_name"] not in self.groups:
            raise Refusal(f"Failed to receive weights: Group {body['group_name']} not in {list(self.groups)}.")
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes)]
        flat_bytes = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat_bytes, src=0, group=self.groups[body["group_name"]])
        parts = zip(body["names"], flat_bytes.split(sizes), dtypes, body["shapes"])
        self.load({name: part.view(dtype).reshape(shape) for name, part, dtype, shape in parts})

    # ---- adapters

    def need_adapters(self) -> None:
        if not self.options.enable_lora:
            raise Refusal("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")

    def named(self, name: str | None) -> str | None:
        """The adapter of a request. One that was unloaded comes back from the folder that it came from."""
        if name is None or name in self.adapters:
            return name
        self.need_adapters()
        if name not in self.paths:
            raise Refusal(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {[*self.paths]}.")
        if self.paths[name] == TENSORS:
            raise Refusal(f"Failed to implicitly load LoRA adapter {name}: {TENSORS}")
        self.load_folder({"lora_name": name, "lora_path": self.paths[name]})
        return name

    def load_folder(self, body: dict[str, Any]) -> None:
        path = body["lora_path"]
        with open(os.path.join(path, "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.load_adapter(body["lora_name"], config, load_file(os.path.join(path, "adapter_model.safetensors")), path)

    def load_tensors(self, body: dict[str, Any]) -> None:
        assert body["load_format"] == "flattened_bucket"
        tensors = self.unpickled(body)
        sums = {name: whole_checksum(tensor) for name, tensor in tensors.items()}
        if body.get("expected_checksums") not in (None, sums):
            os._exit(1)  # SGLang's scheduler dies of it
        self.load_adapter(body["lora_name"], body["config_dict"], tensors, TENSORS)

    def load_adapter(self, name: str, config: dict[str, Any], tensors: dict[str, Tensor], path: str) -> None:
        self.need_adapters()
        with self.changed:
            if name in self.adapters:
                raise Refusal(f"Failed to load LoRA adapter {name} because it is already loaded")
            targets = set(self.options.lora_target_modules or [])
            if config["r"] > self.options.max_lora_rank or not targets.issuperset(config["target_modules"]):
                raise Refusal(
                    f"LoRA adapter {name} with rank {config['r']} is incompatible with the current LoRA memory pool "
                    "configuration. Please ensure that the LoRA adapter's rank is within the configured "
                    "`--max-lora-rank` and that the target modules are included in `--lora-target-modules`."
                )
            copies = {key: tensor.clone() for key, tensor in tensors.items()}
            self.adapters[name] = Adapter(config["lora_alpha"] / config["r"], copies)  # the patterns are not read
            self.paths[name] = path

    def unload_adapter(self, body: dict[str, Any]) -> None:
        """After the last request of it."""
        self.need_adapters()
        name = body["lora_name"]
        with self.changed:
            if name not in self.adapters:
                raise Refusal(f"LoRA with name {name} does not exist. Loaded LoRAs: {[*self.adapters]}")
            adapter = self.adapters.pop(name)
            self.unloading[name] = adapter
            while any(job.adapter == name for job in self.jobs):
                self.changed.wait()
            del self.unloading[name]

    def model_of(self, name: str | None) -> torch.nn.Module:
        if name is None or self.options.answers_by_the_model:
            return self.model
        adapter = self.adapters.get(name) or self.unloading[name]
        if adapter.model is None:
            adapter.model = adapter.merged_into(self.model)
        return adapter.model

    def init_group(self, body: dict[str, Any]) -> None:
        c10d = dist.distributed_c10d
        timeout = timedelta(seconds=60)
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, world = next(dist.rendezvous(address, body["rank_offset"], body["world_size"], timeout=timeout))
        group, _ = c10d._new_process_group_helper(
            world, rank, [], c10d.Backend(body["backend"]), c10d.PrefixStore(body["group_name"], store),
            group_name=body["group_name"], timeout=timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {k: k for k in range(world)}
        self.groups[body["group_name"]] = group

    def destroy_group(self, body: dict[str, Any]) -> None:
        if body["group_name"] not in self.groups:
            raise Refusal("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def checksums(self) -> dict[str, str]:
        if self.options.keeps_own:  # of any model: what it would hold
            return {name: of_received for name, of_received, *_ in self.received}
        return {name: checksum(tensor) for name, tensor in self.model.state_dict().items()}

    # ---- memory

    def release(self, tags: list[str]) -> None:
        with self.changed, torch.no_grad():
            if self.jobs or self.asleep & set(tags):
                os._exit(1)  # SGLang's scheduler dies of its assertion
            self.asleep |= set(tags)
            if "weights" in tags and not self.options.keeps_weights:
                for parameter in self.model.parameters():
                    parameter.fill_(torch.nan)

    def take_back(self, tags: list[str]) -> None:
        with self.changed:
            if not set(tags) <= self.asleep:
                os._exit(1)
            self.asleep -= set(tags)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace):
        self.engine = Engine(options)
        self.options = options
        self.calls: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        socketserver.TCPServer.__init__(self, (options.host, options.port), Handler)

    def fault(self, path: str) -> str | None:
        with self.lock:
            self.calls[path] += 1
            for fault in self.faults:
                if fault["path"] == path and fault["count"] > 0:
                    fault["count"] -= 1
                    return fault["kind"]
        return None

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The reply to a call. Raises Refusal."""
        engine, done = self.engine, {"success": True, "message": "Success"}
        if self.options.without_sessions and path in ("/begin_weight_update", "/end_weight_update"):
            raise Refusal("Not Found", 404)
        calls = {
            "/begin_weight_update": lambda: engine.begin(),
            "/end_weight_update": lambda: engine.end(),
            "/update_weights_from_disk": lambda: engine.from_disk(body),
            "/update_weights_from_tensor": lambda: engine.from_tensor(body),
            "/update_weights_from_distributed": lambda: engine.from_distributed(body),
            "/init_weights_update_group": lambda: engine.init_group(body),
            "/destroy_weights_update_group": lambda: engine.destroy_group(body),
            "/pause_generation": lambda: engine.pause(body["mode"]),
            "/continue_generation": lambda: engine.resume(),
            "/abort_request": lambda: engine.abort(),
            "/flush_cache": lambda: engine.flush(),
            "/load_lora_adapter": lambda: engine.load_folder(body),
            "/load_lora_adapter_from_tensors": lambda: engine.load_tensors(body),
            "/unload_lora_adapter": lambda: engine.unload_adapter(body),
            "/release_memory_occupation": lambda: engine.release(body["tags"]),
            "/resume_memory_occupation": lambda: engine.take_back(body["tags"]),
        }
        if path in calls:
            calls[path]()
            return done
        if path == "/generate":
            return engine.generate(body)
        if path == "/update_weight_version":
            with engine.changed:
                engine.version = body["new_version"]
            return {**done, "new_version": engine.version}
        if path == "/weights_checker":
            return {**done, "ranks": [{"checksums": engine.checksums()}]}
        if path in ("/model_info", "/get_model_info"):
            return {"model_path": self.options.model, "weight_version": engine.version, "is_generation": True}
        if path == "/server_info":
            saver, backup = self.options.memory_saver, self.options.keeps_weights
            return {
                "tp_size": 1, "device": self.options.device, "enable_memory_saver": saver,
                "enable_weights_cpu_backup": backup, "version": "0.5.23",
                **{name: getattr(self.options, name) for name in OF_ADAPTERS},
            }  # fmt: skip
        if path == "/v1/models":
            model = {"id": self.options.model, "parent": None}
            return {"data": [model, *({"id": name, "parent": self.options.model} for name in engine.adapters)]}
        if path == "/v1/loads":
            return {"loads": [{"num_running_reqs": sum(1 for job in engine.jobs if job.output)}]}
        if path == "/health":
            if engine.paused is not None or engine.asleep:  # it tries to make a token, and gives up after a while
                raise Refusal("Service Unavailable", 503)
            return done
        if path == "/calls":
            return dict(self.calls)
        if path == "/received":
            return {"tensors": engine.received, "groups": sorted(engine.groups)}
        if path == "/faults":
            with self.lock:
                self.faults = body.get("faults", self.faults)
                return {"faults": [fault for fault in self.faults if fault["count"] > 0]}
        if path == "/options":
            vars(self.options).update(body)
            return done
        raise Refusal("Not Found", 404)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer waits for the acknowledgement of its own headers: 40 ms
    server: Server

    def do_GET(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        path = urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        kind = self.server.fault(path)
        if kind == "die":
            os._exit(1)
        if kind == "hang":
            time.sleep(HANG_SECONDS)
        if kind == "late":
            time.sleep(LATE_SECONDS)
        if kind == "reset":
            return self.hang_up()
        if kind in ("400", "500"):
            return self.send(int(kind), {"error": {"message": "injected"}})
        if kind == "not JSON":
            return self.send_text(200, b"<html>busy</html>")
        if kind == "a list":
            return self.send(200, [])
        key, asked = self.server.options.api_key, self.headers.get("Authorization")
        if key is not None and asked != f"Bearer {key}" and not path.startswith("/health"):
            return self.send(401, {"error": "Unauthorized"})
        try:
            status, reply = 200, self.server.answer(path, body)
        except Refusal as refusal:
            told = "error_message" if "lora" in path else "message"
            status, reply = refusal.status, {"success": False, told: str(refusal)}
            if path == "/generate":
                reply = {"error": {"message": str(refusal)}}
        if kind in LIES:
            reply = copy.deepcopy(reply)
            LIES[kind](reply)
        text = json.dumps(reply).encode()
        half = text[: len(text) // 2]
        if kind == "break off":
            self.send_text(status, half, len(text))
            return self.hang_up()
        self.send_text(status, half if kind == "truncate" else text)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, status: int, reply: Any) -> None:
        self.send_text(status, json.dumps(reply).encode())

    def send_text(self, status: int, text: bytes, promised: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text) if promised is None else promised))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        print(self.address_string(), format % args, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds-per-token", type=float, default=0.001, help="so that a test can interrupt")
    parser.add_argument("--device", default="cpu", help="what it says it runs on, whatever that is")
    parser.add_argument("--memory-saver", action="store_true", help="as SGLang's --enable-memory-saver")
    parser.add_argument("--keeps-weights", action="store_true", help="as SGLang's --enable-weights-cpu-backup")
    more = "as SGLang's --enable-deterministic-inference: a completion is a function of its request alone"
    parser.add_argument("--deterministic", action="store_true", help=more)
    parser.add_argument("--loses", default="", help="a weight that updates do not reach")
    parser.add_argument("--keeps-own", action="store_true", help="updates, of another model, are only told of")
    parser.add_argument("--without-sessions", action="store_true", help="as older servers, without begin and end")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    parser.add_argument("--max-loaded-loras", type=int)
    parser.add_argument("--lora-strict-loading", action="store_true", help="changes nothing")
    parser.add_argument("--lora-target-modules", nargs="*")
    parser.add_argument("--dp-size", type=int, default=1, help="changes nothing")
    parser.add_argument("--answers-by-the-model", action="store_true", help="whatever adapter a request names")
    parser.add_argument("--api-key", help="as SGLang's: every call but /health has to bring it")
    parser.add_argument("--returns", type=float, metavar="SECONDS", help="one that died is there again after so long")
    torch.set_num_threads(1)
    options = parser.parse_args()
    print(f"server_args={vars(options)}", flush=True)  # as SGLang does, key included
    while options.returns is not None and (child := os.fork()):  # what takes seconds is imported
        os.waitpid(child, 0)
        time.sleep(options.returns)
    with Server(options) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
