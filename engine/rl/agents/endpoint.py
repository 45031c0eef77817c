"""A server of OpenAI's chat completions on rank 0, for programs that know no other way to a model.

Each session has a key, which names it. starlette and uvicorn serve: isoloss-serve needs them already, they are small,
and they read HTTP, which is not to be written once more here.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

START_SECONDS = 60.0
MOST_BYTES = 64 << 20  # of a body
MODEL = "policy"
# Fields that decide nothing here, and fields with the values that change nothing.
IGNORED = {
    "model",
    "user",
    "store",
    "metadata",
    "stream_options",
    "parallel_tool_calls",
    "service_tier",
    "safety_identifier",
}
READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "stream", "return_token_ids", "logprobs"}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "top_logprobs": (0,),
}


class Refused(Exception):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: int, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """The server, in a thread of its own, on a free port of this machine.

    chat: `Agents.chat`, set once there are sessions.
    temperature: the run's, which a client may name and not change.
    """

    def __init__(self, temperature: float):
        self.chat: Callable[[str, Mapping[str, Any], bool], Future[dict[str, Any]]] = nobody
        self._temperature = temperature
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={Refused: refusal})
        settings = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._socket])), name="endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server; open connections are closed. Twice does no harm."""
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "isoloss"}]})

    async def _completions(self, request: Request) -> Response:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refused(401, "no key: send the session's as Authorization: Bearer KEY", "invalid_api_key")
        body = await body_of(request)
        check(body, self._temperature)
        asked = {
            "messages": body["messages"],
            "tools": body.get("tools"),
            "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens"),
        }
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        answer = await asyncio.wrap_future(self.chat(key, asked, again))
        if "unknown" in answer:
            raise Refused(401, answer["unknown"], "invalid_api_key")
        if "over" in answer:
            raise Refused(400, answer["over"], "session_over")
        if "refused" in answer:
            raise Refused(400, answer["refused"])
        made = completion_of(answer, body)
        return streamed(made, body) if body.get("stream") else JSONResponse(made)


def nobody(key: str, asked: Mapping[str, Any], again: bool) -> Future[dict[str, Any]]:
    """Answer before there are sessions."""
    answer: Future[dict[str, Any]] = Future()
    answer.set_result({"unknown": "there are no sessions yet"})
    return answer


async def refusal(request: Request, error: Exception) -> Response:
    """Return an error in OpenAI's form. Statuses are those that its client does not try again."""
    assert isinstance(error, Refused)
    body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
    return JSONResponse({"error": body}, error.status)


async def body_of(request: Request) -> dict[str, Any]:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_BYTES:
            raise Refused(413, f"the body has more than {MOST_BYTES} bytes")
        pieces.append(piece)
    try:
        body = json.loads(b"".join(pieces))
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise Refused(400, "the body must be an object with `messages`, a list")
    return body


def check(body: Mapping[str, Any], temperature: float) -> None:
    """Raise Refused for what would not be obeyed: training samples from the whole distribution of the policy."""
    for name, value in body.items():
        if value is None or name in IGNORED | READ:
            continue
        if name == "temperature":
            if value != temperature:
                raise Refused(400, f"temperature={value}: the run samples at rollout.temperature={temperature}")
        elif name not in NEUTRAL:
            raise Refused(400, f"{name} is not known here: take it out")
        elif value not in NEUTRAL[name]:
            raise Refused(400, f"{name}={value!r} would bias what is trained on: take it out")
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(400, f"{name}={value!r} must be at least 1")


def completion_of(answer: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    message, completion, read = answer["message"], answer["completion"], answer["read"]
    finish = "tool_calls" if message.get("tool_calls") else answer["finish"]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if body.get("logprobs"):
        entries = zip(completion.tokens, completion.logprobs)
        content = [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in entries]
        choice["logprobs"] = {"content": content, "refusal": None}
    made = {
        "id": completion.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(read),
            "completion_tokens": len(completion.tokens),
            "total_tokens": len(read) + len(completion.tokens),
        },
    }
    if body.get("return_token_ids"):
        made["prompt_token_ids"] = list(read)
        choice["token_ids"] = list(completion.tokens)
    return made


def streamed(made: dict[str, Any], body: Mapping[str, Any]) -> Response:
    """Return a completion as a stream of server-sent events: one piece, and its end."""
    (choice,) = made["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    whole = {name: made[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    first = {"index": 0, "delta": message, "finish_reason": None, "logprobs": choice["logprobs"]}
    events = [
        whole | {"choices": [first]},
        whole | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(whole | {"choices": [], "usage": made["usage"]})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return Response(text, media_type="text/event-stream")
