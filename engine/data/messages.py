"""Check and normalize the messages of a row, and decide which of the assistant's turns are learned.

Fields that the chat template would not read are refused by name: else the row would be trained without them in silence.
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
# Names of one field. A message is renamed to the name that its chat template reads.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Fields that say whether a turn is learned: of OpenAI and Mistral, of axolotl, of ms-swift, of verl and slime.
WEIGHTS = ("weight", "train", "loss", "loss_mask")
SPOKEN_BY = ("role", "name", "id")  # like names that end with `_id`, these may be ignored by a template


@dataclass(frozen=True)
class Conversation:
    """The normalized messages of a row.

    messages: messages without null fields, with content as text and arguments of tool calls as objects.
    learned: for each message, whether it is a turn of the assistant that is learned.
    """

    messages: Messages
    learned: tuple[bool, ...]

    def __add__(self, other: "Conversation") -> "Conversation":
        return Conversation(self.messages + other.messages, self.learned + other.learned)

    def context(self) -> "Conversation":
        """Return the same messages, none of them learned."""
        return replace(self, learned=(False,) * len(self.learned))


def check_messages(value: Any, key: str, place: str) -> Conversation:
    """Return the normalized messages of column `key`.

    Raises UserError, with the field, for a message without `role`, or without both `content` and tool calls.
    """
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
    """Remove the fields of WEIGHTS from a message, and return whether the message may be learned."""
    weights = {field: message.pop(field) for field in WEIGHTS if field in message}
    for field, weight in weights.items():
        if weight not in (0, 1):
            raise UserError(
                f"{place}: `{where}.{field}` must be 0 (a turn that is not learned) or 1, not {shown(weight)}: the "
                "loss has no other weights of turns"
            )
    if len(set(map(bool, weights.values()))) > 1:
        raise UserError(f"{place}: `{where}` has {listed(f'{field}={weights[field]}' for field in weights)}: give one")
    return all(weights.values())


def says_something(message: Message) -> bool:
    """Return whether a turn has content. An empty turn is context and not learned."""
    return any(
        entry.strip() if isinstance(entry, str) else entry for field, entry in message.items() if not says_who(field)
    )


def says_who(field: str) -> bool:
    """Return whether a field names a speaker or a call, and has no content."""
    return field in SPOKEN_BY or field.endswith("_id")


def join_parts(parts: list[Any], key: str, place: str) -> str:
    """Concatenate the texts of content that is a list of parts, {"type": "text", "text": ...}. Raises UserError."""
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
    """Return tool calls whose arguments are objects. Raises UserError."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) and called(call) for call in calls):
        raise UserError(
            f"{place}: `{key}` must be a list of calls, {{function: {{name, arguments}}}}, not {shown(calls)}"
        )

    def parse(arguments: Any, where: str) -> Any:
        # OpenAI's wire format, which agents log, has arguments as JSON text.
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
    """Return whether a call names a function."""
    function = call.get("function", call)
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def map_arguments(call: dict[str, Any], change: Callable[[Any, str], Any], where: str = "") -> dict[str, Any]:
    """Return a call with changed arguments, which are a field of the call or of its `function`."""
    if isinstance(call.get("function"), dict):
        return call | {"function": map_arguments(call["function"], change, f"{where}.function")}
    return call | {"arguments": change(call["arguments"], f"{where}.arguments")} if "arguments" in call else call


def with_arguments_as_text(messages: Messages) -> Messages:
    """Return messages with arguments of tool calls as JSON text, for templates that write arguments unchanged
    (DeepSeek-V3)."""

    def text(arguments: Any, where: str) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    return [
        message | {"tool_calls": [map_arguments(call, text) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_named_by(template: str, messages: Messages, key: str, place: str) -> Messages:
    """Return the messages with thoughts under the name that the template reads.

    template: the text of the template.
    Raises UserError for a role or a field that the template does not read.
    """
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
            others = {field: entry for field, entry in message.items() if field not in THOUGHTS}
            message = others | {thoughts[0]: message[given[0]]}
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
    """Return whether the text of a template names a field or a role: `m.word`, `m['word']`, `"word" in m`."""
    return re.search(rf"""(?:\.\s*|['"]){re.escape(word)}(?!\w)""", template) is not None
