"""Let clients download adapters as PEFT's folder, by addresses that the server has signed and that expire."""

import time
from collections.abc import Sequence
from pathlib import Path

from pyrage import RecipientError, encrypt_file, x25519  # pyright: ignore[reportAttributeAccessIssue]
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve.front import keys
from isoloss.tools.serve.front.checkpoints import moment
from isoloss.tools.serve.front.http import Handlers, refusal
from isoloss.tools.serve.front.state import State

SECONDS = 3600  # for which an address is good
SUFFIX = ".age"


def encrypt(folder: Path, recipients: Sequence[str]) -> None:
    """Encrypt the files of a folder for recipients of age, NAME to NAME.age; none: leave them. Raises UserError."""
    try:
        public = [x25519.Recipient.from_str(each) for each in recipients]
    except RecipientError as error:
        raise UserError(f"age_encryption_recipients: {error}") from None
    for file in [*folder.rglob("*")] if public else ():
        if file.is_file():
            encrypt_file(str(file), f"{file}{SUFFIX}", public)
            file.unlink()


async def urls(state: State, request: Request, owner: str) -> Response:
    parts = request.path_params
    path = f"tinker://{parts['run']}/external_weights/{parts['name']}"
    row = state.owned("checkpoints", "path", "path", path, owner)
    expires, folder = int(time.time()) + SECONDS, Path(row["folder"])
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            signed = keys.signature(state.folder, f"{row['request']} {name} {expires}")
            found[name] = f"{request.base_url}external/{row['request']}/{expires}/{signed}/{name}"
    return JSONResponse({"urls": found, "expires": moment(expires)})


def route_of(state: State) -> Route:
    """Return the route of signed addresses, which need no key."""

    async def download(request: Request) -> Response:
        id, expires, signed, name = (request.path_params[part] for part in ("id", "expires", "signed", "name"))
        row = state.journal.row("checkpoints", request=id)
        good = keys.owner_of(signed, (keys.signature(state.folder, f"{id} {name} {expires}"),)) is not None
        if row is None or not good or time.time() > int(expires):
            return refusal(403, "this address is none of the server's, or has expired: ask for another")
        return FileResponse(Path(row["folder"]) / name)

    return Route("/external/{id}/{expires:int}/{signed}/{name:path}", download)


GET: Handlers = {"training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls": urls}
