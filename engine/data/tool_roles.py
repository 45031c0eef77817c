"""Read messages with ms-swift's roles `tool_call` and `tool_response` as the assistant's calls and results of tools."""

from collections.abc import Mapping
from typing import Any

from isoloss.engine.data.files.values import shown
from isoloss.engine.data.forms import Messages, calls, with_calls
from isoloss.engine.data.messages import called
from isoloss.parallel.runtime.errors import UserError

CALL, RESULT = "tool_call", "tool_response"
TOOL_ROLES = f"{CALL} -> tool_calls of the assistant, {RESULT} -> tool"


def with_tool_roles(values: dict[str, Any], key: str | None, place: str) -> tuple[dict[str, Any], bool]:
    """Return a row's values with messages of these roles in the standard ones, and whether there were any.

    A call belongs to the assistant's message right before it, or begins one: calls in a row are made at once.
    key: the column of the messages; None if the row has none.
    Raises UserError for a call that is not JSON of {name, arguments}, a result that is no text, and a call that is
    learned where the message that it belongs to is not.
    """
    given = values[key] if key is not None else None
    if not isinstance(given, list) or not any(role_of(message) in (CALL, RESULT) for message in given):
        return values, False
    messages: Messages = []
    for number, message in enumerate(given):
        where = f"{key}[{number}]"
        if role_of(message) == CALL:
            add_call(messages, message, where, place)
        elif role_of(message) == RESULT:
            if not isinstance(message.get("content"), str):
                raise UserError(
                    f"{place}: `{where}.content`, the result of a tool, must be text, such as JSON text, not "
                    f"{shown(message.get('content'))}: write it as text"
                )
            messages.append({**message, "role": "tool"})
        else:
            messages.append(message)
    return {**values, str(key): messages}, True


def add_call(messages: Messages, message: Mapping[str, Any], where: str, place: str) -> None:
    """Add the call of a message to the assistant's message that `messages` ends with, or in one of its own."""
    found = calls(message.get("content"), f"{where}.content", place)
    if not found or not all(isinstance(call, dict) and called(call) for call in found):
        raise UserError(
            f"{place}: `{where}.content` is {shown(message.get('content'))}: a call is JSON of {{name, arguments}}: "
            "fix it, or drop the row"
        )
    others = {field: entry for field, entry in message.items() if field not in ("role", "content")}
    made = {"role": "assistant", **others, "tool_calls": found}
    if messages and role_of(messages[-1]) == "assistant":
        messages[-1] = with_calls(messages[-1], made, where, place)
    else:
        messages.append(made)


def role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
