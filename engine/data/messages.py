"""The messages of a row, as every chat template takes them, and which of the assistant's turns are learned.

What a template would not read is refused by name: it would be trained without a word.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from isoloss.engine.data.rows import listed, parse_json, shown
from isoloss.parallel.runtime.errors import UserError

Message = dict[str, Any]
Messages = list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Names of one field: the template's own is given to it.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Whether a turn is learned: OpenAI's and Mistral's name, axolotl's, ms-swift's, and verl's with slime's.
WEIGHTS = ("weight", "train", "loss", "loss_mask")
SPOKEN_BY = ("role", "name", "id")  # and names that end with `_id`: nothing is lost where a template leaves them out


@dataclass(frozen=True)
class Conversation:
    """messages: without null fields, content as text, arguments of tool calls as objects.
    learned: of each message, whether it is a turn of the assistant that may hold targets."""

    messages: Messages
    learned: tuple[bool, ...]

    def __add__(self, other: "Conversation") -> "Conversation":
        return Conversation(self.messages + other.messages, self.learned + other.learned)

    def context(self) -> "Conversation":
        """The same, of which nothing is learned."""
        return replace(self, learned=(False,) * len(self.learned))


def check_messages(value: Any, key: str, place: str) -> Conversation:
    """`role` and `content` are required; a tool call may go without content. UserError names the message's field."""
    if not isinstance(value, list) or not value:
        kinds = "text or a list" if key in ("prompt", "completion") else "a list"
        raise UserError(f"{place}: `{key}` must be {kinds} of {{role, content}} messages, not {shown(value)}")
    messages, learned = [], []
    for number, message in enumerate(value):
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            raise UserError(f"{place}: `{where}` must be an object with role and content, not {shown(message)}")
        message = {field: entry for field, entry in message.items() if entry is not None}
        weight = take_weight(message, where, place)
        if message.get("content") and isinstance(message["content"], list):
            message["content"] = join_parts(message["content"], f"{where}.content", place)
        if not message.get("tool_calls", True):
            del message["tool_calls"]
        for field in ("role", "content"):
            if field == "content" and "content" not in message and "tool_calls" in message:
                continue
            if not isinstance(message.get(field), str):
                raise UserError(f"{place}: `{where}.{field}` must be text, not {shown(message.get(field))}")
        if "tool_calls" in message:
            message["tool_calls"] = check_calls(message["tool_calls"], f"{where}.tool_calls", place)
        messages.append(message)
        learned.append(message["role"] == "assistant" and weight and says_something(message))
    return Conversation(messages, tuple(learned))


def take_weight(message: Message, where: str, place: str) -> bool:
    """Whether a message may be learned; what says so is taken out of it."""
    given = {field: message.pop(field) for field in WEIGHTS if field in message}
    for field, weight in given.items():
        if weight not in (0, 1):
            raise UserError(
                f"{place}: `{where}.{field}` must be 0 (a turn that is not learned) or 1, not {shown(weight)}: the "
                "loss has no other weights of turns"
            )
    if len(set(map(bool, given.values()))) > 1:
        raise UserError(f"{place}: `{where}` has {listed(f'{field}={given[field]}' for field in given)}: give one")
    return all(given.values())


def says_something(message: Message) -> bool:
    """Whether the turn is more than its end: an empty one is context."""
    return any(
        entry.strip() if isinstance(entry, str) else entry for field, entry in message.items() if not says_who(field)
    )


def says_who(field: str) -> bool:
    return field in SPOKEN_BY or field.endswith("_id")


def join_parts(parts: list[Any], key: str, place: str) -> str:
    """The text of content that is given as a list of parts, {"type": "text", "text": ...}, without anything between."""
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if weights := [field for field in WEIGHTS if isinstance(part, dict) and part.get(field) is not None]:
            raise UserError(
                f"{place}: `{key}[{number}].{weights[0]}` would not be obeyed: a turn is learned whole or not; give "
                "it to the message"
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {listed([str(kind)])!r}" if kind else shown(part)
            raise UserError(
                f"{place}: `{key}[{number}]` must be a part of text, {{type: text, text: ...}}, not {what}: isoloss "
                "trains on text alone; take the part or the row out"
            )
    return "".join(part["text"] for part in parts)


def check_calls(calls: Any, key: str, place: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: OpenAI's wire form, which agents log, has them as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) and called(call) for call in calls):
        raise UserError(
            f"{place}: `{key}` must be a list of calls, {{function: {{name, arguments}}}}, not {shown(calls)}"
        )

    def parse(arguments: Any, where: str) -> Any:
        value = {} if arguments is None else arguments
        try:
            if isinstance(value, str):
                value = parse_json(value) if value.strip() else {}
        except ValueError as error:
            raise UserError(f"{place}: `{where}` is {error}: fix the call, or take the row out") from None
        if not isinstance(value, dict):
            raise UserError(f"{place}: `{where}` must be a JSON object, not {shown(value)}: fix the call")
        return value

    return [map_arguments(call, parse, f"{key}[{number}]") for number, call in enumerate(calls)]


def called(call: dict[str, Any]) -> bool:
    """Whether a call says of what function."""
    function = call.get("function", call)
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def map_arguments(call: dict[str, Any], change: Callable[[Any, str], Any], where: str = "") -> dict[str, Any]:
    """A call with other arguments, whether they stand in it or in its `function`."""
    if isinstance(call.get("function"), dict):
        return call | {"function": map_arguments(call["function"], change, f"{where}.function")}
    return call | {"arguments": change(call["arguments"], f"{where}.arguments")} if "arguments" in call else call


def with_arguments_as_text(messages: Messages) -> Messages:
    """For templates that write arguments as they are given (DeepSeek-V3): JSON text, as OpenAI's wire form has it."""

    def text(arguments: Any, where: str) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    return [
        message | {"tool_calls": [map_arguments(call, text) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_named_by(template: str, messages: Messages, key: str, place: str) -> Messages:
    """The messages, thoughts by the name that the template has for them. template: its text. UserError for a role or a
    field that it would not read."""
    thoughts = [name for name in THOUGHTS if names(template, name)]
    renamed = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not names(template, role):
            raise UserError(
                f"{place}: `{key}[{number}].role` is {listed([role], 40)!r}, which the chat template does not name: a "
                f"role is one of {', '.join(ROLES)}"
            )
        given = [field for field in THOUGHTS if message.get(field)]
        if wrong := [field for field in given if not isinstance(message[field], str)]:
            raise UserError(f"{place}: `{key}[{number}].{wrong[0]}` must be text, not {shown(message[wrong[0]])}")
        if len(thoughts) == 1 and given:
            if len({message[field] for field in given}) > 1:
                raise UserError(f"{place}: `{key}[{number}]` has several thoughts, {listed(given)}: keep one of them")
            kept = {field: entry for field, entry in message.items() if field not in THOUGHTS}
            message = kept | {thoughts[0]: message[given[0]]}
        renamed.append(message)
        for field, entry in message.items():
            if entry not in ("", [], {}) and field != "content" and not says_who(field) and not names(template, field):
                raise UserError(
                    f"{place}: `{key}[{number}].{field}` is not read by the chat template, so the model would not see "
                    "it: take the field out, or use a template that reads it"
                )
    return renamed


@lru_cache(maxsize=256)
def names(template: str, word: str) -> bool:
    """Whether the text of a template has a field, or a role, by name: `m.word`, `m['word']`, `"word" in m`."""
    return re.search(rf"""(?:\.\s*|['"]){re.escape(word)}(?!\w)""", template) is not None
