"""Find calls of tools in what the model said. Malformed calls stay text; calls of unknown names are calls."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from isoloss.engine.rl.algorithms import imported
from isoloss.parallel.runtime.errors import UserError

Call = dict[str, Any]
# From the text of a reply and that of its prompt to the text without calls, and the calls, {name, arguments}.
Parser = Callable[[str, str], tuple[str, Sequence[Call]]]

# The form of Hermes, Qwen2.5 and Qwen3.
HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> tuple[str, list[Call]]:
    """Return the text without its calls, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, and these."""
    calls, rest, end = [], "", 0
    for match in HERMES.finditer(text):
        call = _call(match[1])
        if call is not None:
            calls.append(call)
            rest, end = rest + text[end : match.start()], match.end()
    return (rest + text[end:]).strip() if calls else text, calls


def _call(text: str) -> Call | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    good = isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict)
    return {"name": call["name"], "arguments": call.get("arguments", {})} if good else None


def parser_of(name: str | None) -> Parser | None:
    """Return the parser of agent.tool_parser; None for null. Raises UserError where it cannot be imported."""
    if name is None:
        return None
    function = hermes if name == "hermes" else imported(name, "agent.tool_parser")
    return lambda text, prompt: function(text)


def response_parser(tokenizer: Any) -> Parser | None:
    """Return the parser of the tokenizer's response template; None if it has none."""
    if getattr(tokenizer, "response_template", None) is None:
        return None

    def parse(text: str, prompt: str) -> tuple[str, list[Call]]:
        message = tokenizer.parse_response(text, prefix=prompt)  # templates may write the start of a thought themselves
        functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        return message.get("content") or "", [{"name": f["name"], "arguments": f["arguments"]} for f in functions]

    return parse


# What a parser has to find again in what the chat template writes.
EXAMPLE = {"name": "look_up", "arguments": {"place": "x", "count": 2}}
EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["place", "count"],
        },
    },
}


def check_round_trip(parser: Parser, written: str, prompt: str, key: str) -> None:
    """Raise UserError unless the parser finds EXAMPLE in what the chat template has written for a call of it."""
    try:
        found = list(parser(written, prompt)[1])
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    if found != [EXAMPLE]:
        raise UserError(
            f"{key} does not find the call that the chat template writes: in {written!r} it found {found}, not "
            f"{[EXAMPLE]}: choose the parser of this model's template"
        )
