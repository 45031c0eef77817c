"""The front process: HTTP of the Tinker API on one side, commands for the ranks on the other. Imports no torch.

python -m isoloss.tools.serve.front SOCKET key=value ...
"""

import asyncio
import contextlib
import json
import math
import shutil
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch
from isoloss.tools.serve import commands, keys, wire
from isoloss.tools.serve.arrays import Limits
from isoloss.tools.serve.commands import BASE
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.journal import Entry, Journal
from isoloss.tools.serve.link import Link
from isoloss.tools.serve.order import Order

PROTOBUF, JSON = "application/x-protobuf", "application/json"
POLL_SECONDS = 30.0  # for which a client that asks for a result waits; it gives up after 45
TRIES = 2  # times that the ranks may end with a request before it is refused
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
ADAM_DEFAULTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
Handler = Callable[[Request, str], Awaitable[Response]]


class Refused(Exception):
    """A request that gets an HTTP status and one line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status, self.line = status, line


class Front:
    """The server's state outside the ranks: all of it is in the journal, but for what waits."""

    def __init__(self, config: ServeConfig, link: Link):
        self.config, self.folder, self.link = config, config.folder, link
        self.keys = keys.read(config.serve.api_keys, self.folder)
        self.journal = Journal(self.folder / "journal.sqlite")
        self.order: Order[Entry] = Order(config.serve.concurrency)
        self.model: dict[str, Any] = {}
        self.loaded = {BASE}  # versions that the ranks have
        self.waiting: dict[str, list[Entry]] = {}  # requests for completions of versions that are not there yet
        self.done: dict[str, asyncio.Event] = {}
        self.work = asyncio.Event()
        self.steps: dict[str, int] = {}
        self.limits = Limits(
            body_bytes=config.serve.max_body_bytes,
            decompressed_bytes=config.serve.max_decompressed_bytes,
            datums=config.serve.max_datums,
            tokens=config.serve.max_tokens,
        )

    # ---- start ------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Queue what the journal has and the ranks lack."""
        for row in self.journal.rows("models", dropped=0):
            self.order.start(row["id"], row["saved_seq"] + 1)
        for entry in self.journal.unsaved():
            self.queue(entry)

    async def dispatch(self) -> None:
        """Send one command after the other to the ranks, without end."""
        self.model = await self.link.connect()
        for row in self.journal.rows("models", dropped=0):
            if row["saved_seq"] >= 0:
                await self.link.call(self.create_command(row["id"]))
                await self.link.call(commands.LoadWeights(row["id"], row["saved_folder"], True))
        serve = self.config.serve
        say(f"isoloss-serve: {self.config.name} at http://{serve.host}:{serve.port}, ready")
        while True:
            taken = self.order.take()
            if taken is None:
                self.work.clear()
                await self.work.wait()
                continue
            lane, entries = taken
            try:
                await (self.sample(lane, entries) if entries[0].kind == "asample" else self.train(entries[0]))
            except Exception as error:  # a fault of the server: the requests are answered, and the server stays
                say(f"isoloss-serve: {entries[0].kind}: {type(error).__name__}: {error}", error=True)
                for entry in entries:
                    self.fail(entry, f"{type(error).__name__}: {error}", "server")

    # ---- queue ------------------------------------------------------------------------------------------------------

    def submit(self, owner: str, lane: str, seq: int, kind: str, body: bytes, encoding: str | None = None) -> str:
        """Store a request and queue it, unless it was sent before. Return the id of its future."""
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{lane}/{seq}"))
        known = self.journal.request(id)
        if known is not None:
            return known.id
        if len(self.order) >= self.config.serve.max_queued:
            raise Refused(429, f"{len(self.order)} requests wait already (serve.max_queued): send it again later")
        self.queue(self.journal.accept(id, owner, lane, seq, kind, body, encoding))
        return id

    def queue(self, entry: Entry) -> None:
        if entry.kind != "asample":
            self.order.add(entry.lane, entry.seq, entry)
        else:
            version = self.version_of(entry.lane)
            row = self.journal.row("versions", version=version)
            if version in self.loaded or (row is not None and row["folder"]):
                self.order.add_sample(version, entry)
            else:
                self.waiting.setdefault(version, []).append(entry)
        self.work.set()

    def version_of(self, sampler: str) -> str:
        row = self.journal.row("samplers", id=sampler)
        assert row is not None, "a request names a sampling session that was looked up"
        return row["version"]

    def finish(self, entry: Entry, answer: bytes, media: str) -> None:
        if entry.answer is not None and entry.answer[0] != answer:
            say(f"isoloss-serve: {entry.kind} {entry.lane} {entry.seq}: repeated with another result", error=True)
        else:
            self.journal.finish(entry.id, answer, media)
        self.done.pop(entry.id, asyncio.Event()).set()

    def finish_json(self, entry: Entry, **answer: Any) -> None:
        self.finish(entry, json.dumps(answer).encode(), JSON)

    def fail(self, entry: Entry, line: str, category: str = "user") -> None:
        self.finish_json(entry, error=line, category=category)

    # ---- carrying out -----------------------------------------------------------------------------------------------

    async def train(self, entry: Entry) -> None:
        """Carry out a request of a training client."""
        if entry.answer is None and self.gave_up(entry):
            return
        try:
            command = self.command_of(entry)
        except UserError as mistake:
            self.fail(entry, str(mistake))
            return
        for each in command:
            outcome = await self.link.call(each)
            if isinstance(outcome, commands.Failed):
                self.fail(entry, outcome.message)
                return
        self.complete(entry, outcome)
        if entry.kind == "optim_step":
            self.steps[entry.lane] = self.steps.get(entry.lane, 0) + 1
            if self.steps[entry.lane] >= self.config.serve.save_every:
                await self.save_state(entry)

    def gave_up(self, entry: Entry) -> bool:
        """Note that the ranks begin with a request. Return True, with the request refused, if they ended with it
        before."""
        if self.journal.begin(entry.id) <= TRIES:
            return False
        self.fail(entry, "the server's ranks ended while they computed this, twice: it is refused", "server")
        return True

    def command_of(self, entry: Entry) -> Sequence[commands.Command]:
        """Return the commands of a request. Raises UserError where it asks for what does not exist."""
        lane = entry.lane
        if entry.kind == "forward_backward":
            asked = wire.read_forward_backward(entry.body, entry.encoding, self.limits)
            self.check_data(asked.data)
            return [commands.ForwardBackward(lane, asked.data, asked.loss_fn, asked.config, asked.forward_only)]
        body = json.loads(entry.body)
        if entry.kind == "create_model":
            return [self.create_command(lane)]
        if entry.kind == "optim_step":
            return [commands.OptimStep(lane, **adam_of(body))]
        if entry.kind == "save_weights":
            return [commands.SaveWeights(lane, self.checkpoint_folder(checkpoint_path(entry, body)))]
        if entry.kind == "load_weights":
            row = self.journal.row("checkpoints", path=body["path"])
            if row is None or row["owner"] != entry.owner:
                raise UserError(f"{body['path']} is no checkpoint of yours on this server")
            load = commands.LoadWeights(lane, row["folder"], bool(body.get("optimizer")))
            return [load] if entry.seq else [self.create_command(lane), load]
        if entry.kind == "save_weights_for_sampler":
            if body.get("path"):
                return [commands.SaveWeights(lane, self.checkpoint_folder(checkpoint_path(entry, body)))]
            return [commands.Snapshot(lane, sampler_of(body))]
        raise UserError(f"{entry.kind} is unknown")

    def complete(self, entry: Entry, outcome: Any) -> None:
        """Note the outcome of a request, and answer it."""
        lane, kind = entry.lane, entry.kind
        if kind == "forward_backward":
            metrics = {"loss:sum": outcome.loss, "micro_batches:max": float(outcome.micro_batches)}
            self.finish(entry, wire.forward_backward_answer(outcome.logprobs, metrics), PROTOBUF)
            return
        body = json.loads(entry.body)
        if kind == "create_model":
            self.finish_json(entry, type="create_model", model_id=lane)
        elif kind == "optim_step":
            self.finish_json(entry, type="optim_step", metrics=outcome)
        elif kind == "load_weights":
            self.finish_json(entry, type="load_weights", path=body["path"], model_id=lane)
        elif kind == "save_weights":
            path, _ = self.note_checkpoint(entry, "training", body)
            self.finish_json(entry, type="save_weights", path=path)
        elif body.get("path"):
            path, folder = self.note_checkpoint(entry, "sampler", body)
            self.journal.insert("versions", version=path, model=lane, seq=entry.seq, folder=folder)
            self.finish_json(entry, type="save_weights_for_sampler", path=path)
        else:
            sampler = sampler_of(body)
            self.journal.insert("versions", version=sampler, model=lane, seq=entry.seq, folder=None)
            session = body["model_id"].split(":")[0]
            self.journal.insert(
                "samplers",
                id=sampler,
                owner=entry.owner,
                session=session,
                model=lane,
                version=sampler,
                made=time.time(),
            )
            self.loaded.add(sampler)
            for waiting in self.waiting.pop(sampler, []):
                self.queue(waiting)
            self.finish_json(entry, type="save_weights_for_sampler", sampling_session_id=sampler)

    async def sample(self, version: str, entries: Sequence[Entry]) -> None:
        """Carry out requests for completions of one version."""
        if version not in self.loaded:
            row = self.journal.row("versions", version=version)
            assert row is not None, "a version of the journal"
            facts = self.journal.facts("models", id=row["model"])
            load = commands.LoadVersion(row["model"], version, row["folder"], facts["rank"], tuple(facts["targets"]))
            outcome = await self.link.call(load)
            if isinstance(outcome, commands.Failed):
                for entry in entries:
                    self.fail(entry, outcome.message)
                return
            self.loaded.add(version)
        asked: list[tuple[Entry, commands.SampleRequest]] = []
        for entry in entries:
            if self.gave_up(entry):
                continue
            try:
                asked.append((entry, self.sample_request(entry)))
            except UserError as mistake:
                self.fail(entry, str(mistake))
        if not asked:
            return
        outcome = await self.link.call(commands.Sample("", version, [request for _, request in asked]))
        for k, (entry, _) in enumerate(asked):
            if isinstance(outcome, commands.Failed):
                self.fail(entry, outcome.message)
                continue
            sampled = outcome[k]
            sequences = [wire.Sampled(tokens, logprobs, finish) for tokens, logprobs, finish in sampled.completions]
            top = None if sampled.top is None else wire.TopK(*sampled.top)
            self.finish(entry, wire.sample_answer(sequences, sampled.prompt_logprobs, top), PROTOBUF)

    def sample_request(self, entry: Entry) -> commands.SampleRequest:
        """Return what a request for completions asks. Raises UserError where it asks for what does not exist."""
        body = json.loads(entry.body)
        given, prompt = body.get("sampling_params") or {}, prompt_of(body)
        most = self.model["max_positions"] - len(prompt)
        limit = most if given.get("max_tokens") is None else int(given["max_tokens"])
        if not prompt:
            raise UserError("prompt has no tokens")
        wrong = next((token for token in prompt if not 0 <= token < self.model["vocab_size"]), None)
        if wrong is not None:
            raise UserError(f"prompt has the token {wrong}, and the model's are 0 to {self.model['vocab_size'] - 1}")
        if limit > most:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and max_tokens={limit} are more than the model's "
                f"{self.model['max_positions']} positions"
            )
        if given.get("top_k") not in (None, -1, 0):
            raise UserError(f"sampling_params: top_k={given['top_k']} is not supported; leave it at -1")
        seed = given.get("seed")
        name = entry.lane if seed is None else "seed"
        return commands.SampleRequest(
            ids=tuple(f"{name}/{entry.seq}/{k}" for k in range(number(body, "num_samples", 1))),
            prompt=prompt,
            max_tokens=limit,
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            stop_token_ids=self.stop_tokens(given.get("stop")),
            seed=int(seed or 0),
            prompt_logprobs=bool(body.get("prompt_logprobs")),
            top=number(body, "topk_prompt_logprobs", 0),
        )

    def stop_tokens(self, stop: Any) -> tuple[int, ...]:
        if stop is None:
            return tuple(self.model["stop_token_ids"])
        stop = [stop] if isinstance(stop, str | int) else stop
        if any(isinstance(each, str) for each in stop):
            raise UserError("sampling_params: stop strings are not supported; give token ids")
        return tuple(stop)

    def check_data(self, data: Sequence[wire.Datum]) -> None:
        vocab, positions = self.model["vocab_size"], self.model["max_positions"]
        for k, datum in enumerate(data):
            if len(datum.tokens) > positions:
                raise UserError(f"datum {k} has {len(datum.tokens)} tokens, and the model {positions} positions")
            for name, tokens in (("tokens", datum.tokens), ("target_tokens", datum.inputs["target_tokens"])):
                if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab):
                    raise UserError(f"datum {k}: {name} has an id that is none of the model's, 0 to {vocab - 1}")

    def create_command(self, model: str) -> commands.CreateModel:
        facts = self.journal.facts("models", id=model)
        return commands.CreateModel(model, facts["rank"], facts["seed"], tuple(facts["targets"]))

    async def save_state(self, entry: Entry) -> None:
        """Save a training client after an optimizer step, so that a restart need not repeat what was before."""
        lane, before = entry.lane, self.journal.row("models", id=entry.lane)
        assert before is not None, "a training client of the journal"
        folder = self.folder / "states" / sha256(lane.encode()).hexdigest()[:16] / str(entry.seq)
        shutil.rmtree(folder, ignore_errors=True)
        rows = self.journal.rows("versions", model=lane)
        versions = {
            row["version"]: str(folder.parent / "versions" / sha256(row["version"].encode()).hexdigest()[:16])
            for row in rows
            if not row["folder"] and row["version"] in self.loaded
        }
        outcome = await self.link.call(commands.SaveWeights(lane, str(folder), versions))
        if isinstance(outcome, commands.Failed):
            say(f"isoloss-serve: {lane} could not be saved: {outcome.message}", error=True)
            return
        self.steps[lane] = 0
        self.journal.saved(lane, entry.seq, str(folder), versions)
        if before["saved_folder"]:
            shutil.rmtree(before["saved_folder"], ignore_errors=True)

    def checkpoint_folder(self, path: str) -> str:
        return str(self.folder / "checkpoints" / sha256(path.encode()).hexdigest()[:32])

    def note_checkpoint(self, entry: Entry, kind: str, body: Mapping[str, Any]) -> tuple[str, str]:
        """Note a checkpoint that was written. Return its path for clients, and its folder."""
        path = checkpoint_path(entry, body)
        folder = self.checkpoint_folder(path)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        now, ttl = time.time(), body.get("ttl_seconds")
        expires = now + ttl if ttl else None
        self.journal.insert(
            "checkpoints", path=path, owner=entry.owner, model=entry.lane, kind=kind, name=body["path"],
            folder=folder, made=now, expires=expires, size=size,
        )  # fmt: skip
        return path, folder

    # ---- HTTP: sessions ---------------------------------------------------------------------------------------------

    async def client_config(self, request: Request, owner: str) -> Response:
        serve = self.config.serve
        return JSONResponse(
            {
                "proto_compress_fwdbwd": True,
                "fwdbwd_max_chunk_len": serve.max_datums,
                "fwdbwd_max_chunk_bytes_count": serve.chunk_bytes,
                "parallel_fwdbwd_chunks": True,
            }
        )

    async def nothing(self, request: Request, owner: str) -> Response:
        return JSONResponse({})

    async def telemetry(self, request: Request, owner: str) -> Response:
        await request.body()
        return JSONResponse({"status": "accepted"})

    async def create_session(self, request: Request, owner: str) -> Response:
        body = await json_of(request, self.config)
        again = request.headers.get("x-idempotency-key")
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{owner}/{again}")) if again else str(uuid.uuid4())
        now = time.time()
        self.journal.insert("sessions", id=id, owner=owner, made=now, seen=now, facts=json.dumps(body))
        about = f"isoloss-serve: {self.config.name}, {self.config.train.precision}"
        return JSONResponse({"type": "create_session", "session_id": id, "info_message": about})

    async def heartbeat(self, request: Request, owner: str) -> Response:
        body = await json_of(request, self.config)
        self.session_of(body, owner)
        self.journal.update("sessions", {"id": body["session_id"]}, seen=time.time())
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request, owner: str) -> Response:
        id = request.path_params["id"]
        self.session_of({"session_id": id}, owner)
        self.journal.update("sessions", {"id": id}, finished="by its client")
        return Response(status_code=204)

    async def capabilities(self, request: Request, owner: str) -> Response:
        model = {
            "model_name": self.config.name,
            "max_context_length": self.model.get("max_positions"),
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    def session_of(self, body: Mapping[str, Any], owner: str) -> str:
        return self.owned("sessions", "id", "session_id", body.get("session_id"), owner)["id"]

    def model_of(self, model: Any, owner: str) -> dict[str, Any]:
        return self.owned("models", "id", "model_id", model, owner)

    def owned(self, table: str, column: str, name: str, value: Any, owner: str) -> dict[str, Any]:
        """Return the row of a thing that a request names. Raises Refused where this owner has none."""
        row = self.journal.row(table, **{column: value})
        if row is None or row["owner"] != owner or row.get("dropped"):
            raise Refused(404, f"{name}={value!r} does not exist")
        return row

    # ---- HTTP: training ---------------------------------------------------------------------------------------------

    async def create_model(self, request: Request, owner: str) -> Response:
        raw = await body_of(request, self.config)
        body = parsed(raw)
        session = self.session_of(body, owner)
        if body.get("base_model") != self.config.name:
            raise Refused(400, f"this server has {self.config.name}, not {body.get('base_model')!r}")
        lora = body.get("lora_config") or {}
        self.new_model(f"{session}:train:{body['model_seq_id']}", session, owner, lora, body)
        return self.future(f"{session}:train:{body['model_seq_id']}", 0, owner, "create_model", raw)

    def new_model(self, model: str, session: str, owner: str, lora: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        if self.journal.row("models", id=model) is not None:
            return
        rank, most = lora.get("rank", 32), self.config.serve.max_lora_rank
        if not isinstance(rank, int) or not 1 <= rank <= most:
            raise Refused(400, f"lora_config: rank={rank!r} must be a number from 1 to {most} (serve.max_lora_rank)")
        if len(self.journal.rows("models", dropped=0)) >= self.config.serve.max_models:
            raise Refused(400, f"{self.config.serve.max_models} training clients exist already (serve.max_models)")
        facts = {
            "rank": rank,
            "seed": lora.get("seed"),
            "targets": targets_of(lora),
            "flags": {name: lora.get(name, True) for name in ("train_mlp", "train_attn", "train_unembed")},
            "user_metadata": body.get("user_metadata"),
        }
        self.journal.insert("models", id=model, session=session, owner=owner, made=time.time(), facts=json.dumps(facts))
        self.order.start(model, 0)

    async def get_info(self, request: Request, owner: str) -> Response:
        body = await json_of(request, self.config)
        row = self.model_of(body.get("model_id"), owner)
        rank = json.loads(row["facts"])["rank"]
        data = {"arch": self.model.get("arch", ""), "model_name": self.config.name, "tokenizer_id": self.config.name}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": row["id"],
                "model_name": self.config.name,
                "is_lora": True,
                "lora_rank": rank,
                "model_data": data,
            }
        )

    async def forward_backward(self, request: Request, owner: str) -> Response:
        raw, encoding = await body_of(request, self.config), request.headers.get("content-encoding")
        asked = wire.read_forward_backward(raw, encoding, self.limits)
        self.model_of(asked.model_id, owner)
        if asked.seq_id is None:
            raise Refused(400, "seq_id is missing: the requests of a training client are numbered from 1")
        return self.future(asked.model_id, asked.seq_id, owner, "forward_backward", raw, encoding)

    def of_model(self, kind: str) -> Handler:
        """Return the handler of a request in JSON that a training client numbers."""

        async def handler(request: Request, owner: str) -> Response:
            raw = await body_of(request, self.config)
            body = parsed(raw)
            model = self.model_of(body.get("model_id"), owner)["id"]
            if kind != "save_weights_for_sampler" or body.get("path"):
                check_name(kind, body)
            return self.future(model, number(body, "seq_id", None), owner, kind, raw)

        return handler

    async def load_weights(self, request: Request, owner: str) -> Response:
        raw = await body_of(request, self.config)
        body = parsed(raw)
        row = self.owned("checkpoints", "path", "path", body.get("path"), owner)
        if body.get("model_id"):
            model, seq = self.model_of(body["model_id"], owner)["id"], number(body, "seq_id", None)
        else:
            session = self.session_of(body, owner)
            model, seq = f"{session}:train:{body['model_seq_id']}", 0
            facts = self.journal.facts("models", id=row["model"])
            lora = {"rank": facts["rank"], "seed": facts["seed"], **facts["flags"]}
            self.new_model(model, session, owner, lora, {"user_metadata": facts["user_metadata"]})
        return self.future(model, seq, owner, "load_weights", raw)

    def future(self, lane: str, seq: int, owner: str, kind: str, raw: bytes, encoding: str | None = None) -> Response:
        return JSONResponse({"request_id": self.submit(owner, lane, seq, kind, raw, encoding), "model_id": lane})

    # ---- HTTP: sampling ---------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request, owner: str) -> Response:
        body = await json_of(request, self.config)
        session = self.session_of(body, owner)
        path, version = body.get("model_path"), BASE
        if path:
            row = self.owned("checkpoints", "path", "model_path", path, owner)
            version = path
            self.journal.insert("versions", version=path, model=row["model"], seq=0, folder=row["folder"])
        elif body.get("base_model") != self.config.name:
            raise Refused(400, f"this server has {self.config.name}, not {body.get('base_model')!r}")
        id = f"{session}:sample:{body['sampling_session_seq_id']}"
        self.journal.insert(
            "samplers", id=id, owner=owner, session=session, model=None, version=version, made=time.time()
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": id})

    async def sampler(self, request: Request, owner: str) -> Response:
        row = self.sampler_row(request.path_params["id"], owner)
        path = row["version"] if row["version"].startswith("tinker://") else None
        return JSONResponse({"sampler_id": row["id"], "base_model": self.config.name, "model_path": path})

    def sampler_row(self, id: Any, owner: str) -> dict[str, Any]:
        return self.owned("samplers", "id", "sampling_session_id", id, owner)

    async def asample(self, request: Request, owner: str) -> Response:
        raw = await body_of(request, self.config)
        body = parsed(raw)
        lane = self.sampler_row(body.get("sampling_session_id"), owner)["id"]
        seq = number(body, "seq_id", None)
        prompt_of(body)
        id = self.submit(owner, lane, seq, "asample", raw)
        sequences = [f"{lane}/{seq}/{k}" for k in range(number(body, "num_samples", 1))]
        return JSONResponse({"request_id": id, "sample_sequence_ids": sequences})

    # ---- HTTP: results ----------------------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request, owner: str) -> Response:
        body = await json_of(request, self.config)
        id = body.get("request_id")
        entry = self.journal.request(str(id))
        if entry is None or entry.owner != owner:
            raise Refused(410, f"request_id={id!r} does not exist")
        if entry.answer is None:
            event = self.done.setdefault(entry.id, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), POLL_SECONDS)
            entry = self.journal.request(entry.id)
            assert entry is not None
        if entry.answer is None:
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)
        return Response(entry.answer[0], media_type=entry.answer[1])

    def routes(self) -> list[Route]:
        post: dict[str, Handler] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.nothing,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{id}/finish": self.finish_session,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.of_model("optim_step"),
            "save_weights": self.of_model("save_weights"),
            "save_weights_for_sampler": self.of_model("save_weights_for_sampler"),
            "load_weights": self.load_weights,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
        }
        get: dict[str, Handler] = {
            "healthz": self.nothing,
            "get_server_capabilities": self.capabilities,
            "samplers/{id}": self.sampler,
        }
        return [
            Route(f"/api/v1/{path}", self.guarded(handler), methods=[method])
            for method, handlers in (("POST", post), ("GET", get))
            for path, handler in handlers.items()
        ]

    def guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that knows the owner, and turns a refusal into a status and one line."""

        async def guarded(request: Request) -> Response:
            owner = keys.owner_of(request.headers.get("x-api-key", ""), self.keys)
            if owner is None:
                return refusal(401, "X-API-Key is none of this server's keys")
            try:
                return await handler(request, owner)
            except Refused as refused:
                return refusal(refused.status, refused.line)
            except UserError as mistake:
                return refusal(400, str(mistake))
            except ClientDisconnect:
                return Response(status_code=400)

        return guarded


def refusal(status: int, line: str) -> Response:
    """Return an answer with a body: the SDK takes an empty one for a proxy's fault, and asks again."""
    return JSONResponse({"detail": line}, status)


