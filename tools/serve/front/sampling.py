"""Sampling sessions, requests for completions, and the results of all requests."""

import asyncio
import contextlib
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isoloss.tools.serve.commands import BASE
from isoloss.tools.serve.front import requests
from isoloss.tools.serve.front.http import Handlers, body_of
from isoloss.tools.serve.front.state import State

POLL_SECONDS = 30.0  # for which a client that asks for a result waits; it gives up after 45


async def create_sampling_session(state: State, request: Request, owner: str) -> Response:
    asked = requests.read(requests.CreateSamplingSession, await body_of(state, request))
    session, version = state.session(asked.session_id, owner), BASE
    if asked.model_path is not None:
        row = state.owned("checkpoints", "path", "model_path", asked.model_path, owner)
        version = asked.model_path
        state.journal.insert("versions", version=version, model=row["model"], seq=0, folder=row["folder"])
    else:
        state.check_base(asked.base_model)
    id = f"{session}:sample:{asked.sampling_session_seq_id}"
    state.journal.insert("samplers", id=id, owner=owner, session=session, model=None, version=version, made=time.time())
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": id})


async def sampler(state: State, request: Request, owner: str) -> Response:
    row = state.sampler(request.path_params["id"], owner)
    path = row["version"] if row["version"].startswith("tinker://") else None
    return JSONResponse({"sampler_id": row["id"], "base_model": state.config.name, "model_path": path})


async def asample(state: State, request: Request, owner: str) -> Response:
    raw = await body_of(state, request)
    asked = requests.read(requests.Sample, raw)
    most = state.config.serve.max_samples
    if asked.num_samples > most:
        raise requests.Refused(400, f"num_samples={asked.num_samples} is more than {most} (serve.max_samples)")
    lane = state.sampler(asked.sampling_session_id, owner)["id"]
    id = state.submit(owner, lane, asked.seq_id, "asample", raw)
    sequences = [f"{lane}/{asked.seq_id}/{k}" for k in range(asked.num_samples)]
    return JSONResponse({"request_id": id, "sample_sequence_ids": sequences})


async def retrieve_future(state: State, request: Request, owner: str) -> Response:
    asked = requests.read(requests.RetrieveFuture, await body_of(state, request))
    entry = state.journal.request(asked.request_id)
    if entry is None or entry.owner != owner:
        raise requests.Refused(410, f"request_id={asked.request_id!r} does not exist")
    state.hear(entry.lane)
    if not entry.done:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.done(entry.id).wait(), POLL_SECONDS)
    answer = state.journal.answer(entry.id)
    if answer is None:
        # 408 is asked again at once.
        return JSONResponse({"type": "try_again", "request_id": entry.id, "queue_state": "active"}, 408)
    return Response(answer[0], media_type=answer[1])


POST: Handlers = {
    "create_sampling_session": create_sampling_session,
    "asample": asample,
    "retrieve_future": retrieve_future,
}
GET: Handlers = {"samplers/{id}": sampler}
