"""Routes in SGLang's requests and replies (0.5.23; servers started with --enable-return-routed-experts).

`routed_experts` is base64 of int32 [length - 1 - start, layers, experts of a token]. Dense layers have rows too, shared
experts have none, and the last token was never read. Rows are read when the request ends, from a buffer by cache slot.
Those of a prefix that was cached are of the pass that filled it.
"""

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from isoloss.engine.rl.backends.servers.server import ServerLost
from isoloss.engine.rl.routes import known_rows
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

OPTION = "--enable-return-routed-experts"


def routes_request(request: Request, sampling: Sampling, context: int) -> dict[str, Any]:
    """Return what a request asks of routes: rows from the first one on that is not known, which is of a token of the
    `context` tokens that it sends."""
    if sampling.routes is None:
        return {}
    return {"return_routed_experts": True, "routed_experts_start_len": _start(request, context)}


def with_routes(
    completion: Completion, reply: Mapping[str, Any], request: Request, context: int, sampling: Sampling
) -> Completion:
    """Return the completion with the routes of a reply. An aborted one may come without, or with fewer rows.

    context: number of tokens of prompt and completion that the request sent.
    Raises UserError where the server sends no routes, or those of another model; ServerLost where they are damaged.
    """
    form, told = sampling.routes, reply["meta_info"].get("routed_experts")
    if form is None:
        return completion
    aborted, total, start = completion.finish == "abort", context + len(completion.tokens), _start(request, context)
    if told is None and aborted:
        return completion
    if told is None:
        raise UserError(
            f"rollout.routing_replay=true, and a server answered {request.id} without routed_experts: start the "
            f"servers with {OPTION}, or set it to false"
        )
    try:
        flat = np.frombuffer(base64.b64decode(told, validate=True), dtype="<i4")
    except (ValueError, TypeError) as error:
        raise ServerLost(f"routed_experts that cannot be read: {error}") from None
    if len(flat) % (form.layers * form.chosen):
        raise UserError(
            f"rollout.routing_replay=true, and a server answered {request.id} with {len(flat)} routed experts, which "
            f"are no rows of {form.layers} layers x {form.chosen} experts: it serves another model than the trainer's"
        )
    rows = flat.reshape(-1, form.layers, form.chosen)[:, list(form.sparse)]
    expected = max(total - 1 - start, 0)
    if len(rows) != expected and not aborted:
        raise ServerLost(f"routed_experts of {len(rows)} tokens where {expected} were read")
    rows = rows[:expected]
    if rows.size and not (rows.min() >= 0 and rows.max() < form.experts):
        raise ServerLost(f"routed experts from {rows.min()} to {rows.max()}, of {form.experts} experts")
    routes = form.unknown(total)
    routes[start : start + len(rows)] = rows
    return replace(completion, routes=routes)


def _start(request: Request, context: int) -> int:
    return min(known_rows(request.partial.routes) if request.partial else 0, context)