async def body_of(request: Request, config: ServeConfig) -> bytes:
    """Return the body of a request. Raises Refused for a longer one than serve.max_body_bytes."""
    parts, size, most = [], 0, config.serve.max_body_bytes
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refused(413, f"the body is longer than {most} bytes (serve.max_body_bytes)")
        parts.append(part)
    return b"".join(parts)


async def json_of(request: Request, config: ServeConfig) -> dict[str, Any]:
    return parsed(await body_of(request, config))


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the object of a body. Raises UserError."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise UserError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError(f"the body is a {type(body).__name__}, not an object")
    return body


def number(body: Mapping[str, Any], name: str, default: int | None) -> int:
    """Return a whole number of a body. Raises UserError where it is none, or missing without a default."""
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{name}={value!r} must be a whole number")
    return value


def check_name(kind: str, body: Mapping[str, Any]) -> None:
    """Raise UserError where a checkpoint's name cannot be a part of a path tinker://RUN/KIND/NAME."""
    name = body.get("path")
    if kind == "optim_step":
        return
    if not isinstance(name, str) or not name or "/" in name or len(name) > 200:
        raise UserError(f"path={name!r} must be a name without /, of at most 200 characters")


def checkpoint_path(entry: Entry, body: Mapping[str, Any]) -> str:
    """Return the path by which clients name the checkpoint that a request writes."""
    kind = "weights" if entry.kind == "save_weights" else "sampler_weights"
    return f"tinker://{entry.lane}/{kind}/{body['path']}"


