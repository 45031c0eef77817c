"""The journal of a server: what clients were promised, in SQLite, written before they get the answer.

A request is stored as it came, and its answer when it is done. After a restart, `unsaved` gives the requests that the
newest saved state of each training client lacks, in their order, to be carried out again.

A killed process loses nothing. A machine that loses its power may lose the last requests, whose clients then send them
again (SQLite's WAL with synchronous=NORMAL).
"""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = """
create table if not exists sessions (id text primary key, owner text, made real, seen real, finished text,
    over integer default 0, facts text);
create table if not exists models (
    id text primary key, session text, owner text, made real, facts text, saved_seq integer default -1,
    saved_folder text, dropped integer default 0
);
create table if not exists requests (
    number integer primary key, id text unique, owner text, lane text, seq integer, kind text, body blob,
    encoding text, answer blob, media text, attempts integer default 0, made real, unique (lane, seq)
);
create table if not exists samplers (
    id text primary key, owner text, session text, model text, version text, made real
);
create table if not exists versions (version text primary key, model text, seq integer, folder text);
create table if not exists losses (model text, step integer, loss real, made real, primary key (model, step));
create table if not exists checkpoints (
    path text primary key, owner text, model text, kind text, name text, folder text, made real, expires real,
    size integer, request text, metadata text
);
"""


@dataclass(frozen=True)
class Entry:
    """A request that waits. Its body stays in the journal until it is carried out, so that many may wait.

    number: place in the order of arrival.
    lane: training client or sampling session, whose requests are numbered by seq.
    encoding: Content-Encoding of the body.
    done: whether there is an answer.
    attempts: number of times that the ranks began with it and did not end.
    """

    number: int
    id: str
    owner: str
    lane: str
    seq: int
    kind: str
    encoding: str | None
    done: bool
    attempts: int


# The columns of an entry.
ENTRY = "r.number, r.id, r.owner, r.lane, r.seq, r.kind, r.encoding, r.answer is not null as done, r.attempts"


class Journal:
    """Rows of what clients asked for. Every method is one transaction."""

    def __init__(self, file: Path):
        self._base = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=normal")
        self._base.executescript(TABLES)
        self._base.row_factory = sqlite3.Row

    def close(self) -> None:
        self._base.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def accept(
        self, id: str, owner: str, lane: str, seq: int, kind: str, body: bytes, encoding: str | None = None
    ) -> Entry:
        """Store a request, and return it; an earlier one of the same lane and number stays and is returned."""
        self._base.execute(
            "insert into requests (id, owner, lane, seq, kind, body, encoding, made) values (?, ?, ?, ?, ?, ?, ?, ?) "
            "on conflict do nothing",
            (id, owner, lane, seq, kind, body, encoding, time.time()),
        )
        row = self._base.execute(f"select {ENTRY} from requests r where lane = ? and seq = ?", (lane, seq)).fetchone()
        return _entry(row)

    def request(self, id: str) -> Entry | None:
        row = self._base.execute(f"select {ENTRY} from requests r where id = ?", (id,)).fetchone()
        return _entry(row) if row else None

    def body(self, id: str) -> bytes:
        """Return the body of a request as it came; it is there until a saved state has what the request did."""
        return self._base.execute("select body from requests where id = ?", (id,)).fetchone()[0]

    def answer(self, id: str) -> tuple[bytes, str] | None:
        """Return the bytes of an answer and their media type; None until the request is done."""
        row = self._base.execute("select answer, media from requests where id = ?", (id,)).fetchone()
        return None if row is None or row[0] is None else (row[0], row[1])

    def begin(self, id: str) -> int:
        """Note that the ranks begin with a request; return how often they have begun."""
        self._base.execute("update requests set attempts = attempts + 1 where id = ?", (id,))
        return self._base.execute("select attempts from requests where id = ?", (id,)).fetchone()[0]

    def finish(self, id: str, answer: bytes, media: str) -> None:
        self._base.execute(
            "update requests set answer = ?, media = ?, attempts = 0 where id = ?",
            (answer, media, id),
        )

    def unsaved(self) -> Iterator[Entry]:
        """Return the requests to carry out after a start, in the order of arrival: those of training clients that their
        saved state lacks, done or not, and those of sampling sessions that are not done."""
        rows = self._base.execute(
            f"select {ENTRY} from requests r left join models m on m.id = r.lane "
            "where (m.id is not null and not m.dropped and r.seq > m.saved_seq and r.body is not null) "
            "or (m.id is null and r.answer is null) order by r.number"
        ).fetchall()
        return map(_entry, rows)

    def saved(self, model: str, seq: int, folder: str) -> None:
        """Note a saved state of a training client; bodies of the requests that it holds are forgotten."""
        self._base.execute("begin")
        self._base.execute("update models set saved_seq = ?, saved_folder = ? where id = ?", (seq, folder, model))
        self._base.execute(
            "update requests set body = null where lane = ? and seq <= ? and answer is not null",
            (model, seq),
        )
        self._base.execute("commit")

    # ---- other rows -------------------------------------------------------------------------------------------------

    def last_request(self, lane: str) -> float | None:
        """Return the time of the newest request of a training client or sampling session."""
        return self._base.execute("select max(made) from requests where lane = ?", (lane,)).fetchone()[0]

    def open_sessions(self) -> list[dict[str, Any]]:
        """Return the sessions that are not over, whether their clients have said that they are finished or not."""
        return [dict(row) for row in self._base.execute("select * from sessions where not over")]

    def pending(self, session: str) -> bool:
        """Return whether a training client of a session has a request that is not done."""
        return bool(
            self._base.execute(
                "select exists (select 1 from requests r join models m on m.id = r.lane "
                "where m.session = ? and r.answer is null)",
                (session,),
            ).fetchone()[0]
        )

    def end_session(self, session: str, why: str) -> None:
        """Note that a session is over, and forget its requests, which nobody asks for any more."""
        self._base.execute("begin")
        self._base.execute("update sessions set over = 1, finished = ? where id = ?", (why, session))
        self._base.execute(
            "delete from requests where lane in (select id from models where session = ?) "
            "or lane in (select id from samplers where session = ?)",
            (session, session),
        )
        self._base.execute("commit")

    def delete(self, table: str, **where: Any) -> None:
        self._base.execute(f"delete from {table} where {_all(where)}", [*where.values()])

    def insert(self, table: str, **values: Any) -> None:
        """Insert a row; one with the same key stays."""
        names, marks = ", ".join(values), ", ".join("?" for _ in values)
        self._base.execute(f"insert into {table} ({names}) values ({marks}) on conflict do nothing", [*values.values()])

    def update(self, table: str, where: Mapping[str, Any], **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._base.execute(f"update {table} set {names} where {_all(where)}", [*values.values(), *where.values()])

    def rows(self, table: str, **where: Any) -> list[dict[str, Any]]:
        condition = f" where {_all(where)}" if where else ""
        return [
            dict(row)
            for row in self._base.execute(f"select * from {table}{condition} order by rowid", [*where.values()])
        ]

    def row(self, table: str, **where: Any) -> dict[str, Any] | None:
        return next(iter(self.rows(table, **where)), None)

    def facts(self, table: str, **where: Any) -> dict[str, Any]:
        row = self.row(table, **where)
        return json.loads(row["facts"]) if row else {}


def _all(where: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} = ?" for name in where)


def _entry(row: sqlite3.Row) -> Entry:
    return Entry(**{**dict(row), "done": bool(row["done"])})
