"""Play training clients of the session against a server, and compare what they were answered."""

import json
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from isoloss.tools.prove.serve import wire
from isoloss.tools.prove.serve.connection import Connection
from isoloss.tools.prove.serve.session import Call, Client, Completions, Continue, Load, Request, Save, Snapshot, Step
from isoloss.tools.prove.serve.wire import Numbers

# Requests of a training client that are sent before the first of them is waited for.
AHEAD = 8
Record = dict[str, Numbers]  # by the label of the request


def play(clients: Sequence[Client], name: str, connect: Callable[[int], Connection], *, together: bool) -> Record:
    """Play clients, each with a session of its own, and return their numbers. Raises SessionError.

    name: the model's, at the server.
    connect: returns a connection for the client of that number.
    """

    def one(number: int) -> Record:
        connection = connect(number)
        try:
            return Player(connection, name).play(clients[number])
        finally:
            connection.close()

    record: Record = {}
    with ThreadPoolExecutor(len(clients) if together else 1) as threads:
        for found in threads.map(one, range(len(clients))):
            record |= found
    return record


class Player:
    """A session of one training client and those that continue from its checkpoints."""

    def __init__(self, connection: Connection, name: str):
        self._connection, self._name = connection, name
        self._session, self._models, self._samplers = "", 0, 0
        self._record: Record = {}

    def play(self, client: Client) -> Record:
        begun = self._connection.post(
            "create_session", {"sdk_version": "0.38.0"}, **{"X-Idempotency-Key": str(uuid.uuid4())}
        )
        self._session = begun["session_id"]
        asked = {"session_id": self._session, "model_seq_id": 0, "base_model": self._name, "lora_config": client.shape}
        self._models = 1
        created = self._connection.post("create_model", asked)["request_id"]
        model = json.loads(self._connection.result(created))["model_id"]
        self._carry_out(model, client.requests)
        return self._record

    def _carry_out(self, model: str, requests: Sequence[tuple[str, Request]]) -> None:
        """Send requests of a training client and wait for their results."""
        lane = Lane(self._connection, model, self._record)
        samplers: dict[str, str] = {}
        asked: dict[str, int] = {}
        for label, request in requests:
            match request:
                case Call() | Step():
                    lane.send(label, request)
                case Snapshot(name, saved):
                    body = {"path": name} if saved else {"sampling_session_seq_id": self._next_sampler()}
                    answer = lane.ask("save_weights_for_sampler", body)
                    samplers[name] = self._sampler(answer["path"]) if saved else answer["sampling_session_id"]
                case Completions(snapshot):
                    # One at a time: completions that share a batch may differ by rounding.
                    sampler = samplers[snapshot]
                    asked[sampler] = asked.get(sampler, -1) + 1
                    body = wire.completions_body(request, sampler, asked[sampler])
                    future = self._connection.post("asample", body)["request_id"]
                    self._record[label] = wire.completions_numbers(self._connection.result(future))
                case Save(name):
                    lane.ask("save_weights", {"path": name})
                case Load(name, optimizer):
                    lane.ask("load_weights", {"path": f"tinker://{model}/weights/{name}", "optimizer": optimizer})
                case Continue(name, optimizer, others):
                    lane.wait()
                    body = {"path": f"tinker://{model}/weights/{name}", "optimizer": optimizer}
                    body |= {"session_id": self._session, "model_seq_id": self._models}
                    self._models += 1
                    loaded = self._connection.post("load_weights", body)["request_id"]
                    other = json.loads(self._connection.result(loaded))["model_id"]
                    self._carry_out(other, [(f"{label} {k}", each) for k, each in enumerate(others)])
        lane.wait()

    def _next_sampler(self) -> int:
        self._samplers += 1
        return self._samplers - 1

    def _sampler(self, path: str) -> str:
        """Make a sampling session of saved weights."""
        body = {"session_id": self._session, "sampling_session_seq_id": self._next_sampler(), "model_path": path}
        return self._connection.post("create_sampling_session", body)["sampling_session_id"]


class Lane:
    """The requests of a training client, numbered from 1."""

    def __init__(self, connection: Connection, model: str, record: Record):
        self._connection, self._model, self._record = connection, model, record
        self._seq = 0
        self._waiting: list[tuple[str, Request, list]] = []

    def send(self, label: str, request: Call | Step) -> None:
        """Send a request with others, and wait for all of them at the latest once AHEAD of them are there."""
        if isinstance(request, Call):
            parts = wire.chunks_of(request, self._connection.disturbance.chunk)
            posts = [("forward_backward", wire.call_body(part, self._model, self._next())) for part in parts]
        else:
            body = {"model_id": self._model, "seq_id": self._next(), "adam_params": dict(request.adam)}
            posts = [("optim_step", body)]
        self._waiting.append((label, request, posts))
        if len(self._waiting) >= AHEAD:
            self.wait()

    def ask(self, path: str, body: dict) -> dict:
        """Send a request, and return its result."""
        self.wait()
        posted = self._connection.post(path, {**body, "model_id": self._model, "seq_id": self._next()})
        return json.loads(self._connection.result(posted["request_id"]))

    def wait(self) -> None:
        futures = self._connection.post_all([posts for _, _, posts in self._waiting])
        for (label, request, _), ids in zip(self._waiting, futures, strict=True):
            results = [self._connection.result(id) for id in ids]
            numbers = wire.step_numbers(json.loads(results[0])["metrics"]) if isinstance(request, Step) else None
            self._record[label] = numbers or wire.call_numbers(results)
        self._waiting = []

    def _next(self) -> int:
        self._seq += 1
        return self._seq


@dataclass(frozen=True)
class Difference:
    """The difference of two records.

    values: number of values compared. unequal: number of those that differ in a bit.
    loss, grad_norm: the largest relative error; of losses below 1 the absolute one.
    logprobs: the largest difference of a log-probability, as it travels in fp32.
    tokens: number of sampled tokens that differ.
    beyond: number of log-probabilities that differ by more than one step of fp32.
    first: label of the first request with an unequal value; "" without any.
    """

    values: int
    unequal: int
    loss: float
    grad_norm: float
    logprobs: float
    tokens: int
    beyond: int
    first: str

    def within(self, tolerance: float) -> bool:
        """Return whether the records agree up to rounding."""
        return max(self.loss, self.grad_norm) <= tolerance and not self.tokens and not self.beyond


def compare(found: Record, expected: Record) -> Difference:
    """Compare the requests of `expected`; those of other clients are left out."""
    values = unequal = tokens = beyond = 0
    worst, first = {"loss": 0.0, "grad_norm": 0.0, "logprobs": 0.0}, ""
    for label, numbers in expected.items():
        for name, wanted in numbers.items():
            got = found[label][name] if label in found else np.empty(0)
            values += wanted.size
            if got.shape != wanted.shape:
                unequal, tokens, first = unequal + wanted.size, tokens + wanted.size, first or label
                continue
            differ = int((got != wanted).sum())
            unequal, first = unequal + differ, first or (label if differ else "")
            error = np.nan_to_num(np.abs(got.astype(np.float64) - wanted), nan=np.inf)
            if name in ("lengths", "tokens", "applied"):
                tokens += differ
            elif name in ("logprobs", "prompt"):
                beyond += int((error > np.spacing(np.abs(wanted))).sum())
                worst["logprobs"] = max(worst["logprobs"], float(error.max(initial=0.0)))
            else:
                floor = 1.0 if name == "loss" else np.finfo(float).tiny
                worst[name] = max(worst[name], float(error / max(abs(float(wanted)), floor)))
    return Difference(values, unequal, **worst, tokens=tokens, beyond=beyond, first=first)