def sampler_of(body: Mapping[str, Any]) -> str:
    """Return the id of the sampling session that a snapshot makes."""
    session = str(body["model_id"]).split(":")[0]
    return f"{session}:sample:{number(body, 'sampling_session_seq_id', None)}"


def prompt_of(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of a prompt. Raises UserError for chunks that are not text."""
    tokens: list[int] = []
    for chunk in (body.get("prompt") or {}).get("chunks", []):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise UserError(f"prompt: a chunk of type {chunk['type']!r} is not supported; give text")
        tokens += chunk["tokens"]
    return tuple(tokens)


def adam_of(body: Mapping[str, Any]) -> dict[str, float]:
    """Return AdamW's numbers of a request. Raises UserError for another optimizer, or numbers that are none."""
    if body.get("optimizer_params"):
        raise UserError("optimizer_params: this server has AdamW alone; give adam_params")
    given = {**ADAM_DEFAULTS, **(body.get("adam_params") or {})}
    if unknown := [name for name in given if name not in ADAM]:
        raise UserError(f"adam_params has {unknown[0]!r}; its names are {', '.join(ADAM)}")
    for name in ADAM:
        value = given.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"adam_params: {name}={value!r} must be a number")
    return {name: float(given[name]) for name in ADAM}


def targets_of(lora: Mapping[str, Any]) -> list[str]:
    """Return the groups of `lora.targets` that the flags of a client ask for. Raises UserError for none."""
    targets = [name for name, flag in (("attention", "train_attn"), ("mlp", "train_mlp")) if lora.get(flag, True)]
    if not targets:
        raise UserError("lora_config: set train_attn or train_mlp")
    return targets


async def serve(config: ServeConfig, address: str) -> None:
    front = Front(config, Link(address))
    front.recover()
    dispatching = asyncio.create_task(front.dispatch())
    app = Starlette(routes=front.routes())
    settings = uvicorn.Config(app, host=config.serve.host, port=config.serve.port, log_level="warning")
    server = asyncio.create_task(uvicorn.Server(settings).serve())
    await asyncio.wait([dispatching, server], return_when=asyncio.FIRST_COMPLETED)
    for task in (dispatching, server):
        if task.done():
            task.result()


def main(argv: Sequence[str] | None = None) -> int:
    address, *words = sys.argv[1:] if argv is None else argv
    try:
        config, *_ = launch.compose_config("serve", ServeConfig, words)
        asyncio.run(serve(config, address))
    except UserError as mistake:
        launch.print_error_once(str(mistake))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
