"""The record of a session: what the model read and made, and what came of it."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isoloss.engine.rl.agents.dialogue import Exchange, Message
from isoloss.engine.rl.trajectory import Completion, Prompt, Request, Trajectory, Turn


@dataclass(frozen=True)
class Call:
    """A call of the model. messages: in their normal form. given: messages and tools as they came."""

    request: Request
    messages: list[Message]
    tools: Any
    given: tuple[Any, Any]


@dataclass
class Session:
    """A run of an agent on a prompt, through all its tries.

    A request is named by the session, what it reads, and its number among equal ones of the session. So a further try
    that asks the same finds the answer of an earlier try by its name, and nothing is sampled twice.

    record: completions by the names of their requests, of all tries.
    calls: calls of the present try, by their number.
    exchanges: replies of the present try, by their calls.
    faults: reasons of the tries that ended by a fault.
    counts: how histories came about, by names of metrics.
    repeated: answers that were given again to a client that had lost them.
    """

    id: str
    prompt: Prompt
    record: dict[str, Completion] = field(default_factory=dict)
    prompts: dict[str, Sequence[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    equal: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    repeated: int = 0

    def begin(self) -> None:
        """Begin a try. The record stays."""
        self.calls, self.exchanges, self.equal, self.counts = [], {}, Counter(), Counter()

    def ask(self, messages: list[Message], tools: Any, tokens: tuple[int, ...], given: tuple[Any, Any]) -> Call:
        """Return the next call of this try."""
        digest = hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
        request = Request(f"{self.id}/{digest}/{self.equal[digest]}", tokens)
        self.equal[digest] += 1
        self.calls.append(Call(request, messages, tools, given))
        self.prompts[request.id] = tokens
        return self.calls[-1]

    def number(self, request: str) -> int:
        """Return the number of the call that made this request."""
        return next(number for number, call in enumerate(self.calls) if call.request.id == request)

    def last_equal(self, messages: Any, tools: Any) -> int | None:
        """Return the last call of this try that asked the same; None where there is none."""
        equal = [number for number, call in enumerate(self.calls) if call.given == (messages, tools)]
        return equal[-1] if equal else None

    @property
    def replies(self) -> list[Exchange]:
        return [each for _, each in sorted(self.exchanges.items())]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the model has made in this try."""
        found = (self.record.get(call.request.id) for call in self.calls)
        return sum(len(completion.tokens) for completion in found if completion is not None)

    def trajectory(self, rewards: float | Sequence[Sequence[Any]] | None, error: str | None) -> Trajectory:
        """Return what the session was: the turns of its last try, and, as excluded ones, those of the record that
        this try did not ask for. rewards: a number, or a list of (call, number); None for a session without one."""
        asked = [call.request.id for call in self.calls if call.request.id in self.record]
        events = rewards if isinstance(rewards, Sequence) else ()
        by_call = Counter[int]()
        for call, number in events:
            by_call[call] += number
        turns = []
        for number, call in enumerate(self.calls):
            if call.request.id in self.record:
                turns.append(Turn(call.request.prompt_tokens, self.record[call.request.id], by_call[number]))
        left = [id for id in self.record if id not in asked]
        turns += [Turn(self.prompts[id], self.record[id], excluded="diverged") for id in left]
        whole = sum(by_call.values()) if isinstance(rewards, Sequence) else rewards
        return Trajectory(
            self.id,
            self.prompt,
            tuple(turns),
            self._last_text(),
            float("nan") if whole is None else float(whole),
            error=error,
            events=self._events(turns, error is None),
        )

    def _last_text(self) -> str:
        return self.messages[-1].get("content") or "" if self.exchanges else ""

    @property
    def messages(self) -> list[Message]:
        """Return the messages of the last call and its reply."""
        last = max(self.exchanges)
        return [*self.calls[last].messages, self.exchanges[last].message]

    def _events(self, turns: Sequence[Turn], ended: bool) -> Mapping[str, Any]:
        return {
            "messages": self.messages if self.exchanges else [],
            "tools": self.calls[-1].tools if self.calls else None,
            "turns": [
                {
                    "read": len(turn.prompt_tokens),
                    "tokens": len(turn.completion.tokens),
                    "finish": turn.completion.finish,
                    "reward": turn.reward,
                    **({"excluded": turn.excluded} if turn.excluded else {}),
                }
                for turn in turns
            ],
            "tool_calls": sum(len(each.message.get("tool_calls", ())) for each in self.exchanges.values()),
            "turns_with_tools": sum(bool(call.tools) for call in self.calls),
            "tries": len(self.faults) + ended,
            "faults": list(self.faults),
            **({"repeated": self.repeated} if self.repeated else {}),
            **self.counts,
        }
