"""Sessions of clients: their start, their heartbeats and their end."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isoloss.tools.serve.front import requests
from isoloss.tools.serve.front.http import Handlers, body_of
from isoloss.tools.serve.front.state import State


async def client_config(state: State, request: Request, owner: str) -> Response:
    serve = state.config.serve
    return JSONResponse(
        {
            "proto_compress_fwdbwd": True,
            "fwdbwd_max_chunk_len": serve.max_datums,
            "fwdbwd_max_chunk_bytes_count": serve.chunk_bytes,
            "parallel_fwdbwd_chunks": True,
        }
    )


async def nothing(state: State, request: Request, owner: str) -> Response:
    return JSONResponse({})


async def telemetry(state: State, request: Request, owner: str) -> Response:
    await body_of(state, request)
    return JSONResponse({"status": "accepted"})


async def create_session(state: State, request: Request, owner: str) -> Response:
    body = await body_of(state, request)
    requests.fields(body)
    again = request.headers.get("x-idempotency-key")
    id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{owner}/{again}")) if again else str(uuid.uuid4())
    now = time.time()
    state.journal.insert("sessions", id=id, owner=owner, made=now, seen=now, facts=body.decode())
    about = f"isoloss-serve: {state.config.name}, {state.config.train.precision}"
    return JSONResponse({"type": "create_session", "session_id": id, "info_message": about})


async def heartbeat(state: State, request: Request, owner: str) -> Response:
    asked = requests.read(requests.OfSession, await body_of(state, request))
    state.journal.update("sessions", {"id": state.session(asked.session_id, owner)}, seen=time.time())
    return JSONResponse({"type": "session_heartbeat"})


async def finish(state: State, request: Request, owner: str) -> Response:
    id = state.session(request.path_params["id"], owner)
    state.journal.update("sessions", {"id": id}, finished="by its client")
    return Response(status_code=204)


async def capabilities(state: State, request: Request, owner: str) -> Response:
    model = {
        "model_name": state.config.name,
        "max_context_length": state.facts.get("max_positions"),
        "trainable": True,
        "sampleable": True,
    }
    return JSONResponse({"supported_models": [model]})


POST: Handlers = {
    "client/config": client_config,
    "client/dynamic_config": nothing,
    "create_session": create_session,
    "session_heartbeat": heartbeat,
    "sessions/{id}/finish": finish,
    "telemetry": telemetry,
}
GET: Handlers = {"healthz": nothing, "get_server_capabilities": capabilities}
