"""Carry out requests: make commands of them for the ranks, and answers of the outcomes."""

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve import commands, wire
from isoloss.tools.serve.commands import BASE, Failed
from isoloss.tools.serve.front import external, requests
from isoloss.tools.serve.front.journal import Entry
from isoloss.tools.serve.front.state import State

PROTOBUF = "application/x-protobuf"
TRIES = 2  # times that the ranks may end with a request before it is refused
# What stands between the run and the name in a checkpoint's path.
KINDS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
Saving = requests.SaveWeights | requests.SaveForSampler | requests.SaveExternal
DROPPED = "the session of this request has ended: make a new client"


class Refusal(Exception):
    """The line of a command that the ranks refused."""


class Dispatcher:
    """Sends commands to the ranks: one after the other, but for sampling, which other requests for the same version
    join while it runs.

    In every method a request that is repeated after a restart has an answer already, and gets no other one.
    """

    def __init__(self, state: State):
        self.state, self.journal = state, state.journal
        self._sampling: dict[Entry, tuple[str, asyncio.Task[None]]] = {}  # version and task of a request
        self.completions = 0  # that are sampled at present
        self._steps: Counter[str] = Counter()  # of the optimizer, since the last saved state
        self._losses: Counter[str] = Counter()  # since the last step

    async def run(self) -> None:
        """Carry out requests, without end."""
        state, serve = self.state, self.state.config.serve
        state.facts = await state.link.connect()
        for row in self.journal.rows("models", dropped=0):
            if row["saved_seq"] >= 0:
                await self._call(self._create(row["id"]))
                await self._call(commands.LoadWeights(row["id"], row["saved_folder"], True))
        say(f"isoloss-serve: {state.config.name} at http://{serve.host}:{serve.port}, ready")
        while True:
            taken = state.order.take(2 * serve.concurrency - self.completions)
            if taken is None:
                state.work.clear()
                await state.work.wait()
            elif taken[1][0].kind == "asample":
                await self._begin_sampling(*taken)
            else:
                await self._answered(taken[1], self._train(taken[1][0]))

    def withdraw(self, samplers: set[str]) -> None:
        """End the requests of sampling sessions that nobody waits for any more."""
        gone = self.state.order.withdraw(lambda entry: entry.lane in samplers)
        for entry, (_, task) in self._sampling.items():
            if entry.lane in samplers:
                gone.append(entry)
                task.cancel()
        for entry in gone:
            self.state.fail(entry, DROPPED)

    async def drop_model(self, model: str) -> None:
        """Let the ranks forget a training client, and fail what waits of it."""
        for entry in self.state.order.forget(model):
            self.state.fail(entry, DROPPED)
        await self._call(commands.DropModel(model))

    async def drop_version(self, version: str) -> None:
        """Let the ranks forget a version."""
        if self.state.loaded.pop(version, 0) is None:
            await self._call(commands.DropVersion("", version))

    async def _call(self, command: commands.Command) -> Any:
        """Carry out a command. Raises Refusal."""
        outcome = await self.state.link.call(command)
        if isinstance(outcome, Failed):
            raise Refusal(outcome.message)
        return outcome

    async def _answered(self, entries: Sequence[Entry], work: Awaitable[None]) -> None:
        """Wait for the work on requests; where it fails they are answered, and the server goes on."""
        try:
            await work
        except (Refusal, UserError) as refusal:
            line, category = str(refusal), "user"
        except Exception as error:
            line, category = f"{type(error).__name__}: {error}", "server"
            say(f"isoloss-serve: {entries[0].kind}: {line}", error=True)
        else:
            return
        for entry in entries:
            self.state.fail(entry, line, category)

    def _gave_up(self, entry: Entry) -> bool:
        """Note that the ranks begin with a request. Return True, with the request refused, if they ended with it
        before."""
        if self.journal.begin(entry.id) <= TRIES:
            return False
        self.state.fail(entry, "the server's ranks ended while they computed this, twice: it is refused", "server")
        return True

    # ---- training ---------------------------------------------------------------------------------------------------

    async def _train(self, entry: Entry) -> None:
        """Carry out a request of a training client. Raises Refusal, UserError."""
        if entry.done or not self._gave_up(entry):
            await getattr(self, f"_{entry.kind}")(entry, self.journal.body(entry.id))

    async def _create_model(self, entry: Entry, body: bytes) -> None:
        await self._call(self._create(entry.lane))
        self.state.finish_json(entry, type="create_model", model_id=entry.lane)

    async def _forward_backward(self, entry: Entry, body: bytes) -> None:
        asked = wire.read_forward_backward(body, entry.encoding, self.state.limits)
        self._check_data(asked.data)
        command = commands.ForwardBackward(entry.lane, asked.data, asked.loss_fn, asked.config, asked.forward_only)
        done = await self._call(command)
        if not asked.forward_only:
            self._losses[entry.lane] += done.loss
        metrics = {"loss:sum": done.loss, "micro_batches:max": float(done.micro_batches)}
        self.state.finish(entry, wire.forward_backward_answer(done.logprobs, metrics), PROTOBUF)

    async def _optim_step(self, entry: Entry, body: bytes) -> None:
        asked = requests.read(requests.OptimStep, body)
        adam = asked.adam_params.model_dump(exclude={"type"})
        metrics = await self._call(commands.OptimStep(entry.lane, **adam))
        self.state.finish_json(entry, type="optim_step", metrics=metrics)
        self.journal.insert(
            "losses", model=entry.lane, step=entry.seq, loss=self._losses.pop(entry.lane, 0.0), made=time.time()
        )
        self._steps[entry.lane] += 1
        if self._steps[entry.lane] >= self.state.config.serve.save_every:
            await self._save_state(entry)

    async def _save_weights(self, entry: Entry, body: bytes) -> None:
        path = await self._checkpoint(entry, "training", requests.read(requests.SaveWeights, body))
        self.state.finish_json(entry, type="save_weights", path=path)

    async def _save_weights_external(self, entry: Entry, body: bytes) -> None:
        asked = requests.read(requests.SaveExternal, body)
        path = await self._checkpoint(entry, "external", asked)
        row = self.journal.row("checkpoints", path=path)
        size = row["size"] if row else None
        self.state.finish_json(entry, type="save_weights_external", path=path, size_bytes=size)

    async def _load_weights(self, entry: Entry, body: bytes) -> None:
        asked = requests.read(requests.LoadWeights, body)
        row = self.journal.row("checkpoints", path=asked.path)
        if row is None or row["owner"] != entry.owner:
            raise UserError(f"path={asked.path!r} does not exist")
        if row["kind"] == "external":
            raise UserError(f"path={asked.path!r} is an export; load a checkpoint of save_state")
        if entry.seq == 0:
            await self._call(self._create(entry.lane))
        await self._call(commands.LoadWeights(entry.lane, row["folder"], asked.optimizer))
        self.state.finish_json(entry, type="load_weights", path=asked.path, model_id=entry.lane)
        # A restart must not load again: by then the path may have other weights, or none.
        await self._save_state(entry)

    async def _save_weights_for_sampler(self, entry: Entry, body: bytes) -> None:
        asked, lane, journal = requests.read(requests.SaveForSampler, body), entry.lane, self.journal
        if asked.path is not None:
            path = await self._checkpoint(entry, "sampler", asked)
            self.state.finish_json(entry, type="save_weights_for_sampler", path=path)
            return
        session = lane.split(":")[0]
        sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
        version = sampler if asked.kind == "snapshot" else f"{lane}:inflight"
        await self._call(commands.Snapshot(lane, version))
        journal.delete("versions", version=version)  # an earlier state of one in flight
        journal.insert("versions", version=version, model=lane, seq=entry.seq, folder=None)
        journal.insert(
            "samplers",
            id=sampler, owner=entry.owner, session=session, model=lane, version=version, made=time.time(),
        )  # fmt: skip
        self.state.version_is_there(version)
        await self._make_room()
        self.state.finish_json(entry, type="save_weights_for_sampler", sampling_session_id=sampler)

    async def _checkpoint(self, entry: Entry, kind: str, asked: Saving) -> str:
        """Write a checkpoint under a name; return its path for clients. Raises UserError where one has the name.

        A request that is repeated after a restart finds its own checkpoint, and leaves it.
        """
        path = f"tinker://{entry.lane}/{KINDS[kind]}/{asked.path}"
        before = self.journal.row("checkpoints", path=path)
        if entry.done or (before is not None and before["request"] == entry.id):
            return path
        if before is not None and not asked.overwrite:
            raise UserError(f"path={asked.path!r}: {path} exists already: give another name, or overwrite=True")
        folder = self.state.folder_of("checkpoints", f"{path} {entry.id}")
        shutil.rmtree(folder, ignore_errors=True)  # of a process that died meanwhile
        if isinstance(asked, requests.SaveExternal):
            await self._call(commands.ExportAdapter(entry.lane, str(folder)))
            external.encrypt(folder, asked.age_encryption_recipients or ())
        else:
            await self._call(commands.SaveWeights(entry.lane, str(folder)))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        now, ttl = time.time(), asked.ttl_seconds
        self.journal.delete("checkpoints", path=path)
        self.journal.insert(
            "checkpoints", path=path, owner=entry.owner, model=entry.lane, kind=kind, name=asked.path,
            folder=str(folder), made=now, expires=now + ttl if ttl else None, size=size, request=entry.id,
            metadata=json.dumps(asked.user_metadata),
        )  # fmt: skip
        if before is not None:
            shutil.rmtree(before["folder"], ignore_errors=True)
            await self.drop_version(path)
            self.journal.delete("versions", version=path)
        return path

    def _create(self, model: str) -> commands.CreateModel:
        facts = self.journal.facts("models", id=model)
        return commands.CreateModel(model, facts["rank"], facts["seed"], tuple(facts["targets"]))

    def _check_data(self, data: Sequence[wire.Datum]) -> None:
        """Raise UserError for tokens that the model does not have, and for data beyond its positions."""
        vocab, positions = self.state.facts["vocab_size"], self.state.facts["max_positions"]
        for k, datum in enumerate(data):
            if len(datum.tokens) > positions:
                raise UserError(f"datum {k} has {len(datum.tokens)} tokens, and the model {positions} positions")
            for name, tokens in (("tokens", datum.tokens), ("target_tokens", datum.inputs["target_tokens"])):
                if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
                    raise UserError(f"datum {k}: {name} has an id that is none of the model's, 0 to {vocab - 1}")

    # ---- states and versions ----------------------------------------------------------------------------------------

    async def _save_state(self, entry: Entry) -> None:
        """Save a training client after an optimizer step, so that a restart need not repeat what was before."""
        lane, before = entry.lane, self.journal.row("models", id=entry.lane)
        assert before is not None, "a training client of the journal"
        folder = self.state.folder_of("states", lane) / str(entry.seq)
        shutil.rmtree(folder, ignore_errors=True)
        rows = self.journal.rows("versions", model=lane)
        try:
            for row in rows:
                if not row["folder"] and row["version"] in self.state.loaded:
                    await self._write_version(row["version"])
            await self._call(commands.SaveWeights(lane, str(folder)))
        except Refusal as refusal:
            say(f"isoloss-serve: {lane} could not be saved: {refusal}", error=True)
            return
        self._steps[lane] = 0
        self.journal.saved(lane, entry.seq, str(folder))
        if before["saved_folder"]:
            shutil.rmtree(before["saved_folder"], ignore_errors=True)

    async def _write_version(self, version: str) -> None:
        folder = self.state.folder_of("versions", f"{version} {time.time()}")
        await self._call(commands.SaveVersion("", version, str(folder)))
        self.journal.update("versions", {"version": version}, folder=str(folder))

    async def _load_version(self, version: str) -> None:
        """Let the ranks have a version that is in a folder, as the one used last. Raises Refusal."""
        if version == BASE:
            return
        if version in self.state.loaded:
            self.state.loaded[version] = self.state.loaded.pop(version)
            return
        row = self.journal.row("versions", version=version)
        if row is None or not row["folder"] or not Path(row["folder"]).exists():
            raise Refusal(f"{version} was deleted or has expired")
        facts = self.journal.facts("models", id=row["model"])
        await self._call(
            commands.LoadVersion(row["model"], version, row["folder"], facts["rank"], tuple(facts["targets"]))
        )
        self.state.version_is_there(version)
        await self._make_room()

    async def _make_room(self) -> None:
        """Let the ranks forget the versions that were used longest ago, above serve.max_versions."""
        loaded, used = self.state.loaded, {version for version, _ in self._sampling.values()}
        idle = [version for version in loaded if version != BASE and version not in used]
        for version in idle[: max(0, len(loaded) - 1 - self.state.config.serve.max_versions)]:
            row = self.journal.row("versions", version=version)
            if row is not None and not row["folder"]:
                await self._write_version(version)
            await self.drop_version(version)

    # ---- sampling ---------------------------------------------------------------------------------------------------

    async def _begin_sampling(self, version: str, entries: Sequence[Entry]) -> None:
        """Begin with requests for completions of one version."""

        async def load() -> None:
            await self._load_version(version)
            for entry in entries:
                if not self._gave_up(entry):
                    task = asyncio.create_task(self._answered([entry], self._sample(version, entry)))
                    self._sampling[entry] = version, task
                    task.add_done_callback(lambda _, entry=entry: self._sampling.pop(entry))

        await self._answered(entries, load())

    async def _sample(self, version: str, entry: Entry) -> None:
        """Carry out a request for completions. Raises Refusal, UserError."""
        asked = requests.read(requests.Sample, self.journal.body(entry.id))
        request = self._request_of(asked, entry)
        self.completions += len(request.ids)
        try:
            completions, scores = [], None
            if request.max_tokens:
                completions = await self._call(commands.Sample("", version, request))
            if asked.prompt_logprobs or asked.topk_prompt_logprobs:
                scores = await self._call(commands.Score("", version, request.prompt, asked.topk_prompt_logprobs))
            likeliest = await asyncio.gather(
                *(self._likeliest(version, asked, request.prompt, tokens) for tokens, _, _ in completions)
            )
        finally:
            self.completions -= len(request.ids)
            self.state.work.set()
        sequences = [
            wire.Sampled(tokens, logprobs, finish, top)
            for (tokens, logprobs, finish), top in zip(completions, likeliest)
        ]
        logprobs, top = None, None
        if scores is not None:
            last = slice(-(asked.prompt_logprobs_last_n or len(request.prompt)), None)
            logprobs = scores.logprobs[last] if asked.prompt_logprobs else None
            top = wire.TopK(scores.top_ids[last], scores.top_logprobs[last]) if asked.topk_prompt_logprobs else None
        self.state.finish(entry, wire.sample_answer(sequences, logprobs, top), PROTOBUF)

    async def _likeliest(
        self, version: str, asked: requests.Sample, prompt: tuple[int, ...], tokens: np.ndarray
    ) -> wire.TopK | None:
        """Return the likeliest tokens at each token of a completion, read again behind its prompt. Raises Refusal."""
        if not asked.topk_sample_logprobs:
            return None
        whole, start = (*prompt, *tokens.tolist()), len(prompt)
        scores = await self._call(commands.Score("", version, whole, asked.topk_sample_logprobs))
        return wire.TopK(scores.top_ids[start:], scores.top_logprobs[start:])

    def _request_of(self, asked: requests.Sample, entry: Entry) -> commands.SampleRequest:
        """Return what the ranks have to know of a request. Raises UserError where it asks for what does not exist."""
        facts, prompt, given = self.state.facts, asked.tokens, asked.sampling_params
        most = facts["max_positions"] - len(prompt)
        limit = most if given.max_tokens is None else given.max_tokens
        if not prompt:
            raise UserError("prompt has no tokens")
        wrong = next((token for token in prompt if not 0 <= token < facts["vocab_size"]), None)
        if wrong is not None:
            raise UserError(f"prompt has the token {wrong}, and the model's are 0 to {facts['vocab_size'] - 1}")
        if limit > most:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and max_tokens={limit} are more than the model's "
                f"{facts['max_positions']} positions"
            )
        stop = given.stop if isinstance(given.stop, list) else [given.stop]
        texts = tuple(each for each in stop if isinstance(each, str))
        tokens = tuple(each for each in stop if isinstance(each, int))
        name = entry.lane if given.seed is None else "seed"
        return commands.SampleRequest(
            ids=tuple(f"{name}/{entry.seq}/{k}" for k in range(asked.num_samples)),
            prompt=prompt,
            max_tokens=limit,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=-1 if given.top_k == 0 else given.top_k,
            stop=texts,
            stop_token_ids=tuple(facts["stop_token_ids"]) if given.stop is None else tokens,
            seed=given.seed or 0,
        )
