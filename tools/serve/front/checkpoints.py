"""The rest client's lists: training runs, their checkpoints, and sessions."""

import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve.front import requests
from isoloss.tools.serve.front.http import Handlers, body_of
from isoloss.tools.serve.front.state import State, metadata_of

Row = dict[str, Any]


class WeightsInfo(requests.Body):
    tinker_path: str


class TimeToLive(requests.Body):
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def checkpoint_id(row: Row) -> str:
    """Return the last two parts of a checkpoint's path."""
    return "/".join(row["path"].split("/")[-2:])


def described(row: Row) -> Row:
    """Return a checkpoint as clients read it."""
    return {
        "checkpoint_id": checkpoint_id(row),
        "checkpoint_type": row["kind"],
        "time": moment(row["made"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "public": False,
        "user_metadata": json.loads(row["metadata"]),
        "expires_at": moment(row["expires"]) if row["expires"] else None,
    }


def run_of(state: State, row: Row) -> Row:
    """Return a training run, which is a training client, as clients read it."""
    facts, last = metadata_of(row), {}
    for checkpoint in state.journal.rows("checkpoints", model=row["id"]):
        last[checkpoint["kind"]] = described(checkpoint)
    metadata = facts["user_metadata"]
    return {
        "training_run_id": row["id"],
        "base_model": state.config.name,
        "model_owner": "this key",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": facts["rank"],
        "last_request_time": moment(state.journal.last_request(row["id"]) or row["made"]),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": {name: str(value) for name, value in metadata.items()} if metadata else None,
    }


def page(request: Request, rows: Sequence[Row]) -> tuple[Sequence[Row], Row]:
    """Return the rows that `limit` and `offset` ask for, newest first, and a cursor. Raises UserError."""
    found = {"offset": 0, "limit": 20}
    for name in found:
        given = request.query_params.get(name)
        if given is not None and not given.isdigit():
            raise UserError(f"{name}={given!r} must be a whole number")
        found[name] = found[name] if given is None else int(given)
    newest = [*reversed(rows)]
    return newest[found["offset"] :][: found["limit"]], {**found, "total_count": len(rows)}


async def training_runs(state: State, request: Request, owner: str) -> Response:
    rows, cursor = page(request, state.journal.rows("models", owner=owner))
    return JSONResponse({"training_runs": [run_of(state, row) for row in rows], "cursor": cursor})


async def training_run(state: State, request: Request, owner: str) -> Response:
    return JSONResponse(run_of(state, _run(state, request, owner)))


async def of_run(state: State, request: Request, owner: str) -> Response:
    rows = state.journal.rows("checkpoints", model=_run(state, request, owner)["id"])
    return JSONResponse({"checkpoints": [described(row) for row in reversed(rows)]})


async def checkpoints(state: State, request: Request, owner: str) -> Response:
    rows, cursor = page(request, state.journal.rows("checkpoints", owner=owner))
    return JSONResponse({"checkpoints": [described(row) for row in rows], "cursor": cursor})


async def delete(state: State, request: Request, owner: str) -> Response:
    remove(state, _checkpoint(state, request, owner))
    return Response(status_code=204)


def remove(state: State, row: Row) -> None:
    """Delete a checkpoint. Ranks that have its weights sample from them until they need the memory."""
    state.journal.delete("checkpoints", path=row["path"])
    shutil.rmtree(row["folder"], ignore_errors=True)


async def time_to_live(state: State, request: Request, owner: str) -> Response:
    row = _checkpoint(state, request, owner)
    seconds = requests.read(TimeToLive, await body_of(state, request)).ttl_seconds
    expires = None if seconds is None else datetime.now(UTC).timestamp() + seconds
    state.journal.update("checkpoints", {"path": row["path"]}, expires=expires)
    return Response(status_code=204)


async def publish(state: State, request: Request, owner: str) -> Response:
    raise requests.Refused(
        400, "checkpoints cannot be published: this server shows them to the key that made them alone"
    )


async def weights_info(state: State, request: Request, owner: str) -> Response:
    path = requests.read(WeightsInfo, await body_of(state, request)).tinker_path
    row = state.owned("checkpoints", "path", "tinker_path", path, owner)
    facts = state.journal.facts("models", id=row["model"])
    flags = {name: facts[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return JSONResponse({"base_model": state.config.name, "is_lora": True, "lora_rank": facts["rank"], **flags})


async def sessions(state: State, request: Request, owner: str) -> Response:
    rows, _ = page(request, state.journal.rows("sessions", owner=owner))
    return JSONResponse({"sessions": [row["id"] for row in rows]})


async def session(state: State, request: Request, owner: str) -> Response:
    row = state.owned("sessions", "id", "session_id", request.path_params["id"], owner)
    facts = metadata_of(row)
    return JSONResponse(
        {
            "training_run_ids": [each["id"] for each in state.journal.rows("models", session=row["id"])],
            "sampler_ids": [each["id"] for each in state.journal.rows("samplers", session=row["id"])],
            "user_metadata": facts.get("user_metadata"),
            "display_name": facts.get("display_name"),
        }
    )


def _run(state: State, request: Request, owner: str) -> Row:
    """Return the training run of a path; it is listed also when its session has ended."""
    id = request.path_params["run"]
    row = state.journal.row("models", id=id)
    if row is None or row["owner"] != owner:
        raise requests.Refused(404, f"training_run_id={id!r} does not exist")
    return row


def _checkpoint(state: State, request: Request, owner: str) -> Row:
    parts = request.path_params
    path = f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"
    return state.owned("checkpoints", "path", "path", path, owner)


CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
GET: Handlers = {
    "training_runs": training_runs,
    "training_runs/{run}": training_run,
    "training_runs/{run}/checkpoints": of_run,
    "checkpoints": checkpoints,
    "sessions": sessions,
    "sessions/{id}": session,
}
POST: Handlers = {"weights_info": weights_info, f"{CHECKPOINT}/publish": publish}
DELETE: Handlers = {CHECKPOINT: delete, f"{CHECKPOINT}/publish": publish}
PUT: Handlers = {f"{CHECKPOINT}/ttl": time_to_live}
