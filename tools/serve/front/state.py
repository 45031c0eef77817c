"""The state of the front: what is stored in the journal, and what waits."""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime.console import say
from isoloss.tools.serve.arrays import Limits
from isoloss.tools.serve.commands import BASE
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front import keys, requests
from isoloss.tools.serve.front.journal import Entry, Journal
from isoloss.tools.serve.front.link import Link
from isoloss.tools.serve.front.order import Order

JSON = "application/json"


class State:
    """All of it but what waits is in the journal.

    facts: description of the model by the ranks; empty until they are ready.
    loaded: versions that the ranks have, the one used last at the end.
    started: time of the start of this process, in seconds.
    heard: time of the newest request or poll of each session.
    """

    def __init__(self, config: ServeConfig, link: Link):
        self.config, self.folder, self.link = config, config.folder, link
        self.keys = keys.read(config.serve.api_keys, self.folder)
        self.journal = Journal(self.folder / "journal.sqlite")
        self.order: Order[Entry] = Order()
        self.facts: dict[str, Any] = {}
        self.loaded: dict[str, None] = {BASE: None}
        self.started = time.time()
        self.heard: dict[str, float] = {}
        self.work = asyncio.Event()
        self._waiting: dict[str, list[Entry]] = {}  # requests for completions of versions that are not there yet
        self._done: dict[str, asyncio.Event] = {}
        serve = config.serve
        self.limits = Limits(
            body_bytes=serve.max_body_bytes,
            decompressed_bytes=serve.max_decompressed_bytes,
            datums=serve.max_datums,
            tokens=serve.max_tokens,
        )

    def recover(self) -> None:
        """Queue what the journal has and the ranks lack."""
        for row in self.journal.rows("models", dropped=0):
            self.order.start(row["id"], row["saved_seq"] + 1)
        for entry in self.journal.unsaved():
            self.queue(entry)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(self, owner: str, lane: str, seq: int, kind: str, body: bytes, encoding: str | None = None) -> str:
        """Store a request and queue it, unless it was sent before. Return the id of its future.

        Raises Refused where serve.max_queued requests wait.
        """
        self.hear(lane)
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{lane}/{seq}"))
        if self.journal.request(id) is not None:
            return id
        if len(self.order) >= self.config.serve.max_queued:
            raise requests.Refused(
                429, f"{len(self.order)} requests wait already (serve.max_queued): send it again later"
            )
        self.queue(self.journal.accept(id, owner, lane, seq, kind, body, encoding))
        return id

    def hear(self, lane: str) -> None:
        """Note that the session of a training client or sampling session is alive: clients without heartbeats are, too,
        while they ask."""
        self.heard[lane.split(":")[0]] = time.time()

    def queue(self, entry: Entry) -> None:
        """Let a request wait for its turn; one for completions, until its version is there."""
        if entry.kind != "asample":
            self.order.add(entry.lane, entry.seq, entry)
        else:
            version = self.version_of(entry.lane)
            row = self.journal.row("versions", version=version)
            if version in self.loaded or (row is not None and row["folder"]):
                self.order.add_sample(version, entry)
            else:
                self._waiting.setdefault(version, []).append(entry)
        self.work.set()

    def version_is_there(self, version: str) -> None:
        """Let requests that waited for a version go on."""
        self.loaded[version] = None
        for entry in self._waiting.pop(version, []):
            self.queue(entry)

    def version_of(self, sampler: str) -> str:
        row = self.journal.row("samplers", id=sampler)
        assert row is not None, "a request names a sampling session that was looked up"
        return row["version"]

    def finish(self, entry: Entry, answer: bytes, media: str) -> None:
        """Store an answer and wake its client. The answer of a request that is repeated after a restart stays."""
        before = self.journal.answer(entry.id)
        if before is None:
            self.journal.finish(entry.id, answer, media)
        elif before[0] != answer:
            say(f"isoloss-serve: {entry.kind} {entry.lane} {entry.seq}: repeated with another result", error=True)
        self._done.pop(entry.id, asyncio.Event()).set()

    def finish_json(self, entry: Entry, **answer: Any) -> None:
        self.finish(entry, json.dumps(answer).encode(), JSON)

    def fail(self, entry: Entry, line: str, category: str = "user") -> None:
        self.finish_json(entry, error=line, category=category)

    def done(self, id: str) -> asyncio.Event:
        """Return what is set when a request is done."""
        return self._done.setdefault(id, asyncio.Event())

    # ---- what belongs to whom ---------------------------------------------------------------------------------------

    def session(self, id: Any, owner: str) -> str:
        return self.owned("sessions", "id", "session_id", id, owner)["id"]

    def model(self, id: Any, owner: str) -> dict[str, Any]:
        return self.owned("models", "id", "model_id", id, owner)

    def sampler(self, id: Any, owner: str) -> dict[str, Any]:
        return self.owned("samplers", "id", "sampling_session_id", id, owner)

    def owned(self, table: str, column: str, name: str, value: Any, owner: str) -> dict[str, Any]:
        """Return the row of a thing that a request names. Raises Refused where this owner has none."""
        row = self.journal.row(table, **{column: value})
        if row is None or row["owner"] != owner or row.get("dropped"):
            raise requests.Refused(404, f"{name}={value!r} does not exist")
        return row

    def check_base(self, name: Any) -> None:
        """Raise Refused where a request asks for another model than that of the server."""
        if name != self.config.name:
            raise requests.Refused(400, f"this server has {self.config.name}, not {name!r}")

    # ---- folders ----------------------------------------------------------------------------------------------------

    def folder_of(self, kind: str, name: str) -> Path:
        """Return the folder of what clients name: by hash, never by joining names."""
        return self.folder / kind / sha256(name.encode()).hexdigest()[:32]


def metadata_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(row["facts"] or "{}")
