"""The script that runs agents, by its path: python worker.py CONNECTION ANSWERS

It imports the standard library alone, and what the agent imports; `environment.python` may be another interpreter.

The parent sends JSON over CONNECTION, a line each: first {path, function}, then {begin: session, row, seed}, {reply:
session, call, message} and {cancel: session}. The worker writes lines of JSON on ANSWERS: {ready: null, or why the
function cannot be loaded}, then {session, call, messages, tools, max_tokens}, and for the end of a session {session,
end} with the rewards or {session, fault} with a reason. Each session has a thread and an event loop of its own, so one
that blocks keeps no other waiting.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("user_functions", Path(__file__).parents[1] / "user_functions.py")
assert _spec is not None and _spec.loader is not None
user_functions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(user_functions)


class Fault(Exception):
    """A fault of the world, not of the policy: the session is tried again, and it is never a reward."""


class Over(Exception):
    """The session has reached a limit of its turns, its tokens or its context: no further call is answered."""


class Session:
    """A run of an agent on a row.

    id: "row/draw/number". seed: an integer that follows from the id and the run's seed, for all that is random.
    calls: number of calls of the model so far. finish: how the last reply ended, "stop" or "length".
    """

    Fault, Over = Fault, Over

    def __init__(self, id: str, seed: int, send: Callable[[Any], None]):
        self.id, self.seed, self.calls, self.finish = id, seed, 0, ""
        self._send, self._waiting = send, dict[int, Future[Any]]()
        self._task: Any = None
        self._loop: Any = None

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """Return the model's next message, {role, content} and, where it called tools, {tool_calls}.

        messages: the whole conversation, in OpenAI's form. tools: JSON schemas of functions.
        max_tokens: most tokens of the reply; None: rollout.max_new_tokens.
        Raises Over at a limit of the session, and ValueError for messages that the chat template refuses.
        """
        call, answer = self.calls, Future[Any]()
        self.calls += 1
        self._waiting[call] = answer
        asked = {"messages": list(messages), "tools": tools, "max_tokens": max_tokens}
        self._send({"session": self.id, "call": call, **asked})
        reply = await asyncio.wrap_future(answer)
        if "over" in reply:
            raise Over(reply["over"])
        if "refused" in reply:
            raise ValueError(reply["refused"])
        self.finish = reply["finish"]
        return reply["message"]

    def deliver(self, call: int, reply: Any) -> None:
        answer = self._waiting.pop(call)
        if answer.set_running_or_notify_cancel():  # else the agent does not wait for it any more
            answer.set_result(reply)

    def cancel(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def run(self, agent: Callable[..., Any], row: Any) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        result = agent(self, row)
        return await result if inspect.isawaitable(result) else result


def ended(session: Session, agent: Callable[..., Any], row: Any) -> dict[str, Any]:
    """Run a session; return how it ended."""
    try:
        return {"end": rewards(asyncio.run(session.run(agent, row)), session.calls)}
    except Over:
        return {"end": 0.0}
    except asyncio.CancelledError:
        return {"cancelled": True}
    except Fault as fault:
        return {"fault": str(fault) or "Fault"}
    except Exception as error:  # whatever it is, it says nothing about the policy
        return {"fault": user_functions.reason(error)}


def rewards(value: Any, calls: int) -> Any:
    """Return a finite number, or a list of [turn, number]; raise Fault for anything else."""
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            events = [[int(turn), float(number)] for turn, number in value]
            if all(0 <= turn < calls and math.isfinite(number) for turn, number in events):
                return events
        elif not isinstance(value, str | bytes) and math.isfinite(float(value)):
            return float(value)
    except (TypeError, ValueError):
        pass
    text = repr(value)
    raise Fault(
        f"returned {text if len(text) <= 60 else text[:60] + '...'}: return a finite number, or a list of (turn, "
        f"number) with turns from 0 to {calls - 1}"
    )


def main() -> None:
    connection, answers = os.fdopen(int(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(answers, False)
    lock, sessions = threading.Lock(), dict[str, Session]()

    def send(message: Any) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        with lock:
            while line:
                line = line[os.write(answers, line) :]

    first = json.loads(connection.readline())
    sys.path[:] = first["path"] or sys.path
    try:
        agent = user_functions.load(first["function"])
    except user_functions.NotFoundError as error:
        send({"ready": str(error)})
        return
    send({"ready": None})

    def work(session: Session, row: Any) -> None:
        end = ended(session, agent, row)
        del sessions[session.id]
        send({"session": session.id, **end})

    for line in connection:  # ends when the parent has gone
        message = json.loads(line)
        if "begin" in message:
            session = sessions[message["begin"]] = Session(message["begin"], message["seed"], send)
            threading.Thread(target=work, args=(session, message["row"]), daemon=True).start()
        elif "reply" in message and message["reply"] in sessions:
            sessions[message["reply"]].deliver(message["call"], message["answer"])
        elif "cancel" in message and message["cancel"] in sessions:
            sessions[message["cancel"]].cancel()


if __name__ == "__main__":
    main()
    os._exit(0)  # with threads of sessions, which nobody hears any more
