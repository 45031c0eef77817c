"""Sessions of agents, from their first call of the model to their rewards. On rank 0.

One thread takes what agents ask and what the model answers, one event after another, so that a session needs no lock.
"""

import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

from isoloss.engine.rl.agents.dialogue import Dialogue, Exchange
from isoloss.engine.rl.agents.pool import AgentPool, AgentWorker
from isoloss.engine.rl.agents.session import Session
from isoloss.engine.rl.trajectory import Completion, Prompt, Request, Trajectory
from isoloss.parallel.runtime.errors import UserError

# Takes {message, finish, completion, read}, {over: reason} or {refused: reason}.
Reply = Callable[[dict[str, Any]], None]
GRACE_SECONDS = 5.0  # for an agent that is cancelled, before its process is killed


@dataclass(frozen=True)
class Limits:
    """The most that a session may have.

    turns: calls of the model. tokens: tokens that the model makes. reply: tokens of one reply.
    context: tokens of a call, prompt and reply. timeout: seconds between two calls.
    retries: further tries after a fault. concurrency: sessions in progress.
    """

    turns: int
    tokens: int
    reply: int
    context: int
    timeout: float
    retries: int
    concurrency: int


class Owner(Protocol):
    """Begins sessions and has their requests answered. Its methods are called from the thread of `Agents`."""

    def request(self, request: Request, max_new_tokens: int) -> None:
        """Have a request answered; the answer comes to `Agents.answered`."""

    def withdraw(self, name: str) -> None:
        """Forget a request that nobody waits for any more."""

    def ended(self, trajectory: Trajectory) -> None:
        """Take the result of a session."""

    def failed(self, error: Exception) -> None:
        """End with an error that no session can mend."""


@dataclass(eq=False)
class Running:
    """A session in progress.

    worker: the process of its present try; None before it has begun.
    waiting: for each request in flight, what takes its reply; several where a client asked again before it came.
    deadline: when the agent is to have called or ended, by time.monotonic; infinite while the model has a call of it.
    cancelled: whether its time has ended it. over: whether a call of it was refused at a limit.
    key: key of the endpoint for the present try.
    """

    session: Session
    owner: Owner
    worker: AgentWorker | None = None
    waiting: dict[str, list[Reply]] = field(default_factory=dict)
    deadline: float = float("inf")
    cancelled: bool = False
    over: bool = False
    key: str = ""


