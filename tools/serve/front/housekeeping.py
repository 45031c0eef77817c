"""Look after what time ends: clients that are gone, and checkpoints that expire."""

import asyncio
import shutil
import time

from isoloss.tools.serve.front import checkpoints
from isoloss.tools.serve.front.dispatch import Dispatcher
from isoloss.tools.serve.front.state import State

EVERY_SECONDS = 10.0
# A client sends a heartbeat every 10 s, and warns its user where none arrives for so long.
SILENT_SECONDS = 120.0


async def keep(state: State, dispatcher: Dispatcher) -> None:
    """Look after it, without end."""
    while True:
        await look(state, dispatcher, time.time())
        await asyncio.sleep(EVERY_SECONDS)


async def look(state: State, dispatcher: Dispatcher, now: float) -> None:
    """Do what is due: sampling of silent sessions ends, sessions that are over lose their training clients and
    versions, and expired checkpoints are deleted."""
    for row in state.journal.rows("checkpoints"):
        if row["expires"] is not None and row["expires"] <= now:
            checkpoints.remove(state, row)
    for row in state.journal.open_sessions():
        silent = now - max(row["seen"], state.started, state.heard.get(row["id"], 0.0))
        finished = row["finished"] and not state.journal.pending(row["id"])
        if finished or silent > state.config.serve.session_seconds:
            await end_session(state, dispatcher, row["id"], row["finished"] or "silent")
        elif silent > SILENT_SECONDS:
            dispatcher.withdraw({each["id"] for each in state.journal.rows("samplers", session=row["id"])})


async def end_session(state: State, dispatcher: Dispatcher, session: str, why: str) -> None:
    """Forget the training clients of a session, their states and their snapshots. Checkpoints stay."""
    journal = state.journal
    dispatcher.withdraw({row["id"] for row in journal.rows("samplers", session=session)})
    for model in journal.rows("models", session=session, dropped=0):
        journal.update("models", {"id": model["id"]}, dropped=1)
        await dispatcher.drop_model(model["id"])
        shutil.rmtree(state.folder_of("states", model["id"]), ignore_errors=True)
        for version in journal.rows("versions", model=model["id"]):
            if not version["version"].startswith("tinker://"):
                await dispatcher.drop_version(version["version"])
                shutil.rmtree(version["folder"] or "", ignore_errors=True)
                journal.delete("versions", version=version["version"])
    journal.end_session(session, why)
