"""The script that runs agents, by its path: python worker.py CONNECTION ANSWERS

It imports the standard library alone, and what the agent imports; `environment.python` may be another interpreter.

The parent sends JSON over CONNECTION, a line each: first {path, function}, then {begin: session, row, seed, url, key},
{reply: session, call, answer} and {cancel: session}. The worker writes lines of JSON on ANSWERS: {ready: null, or why
the function cannot be loaded}, then {session, call, messages, tools, max_tokens}, and for the end of a session
{session, end} with the rewards or {session, fault} with a reason. Each session has a thread and an event loop of its
own, so one that blocks keeps no other waiting.
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


def by_path(name: str, path: Path) -> Any:
    """Import a file of the standard library's imports alone: the package around it would bring torch."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


user_functions = by_path("user_functions", Path(__file__).parents[1] / "user_functions.py")
processes = by_path("processes", Path(__file__).parents[3] / "parallel" / "runtime" / "processes.py")


class Fault(Exception):
    """A fault of the world, not of the policy: the session is tried again, and it is never a reward."""


class Over(Exception):
    """The session has reached a limit of its turns, its tokens or its context: no further call is answered."""


class Session:
    """A run of an agent on a row.

    id: "row/draw/number". seed: an integer that follows from the id and the run's seed, for all that is random.
    url, key: base URL and key for a client of OpenAI's API, with environment.endpoint=true.
    calls: number of calls of `chat` so far. finish: how the last reply ended, "stop" or "length".
    """

    Fault, Over = Fault, Over

    def __init__(self, id: str, seed: int, url: str | None, key: str, send: Callable[[Any], None]):
        self.id, self.seed, self.url, self.key, self.calls, self.finish = id, seed, url, key, 0, ""
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
        return {"end": rewards(asyncio.run(session.run(agent, row)))}
    except Over:
        return {"end": 0.0}
    except asyncio.CancelledError:
        return {"cancelled": True}
    except Fault as fault:
        return {"fault": str(fault) or "Fault"}
    except Exception as error:  # whatever it is, it says nothing about the policy
        return {"fault": user_functions.reason(error)}


def rewards(value: Any) -> Any:
    """Return a finite number, or a list of [turn, number]; raise Fault for anything else."""
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            events = [[int(turn), float(number)] for turn, number in value]
            if all(math.isfinite(number) for _, number in events):
                return events
        elif not isinstance(value, str | bytes) and math.isfinite(float(value)):
            return float(value)
    except (TypeError, ValueError):
        pass
    text = repr(value)
    raise Fault(
        f"returned {text if len(text) <= 60 else text[:60] + '...'}: return a finite number, or a list of (turn, "
        "number)"
    )


def of_command(command: str) -> Callable[..., Any]:
    """Return an agent that runs a command of a shell. It finds the row as JSON in ROW, calls the model by
    OPENAI_BASE_URL and OPENAI_API_KEY, and writes the reward, or a list of [turn, number], as its last line. It is
    ended with all that it has started when its session is."""

    async def agent(session: Session, row: Any) -> Any:
        variables = {"OPENAI_BASE_URL": session.url, "OPENAI_API_KEY": session.key, "SEED": str(session.seed)}
        read, write = os.pipe()
        try:
            env = {**os.environ, **variables, "ROW": json.dumps(row)}
            process = processes.Helper(["/bin/sh", "-c", command], stdout=write, env=env)
        except OSError as error:  # such as a row that is too long
            os.close(read)
            raise Fault(f"the command cannot be started: {error}") from None
        finally:
            os.close(write)
        try:
            with os.fdopen(read, "rb") as output:
                said = await asyncio.get_running_loop().run_in_executor(None, output.read)
                status = await asyncio.get_running_loop().run_in_executor(None, process.wait)
        finally:
            process.kill()
        lines = said.decode(errors="replace").strip().splitlines() or [""]
        if status:
            raise Fault(f"the command ended with status {status}: {lines[-1][:200]}")
        try:
            return json.loads(lines[-1])
        except ValueError:
            raise Fault(f"the command's last line is no reward: {lines[-1][:60]!r}") from None

    return agent


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
        program = first["function"]
        agent = of_command(program[8:]) if program.startswith("command:") else user_functions.load(program)
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
            session = sessions[message["begin"]] = Session(
                message["begin"], message["seed"], message["url"], message["key"], send
            )
            threading.Thread(target=work, args=(session, message["row"]), daemon=True).start()
        elif "reply" in message and message["reply"] in sessions:
            sessions[message["reply"]].deliver(message["call"], message["answer"])
        elif "cancel" in message and message["cancel"] in sessions:
            sessions[message["cancel"]].cancel()


if __name__ == "__main__":
    main()
    os._exit(0)  # with threads of sessions, which nobody hears any more