class Agents:
    """The agents of environment.program and what they say.

    seed: with the id of a session the seed of its random numbers.
    url: base URL of the endpoint that has calls of clients answered by `chat`; None without one.
    """

    def __init__(self, pool: AgentPool, dialogue: Dialogue, limits: Limits, seed: int, url: str | None = None):
        self.url = url
        self._pool, self._dialogue, self._limits, self._seed = pool, dialogue, limits, seed
        self._running: dict[str, Running] = {}
        self._queued: list[Running] = []
        self._of_request: dict[str, Running] = {}
        self._of_key: dict[str, Running] = {}
        self._owners: set[Owner] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="sessions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sessions and their processes; twice does no harm."""
        if not self._closed:
            self._closed = True
            self._do(lambda: None)
            self._thread.join()
            self._pool.close()

    def begin(self, id: str, prompt: Prompt, owner: Owner, record: Mapping[str, tuple[Any, Completion]]) -> None:
        """Begin a session. record: by the names of requests, what was read and the answer, from an earlier session of
        this id; for as long as the agent asks the same it is answered from there. From any thread."""
        prompts = {name: tokens for name, (tokens, _) in record.items()}
        session = Session(id, prompt, {name: answer for name, (_, answer) in record.items()}, prompts)
        self._do(lambda: self._enqueue(Running(session, owner)))

    def chat(self, key: str, asked: Mapping[str, Any], again: bool) -> Future[dict[str, Any]]:
        """Return the future reply to a call of the model, {messages, tools, max_tokens}: see `Reply`; {unknown: reason}
        where no session has this key. again: the client asks once more for an answer that it lost. From any thread."""
        answer: Future[dict[str, Any]] = Future()
        self._do(lambda: self._chat(key, asked, again, answer.set_result))
        return answer

    def record(self, id: str) -> dict[str, tuple[Sequence[int], Completion]]:
        """Return the record of a session in progress; {} where there is none. From any thread."""
        running = self._running.get(id)
        if running is None:
            return {}
        prompts = running.session.prompts
        return {name: (prompts[name], answer) for name, answer in dict(running.session.record).items()}

    def answered(self, completion: Completion) -> None:
        """Take a completion that a request of `Owner.request` has got. From any thread."""
        self._do(lambda: self._answer(completion))

    def _do(self, work: Callable[[], None]) -> None:
        self._pool.events.put((None, work))

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed:
            soonest = min((each.deadline for each in self._running.values()), default=float("inf"))
            event = self._next(None if soonest == float("inf") else max(0.0, soonest - time.monotonic()))
            try:
                self._overdue() if event is None else self._event(*event)
            except Exception as error:  # the run is to hear of it, not this thread alone
                for owner in {*self._owners}:
                    owner.failed(error)
                return

    def _next(self, seconds: float | None) -> tuple[AgentWorker | None, Any] | None:
        try:
            return self._pool.events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _event(self, worker: AgentWorker | None, event: Any) -> None:
        if worker is None:
            event()
        elif event is None:
            if worker in self._pool.workers:
                self._lost(worker, self._pool.replace(worker))
        else:
            running = self._running.get(event["session"])
            if running is None or running.worker is not worker:
                return  # of a try that was given up
            if "call" in event:
                self._call(running, event, self._to_worker(running, event["call"]))
            else:
                worker.sessions.discard(running.session.id)
                if "fault" in event:
                    self._fault(running, event["fault"])
                elif "cancelled" in event:
                    self._out_of_time(running)
                elif wrong := wrong_turn(event["end"], len(running.session.calls)):
                    self._fault(running, wrong)
                else:
                    self._end(running, event["end"], None)

    def _enqueue(self, running: Running) -> None:
        self._owners.add(running.owner)
        self._queued.append(running)
        self._begin_queued()

    def _begin_queued(self) -> None:
        # By owner: those of the training keep their places while an evaluation has the model.
        in_progress = Counter(id(running.owner) for running in self._running.values())
        waiting, self._queued = self._queued, []
        for running in waiting:
            if in_progress[id(running.owner)] < self._limits.concurrency:
                in_progress[id(running.owner)] += 1
                self._running[running.session.id] = running
                self._begin(running)
            else:
                self._queued.append(running)

    def _begin(self, running: Running) -> None:
        session = running.session
        session.begin()
        running.cancelled = running.over = False
        running.deadline = time.monotonic() + self._limits.timeout
        self._of_key.pop(running.key, None)  # a client of a try that was given up is not heard any more
        running.key = secrets.token_urlsafe(24)
        self._of_key[running.key] = running
        seed = int.from_bytes(sha256(f"{self._seed}/{session.id}".encode()).digest()[:4], "big")
        running.worker = self._pool.begin(session.id, row_of(session.prompt), seed, self.url, running.key)

    def _to_worker(self, running: Running, call: int) -> Reply:
        worker, id = running.worker, running.session.id
        assert worker is not None

        def reply(answer: dict[str, Any]) -> None:
            plain = {name: value for name, value in answer.items() if name not in ("completion", "read")}
            worker.send({"reply": id, "call": call, "answer": plain})

        return reply

    def _chat(self, key: str, asked: Mapping[str, Any], again: bool, reply: Reply) -> None:
        running = self._of_key.get(key)
        if running is None:
            reply({"unknown": "the key belongs to no session"})
        else:
            self._call(running, asked, reply, again)

    def _call(self, running: Running, event: Mapping[str, Any], reply: Reply, again: bool = False) -> None:
        """Take a call of the model. again: a client asks for the answer of its last equal call, which it lost."""
        session, limits = running.session, self._limits
        left = min(limits.reply, limits.tokens - session.tokens)
        if event["max_tokens"] is not None:
            left = min(left, event["max_tokens"])
        if again and self._asked_before(running, event, reply):
            return
        if len(session.calls) >= limits.turns or left < 1:
            which = "agent.max_turns" if len(session.calls) >= limits.turns else "agent.max_tokens"
            self._over(running, f"{which} is reached", reply)
            return
        try:
            normal, tokens = self._dialogue.prompt(event["messages"], event["tools"], session.replies, session.counts)
        except UserError as error:
            self._reply(running, {"refused": str(error)}, [reply])
            return
        left = min(left, limits.context - len(tokens))
        if left < 1:
            self._over(running, "the context is full", reply)
            return
        request = session.ask(normal, event["tools"], tokens, (event["messages"], event["tools"])).request
        running.waiting[request.id] = [reply]
        running.deadline = float("inf")
        if request.id in session.record:
            self._answer_call(running, session.record[request.id])
        elif request.id not in self._of_request:  # else a try that was given up has asked the same
            self._of_request[request.id] = running
            running.owner.request(request, left)

    def _answer(self, completion: Completion) -> None:
        running = self._of_request.pop(completion.id, None)
        if running is not None:
            running.session.record[completion.id] = completion
            if completion.id in running.waiting:  # else of a try that was given up: a further one may ask the same
                self._answer_call(running, completion)

    def _answer_call(self, running: Running, completion: Completion) -> None:
        session, replies = running.session, running.waiting.pop(completion.id)
        number = session.number(completion.id)
        call = session.calls[number]
        read = call.request.prompt_tokens
        message = self._dialogue.reply(completion, read, call.tools, number)
        # The reply as the client will send it back, with the arguments as objects.
        whole = self._dialogue.normal_form([*call.messages, message], call.tools)
        tokens = (*read, *completion.tokens)
        session.exchanges[number] = Exchange(whole, tokens, completion.finish == "stop", message)
        self._reply(running, answer_of(message, completion, read), replies)

    def _over(self, running: Running, why: str, reply: Reply) -> None:
        running.over = True
        self._reply(running, {"over": why}, [reply])

    def _reply(self, running: Running, answer: dict[str, Any], replies: Sequence[Reply]) -> None:
        if not running.waiting:
            running.deadline = time.monotonic() + self._limits.timeout
        for reply in replies:
            reply(answer)

    def _asked_before(self, running: Running, event: Mapping[str, Any], reply: Reply) -> bool:
        """Give the answer of the last call of this try that asked the same, or have it given when it comes. Return
        whether there is such a call."""
        session = running.session
        found = session.last_equal(event["messages"], event["tools"])
        if found is None:
            return False
        request = session.calls[found].request
        if request.id in running.waiting:
            running.waiting[request.id].append(reply)
        else:
            answer = answer_of(session.exchanges[found].message, session.record[request.id], request.prompt_tokens)
            self._reply(running, answer, [reply])
        session.repeated += 1
        return True

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _end(self, running: Running, rewards: float | Sequence[Any] | None, error: str | None) -> None:
        del self._running[running.session.id]
        self._of_key.pop(running.key, None)
        for name in [name for name, each in self._of_request.items() if each is running]:
            del self._of_request[name]  # an agent may end while it waits; the answer is nobody's then
            running.owner.withdraw(name)
        running.owner.ended(running.session.trajectory(rewards, error))
        self._begin_queued()

    def _fault(self, running: Running, why: str) -> None:
        if running.over:  # the policy has used its turns or tokens up, and the agent did not expect it
            self._end(running, 0.0, None)
            return
        running.session.faults.append(why)
        running.waiting = {}
        if len(running.session.faults) <= self._limits.retries:
            self._begin(running)
        else:
            self._end(running, None, f"environment: {why}")

    def _lost(self, worker: AgentWorker, why: str) -> None:
        for id in sorted(worker.sessions):
            running = self._running.get(id)
            if running is not None and running.worker is worker:
                self._out_of_time(running) if running.cancelled else self._fault(running, why)

    def _out_of_time(self, running: Running) -> None:
        if running.session.exchanges:  # the policy can cause it
            self._end(running, 0.0, None)
        else:
            self._fault(running, f"no call of the model within agent.timeout={self._limits.timeout:g} seconds")

    def _overdue(self) -> None:
        now = time.monotonic()
        for running in [each for each in self._running.values() if each.deadline <= now]:
            worker = running.worker
            if worker is None or self._running.get(running.session.id) is not running or running.deadline > now:
                continue
            if not running.cancelled:
                running.cancelled, running.deadline = True, now + GRACE_SECONDS
                worker.send({"cancel": running.session.id})
            else:
                running.deadline = float("inf")
                why = "another session of its process did not end in time"
                self._pool.replace(worker)
                self._lost(worker, why)


def answer_of(message: dict[str, Any], completion: Completion, read: Sequence[int]) -> dict[str, Any]:
    return {"message": message, "finish": completion.finish, "completion": completion, "read": read}


def wrong_turn(rewards: Any, calls: int) -> str | None:
    """Return what is wrong with rewards of turns that a session does not have."""
    turns = [turn for turn, _ in rewards] if isinstance(rewards, list) else []
    wrong = [turn for turn in turns if not 0 <= turn < calls]
    return f"returned a reward of turn {wrong[0]}, and the session has {calls} turns, from 0 on" if wrong else None


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return what an agent gets of a row: id, prompt, answer, and its further columns."""
    text = prompt.prompt if isinstance(prompt.prompt, str) else [dict(message) for message in prompt.prompt]
    return {**prompt.extra, "id": prompt.id, "prompt": text, "answer": prompt.answer}
