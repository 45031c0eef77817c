"""Give HTTP handlers what all of them need: bodies within their limits, refusals in one line, the owner of a key."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve.front import keys
from isoloss.tools.serve.front.requests import Refused
from isoloss.tools.serve.front.state import State

# Of a request by the owner of a key.
Handler = Callable[[State, Request, str], Awaitable[Response]]
Handlers = dict[str, Handler]


def refusal(status: int, line: str) -> Response:
    """Return an answer with a body: the SDK takes an empty one for a proxy's fault, and asks again."""
    return JSONResponse({"detail": line}, status)


def route(state: State, method: str, path: str, handler: Handler) -> Route:
    """Return a route of the API, whose handler knows the owner; a refusal becomes a status and one line."""

    async def guarded(request: Request) -> Response:
        owner = keys.owner_of(request.headers.get("x-api-key", ""), state.keys)
        if owner is None:
            return refusal(401, "X-API-Key is none of this server's keys")
        try:
            return await handler(state, request, owner)
        except Refused as refused:
            return refusal(refused.status, refused.line)
        except UserError as mistake:
            return refusal(400, str(mistake))
        except ClientDisconnect:
            return Response(status_code=400)

    return Route(f"/api/v1/{path}", guarded, methods=[method])


async def body_of(state: State, request: Request) -> bytes:
    """Return the body of a request. Raises Refused for a longer one than serve.max_body_bytes."""
    parts, size, most = [], 0, state.config.serve.max_body_bytes
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refused(413, f"the body is longer than {most} bytes (serve.max_body_bytes)")
        parts.append(part)
    return b"".join(parts)
