"""The front's HTTP server."""

import asyncio

import uvicorn
from starlette.applications import Starlette

from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front import checkpoints, housekeeping, page, sampling, sessions, training
from isoloss.tools.serve.front.dispatch import Dispatcher
from isoloss.tools.serve.front.http import route
from isoloss.tools.serve.front.link import Link
from isoloss.tools.serve.front.state import State

HANDLERS = {
    "POST": {**sessions.POST, **training.POST, **sampling.POST, **checkpoints.POST},
    "GET": {**sessions.GET, **sampling.GET, **checkpoints.GET},
    "PUT": checkpoints.PUT,
    "DELETE": checkpoints.DELETE,
}


def app_of(state: State, dispatcher: Dispatcher) -> Starlette:
    """Return the application with every path of the API, and the page."""
    routes = [
        route(state, method, path, handler)
        for method, handlers in HANDLERS.items()
        for path, handler in handlers.items()
    ]
    return Starlette(routes=[page.route_of(state, dispatcher), *routes])


async def serve(config: ServeConfig, address: str) -> None:
    """Serve until the ranks end or the process is killed. address: path of the socket to the ranks."""
    state = State(config, Link(address))
    state.recover()
    dispatcher = Dispatcher(state)
    settings = uvicorn.Config(
        app_of(state, dispatcher), host=config.serve.host, port=config.serve.port, log_level="warning", access_log=False
    )
    tasks = [
        asyncio.create_task(each)
        for each in (dispatcher.run(), housekeeping.keep(state, dispatcher), uvicorn.Server(settings).serve())
    ]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
