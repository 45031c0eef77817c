"""Show what the owner of a key has on the server: the page at `/`.

A browser sends no header of its own, so the key comes by a form and stays in a cookie that scripts cannot read.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from isoloss.tools.serve.front import keys
from isoloss.tools.serve.front.dispatch import Dispatcher
from isoloss.tools.serve.front.http import body_of
from isoloss.tools.serve.front.requests import Refused
from isoloss.tools.serve.front.state import State, metadata_of

COOKIE = "isoloss_key"
MOST_ROWS = 50  # of a table, newest first
WIDTH, HEIGHT = 160, 36  # of a curve, in pixels
TEMPLATE = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
    Path(__file__).with_name("page.html").read_text(encoding="utf-8")
)


def route_of(state: State, dispatcher: Dispatcher) -> Route:
    """Return the route of the page."""

    async def page(request: Request) -> Response:
        key, wrong = request.cookies.get(COOKIE, ""), False
        if request.method == "POST":
            try:
                (key,) = parse_qs((await body_of(state, request)).decode("utf-8", "replace")).get("key", [""])[:1]
            except Refused as refused:
                return Response(refused.line, refused.status)
            if keys.owner_of(key, state.keys) is not None:
                answer = RedirectResponse("/", 303)
                answer.set_cookie(COOKIE, key, httponly=True, samesite="strict")
                return answer
            wrong = True
        owner = keys.owner_of(key, state.keys)
        facts = {"owner": owner, "name": state.config.name, "key_file": state.folder / "api_key", "wrong": wrong}
        if owner is not None:
            facts |= _of_owner(state, dispatcher, owner)
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'"}
        return HTMLResponse(TEMPLATE.render(facts), 200 if owner else 401, headers)

    return Route("/", page, methods=["GET", "POST"])


def _of_owner(state: State, dispatcher: Dispatcher, owner: str) -> dict[str, Any]:
    journal = state.journal
    newest = lambda table: journal.rows(table, owner=owner)[: -MOST_ROWS - 1 : -1]
    return {
        "state": f"Ready, in {state.config.train.precision}" if state.facts else "The model is loaded",
        "waiting": len(state.order),
        "running": dispatcher.completions,
        "versions": len(state.loaded) - 1,
        "models": [_model(state, row) for row in newest("models")],
        "sessions": [
            {
                "id": row["id"],
                "made": shown(row["made"]),
                "seen": shown(row["seen"]),
                "state": f"over: {row['finished']}" if row["over"] else "open",
            }
            for row in newest("sessions")
        ],
        "checkpoints": [
            {
                "path": row["path"],
                "size": f"{row['size'] / 1e6:.1f}",
                "made": shown(row["made"]),
                "expires": shown(row["expires"]) if row["expires"] else "never",
            }
            for row in newest("checkpoints")
        ],
    }


def _model(state: State, row: dict[str, Any]) -> dict[str, Any]:
    losses = [each["loss"] for each in state.journal.rows("losses", model=row["id"])]
    facts = metadata_of(row)
    return {
        "id": row["id"],
        "over": bool(row["dropped"]),
        "rank": facts["rank"],
        "targets": ", ".join(facts["targets"]),
        "steps": len(losses),
        "last": f"{losses[-1]:.4g}" if losses else "",
        "points": curve(losses),
        "seen": shown(state.journal.last_request(row["id"]) or row["made"]),
    }


def shown(seconds: float) -> str:
    """Return a time of day, with its date."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def curve(values: Sequence[float]) -> str:
    """Return the points of a line through values, for SVG; empty for fewer than two. At most one point a pixel."""
    values = values[:: max(1, len(values) // WIDTH)]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    step, scale = (WIDTH - 4) / (len(values) - 1), (HEIGHT - 4) / ((high - low) or 1)
    return " ".join(f"{2 + k * step:.1f},{HEIGHT - 2 - (value - low) * scale:.1f}" for k, value in enumerate(values))
