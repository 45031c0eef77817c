"""Requests of training clients, which number them: each is stored, queued, and answered with a future."""

import json
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve import wire
from isoloss.tools.serve.front import requests
from isoloss.tools.serve.front.http import Handler, Handlers, body_of
from isoloss.tools.serve.front.state import State, metadata_of


async def create_model(state: State, request: Request, owner: str) -> Response:
    raw = await body_of(state, request)
    asked = requests.read(requests.CreateModel, raw)
    session = state.session(asked.session_id, owner)
    state.check_base(asked.base_model)
    model = f"{session}:train:{asked.model_seq_id}"
    _new_model(state, model, session, owner, asked.lora_config or requests.Lora(), asked.user_metadata)
    return _future(state, model, 0, owner, "create_model", raw)


def _new_model(
    state: State, model: str, session: str, owner: str, lora: requests.Lora, metadata: Mapping[str, Any] | None
) -> None:
    """Note a training client, unless a repeated request asks for it. Raises Refused, UserError."""
    if state.journal.row("models", id=model) is not None:
        return
    serve = state.config.serve
    if not 1 <= lora.rank <= serve.max_lora_rank:
        line = f"lora_config: rank={lora.rank} must be a number from 1 to {serve.max_lora_rank} (serve.max_lora_rank)"
        raise requests.Refused(400, line)
    facts = {**lora.model_dump(exclude={"type"}), "targets": lora.targets(), "user_metadata": metadata}
    if len(state.journal.rows("models", dropped=0)) >= serve.max_models:
        raise requests.Refused(400, f"{serve.max_models} training clients exist already (serve.max_models)")
    state.journal.insert("models", id=model, session=session, owner=owner, made=time.time(), facts=json.dumps(facts))
    state.order.start(model, 0)


async def get_info(state: State, request: Request, owner: str) -> Response:
    asked = requests.read(requests.GetInfo, await body_of(state, request))
    row = state.model(asked.model_id, owner)
    name = state.config.name
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": row["id"],
            "model_name": name,
            "is_lora": True,
            "lora_rank": metadata_of(row)["rank"],
            "model_data": {"arch": state.facts.get("arch"), "model_name": name, "tokenizer_id": name},
        }
    )


async def forward_backward(state: State, request: Request, owner: str) -> Response:
    raw, encoding = await body_of(state, request), request.headers.get("content-encoding")
    asked = wire.read_forward_backward(raw, encoding, state.limits)
    state.model(asked.model_id, owner)
    if asked.seq_id is None:
        raise requests.Refused(400, "seq_id is missing: the requests of a training client are numbered from 1")
    return _future(state, asked.model_id, asked.seq_id, owner, "forward_backward", raw, encoding)


def _numbered(kind: str) -> Handler:
    """Return the handler of a request that a training client numbers."""

    async def handler(state: State, request: Request, owner: str) -> Response:
        return _in_turn(state, await body_of(state, request), owner, kind)

    return handler


def _in_turn(state: State, raw: bytes, owner: str, kind: str) -> Response:
    """Return the future of a request that a training client numbers.

    One with a fault gets a future as well, which fails: a number without a request would hold all later ones.
    """
    body = requests.fields(raw)
    model, seq = state.model(body.get("model_id"), owner)["id"], body.get("seq_id")
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 1:
        raise UserError(f"seq_id={seq!r} must be a whole number: requests of a training client are numbered from 1")
    return _future(state, model, seq, owner, kind, raw)


async def load_weights(state: State, request: Request, owner: str) -> Response:
    raw = await body_of(state, request)
    body = requests.fields(raw)
    row = state.owned("checkpoints", "path", "path", body.get("path"), owner)
    if body.get("model_id") is not None:
        return _in_turn(state, raw, owner, "load_weights")
    asked = requests.read(requests.LoadWeights, raw)
    session = state.session(asked.session_id, owner)
    facts = state.journal.facts("models", id=row["model"])
    model = f"{session}:train:{asked.model_seq_id}"
    lora = requests.Lora(**{name: facts[name] for name in requests.Lora.model_fields if name != "type"})
    metadata = facts["user_metadata"] if asked.user_metadata is None else asked.user_metadata
    _new_model(state, model, session, owner, lora, metadata)
    return _future(state, model, 0, owner, "load_weights", raw)


def _future(
    state: State, lane: str, seq: int, owner: str, kind: str, raw: bytes, encoding: str | None = None
) -> Response:
    return JSONResponse({"request_id": state.submit(owner, lane, seq, kind, raw, encoding), "model_id": lane})


POST: Handlers = {
    "create_model": create_model,
    "get_info": get_info,
    "forward_backward": forward_backward,
    "optim_step": _numbered("optim_step"),
    "save_weights": _numbered("save_weights"),
    "save_weights_for_sampler": _numbered("save_weights_for_sampler"),
    "load_weights": load_weights,
}
