"""List the forms of rows that are read as messages: which columns make a form, and which messages its columns make.

To add a form, add an entry to FORMS, and an example to tests/unit/test_forms.py and docs/data.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from isoloss.engine.data.files.values import listed, parse_json, shown
from isoloss.engine.data.messages import WEIGHTS
from isoloss.parallel.runtime.errors import UserError

Messages = list[Any]
# Speakers of ShareGPT. A call of a function is an assistant's message with tool calls.
SPEAKERS = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
CALL = ("function_call", "tool_call")


@dataclass(frozen=True)
class Form:
    """A form of rows.

    name: its name in the banner.
    columns: columns that make the form.
    make: function of the values and the place of a row that returns its messages or raises UserError.
    asks: how columns become messages, for the banner.
    reply: the column of `columns` that is the assistant's last message, if there is one. Prompts do without it.
    more: columns that are read if they are there.
    hidden: columns that belong to the question and that would not be read. A row with one of them is refused.
    """

    name: str
    columns: tuple[str, ...]
    make: Callable[[Mapping[str, Any], str], Messages]
    asks: str
    reply: str | None = None
    more: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def needed(self, prompts: bool) -> tuple[str, ...]:
        """Return the columns that a row has to have. prompts: whether it is a prompt of reinforcement learning."""
        return tuple(name for name in self.columns if not (prompts and name == self.reply))

    def read(self, prompts: bool) -> tuple[str, ...]:
        """Return the columns that are read if they are there."""
        return (*self.needed(prompts), *self.more)

    def line(self, prompts: bool) -> str:
        """Return how rows of the form are read, for the banner."""
        replies = f", {self.reply} -> assistant" if self.reply and not prompts else ""
        return f"{self.name} rows: {self.asks}{replies}"


def texts(values: Mapping[str, Any], place: str, *, question: tuple[str, ...], reply: str) -> Messages:
    """Return the turns of `history`, one of the user with the texts of the columns `question`, and one of the assistant
    with the text of `reply`, if it is there."""
    asked = [text(values[name], name, place) for name in question if values.get(name)]
    messages = pairs(values.get("history") or [], "history", place)
    messages.append({"role": "user", "content": "\n".join(asked)})
    if reply in values:
        messages.append({"role": "assistant", "content": text(values[reply], reply, place)})
    return messages


def text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: `{name}` must be text, not {shown(value)}: write it as text, or drop the row")
    return value


def pairs(value: Any, name: str, place: str) -> Messages:
    """Return the messages of a list of [question, answer]. Raises UserError."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise UserError(f"{place}: `{name}` must be a list of [question, answer], not {shown(value)}")
    return [
        {"role": role, "content": text(entry, f"{name}[{number}]", place)}
        for number, pair in enumerate(value)
        for role, entry in zip(("user", "assistant"), pair)
    ]


def human_and_assistant(values: Mapping[str, Any], place: str) -> Messages:
    """Return the messages of ms-swift's `conversation`, a list of {human, assistant}. Raises UserError."""
    turns = values["conversation"]
    names = ("human", "assistant")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and set(turn) == set(names) for turn in turns):
        raise UserError(f"{place}: `conversation` must be a list of {{human, assistant}}, not {shown(turns)}")
    return pairs([[turn[name] for name in names] for turn in turns], "conversation", place)


def sharegpt(values: Mapping[str, Any], place: str) -> Messages:
    """Return the messages of `conversations`, a list of {from, value} or of {role, content}. Raises UserError."""
    turns = values["conversations"]
    if not isinstance(turns, list):
        raise UserError(f"{place}: `conversations` must be a list of {{from, value}} messages, not {shown(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        where = f"conversations[{number}]"
        if not isinstance(turn, dict) or not ({"from", "value"} <= turn.keys() or {"role"} <= turn.keys()):
            raise UserError(f"{place}: `{where}` must be an object with from and value, not {shown(turn)}")
        if "from" not in turn:
            messages.append(turn)
            continue
        if twice := turn.keys() & {"role", "content"}:
            raise UserError(f"{place}: `{where}` has from, value and {listed(sorted(twice))}: keep one kind of names")
        others = {field: entry for field, entry in turn.items() if field not in ("from", "value")}
        speaker, said = turn["from"], turn["value"]
        if speaker in CALL:
            called = {"role": "assistant", "tool_calls": calls(said, f"{where}.value", place), **others}
            several = number > 0 and turns[number - 1].get("from") in CALL
            messages.append(with_calls(messages.pop(), called, where, place) if several else called)
        elif speaker in SPEAKERS:
            messages.append({"role": SPEAKERS[speaker], "content": said, **others})
        else:
            raise UserError(
                f"{place}: `{where}.from` is {shown(speaker)}: a speaker is one of {', '.join((*SPEAKERS, *CALL))}"
            )
    return messages


def calls(value: Any, name: str, place: str) -> list[Any]:
    """Return the tool calls in a text: JSON of {name, arguments}, or of a list of them. Raises UserError."""
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{place}: `{name}` is {error}: a call is JSON of {{name, arguments}}") from None
    return [
        {"type": "function", "function": call} if isinstance(call, dict) and "function" not in call else call
        for call in (found if isinstance(found, list) else [found])
    ]


def with_calls(before: Mapping[str, Any], message: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
    """Return one message of the assistant with what `before` says and the calls of both: calls in a row are made at
    once, and a chat template would end the turn between two messages.

    where: the name of `message`. Raises UserError for a call that is learned where the other message is not, or not as
    much.
    """
    if weights_of(before) != weights_of(message):
        fields = listed(sorted({*weights_of(before), *weights_of(message)}))
        raise UserError(
            f"{place}: `{where}` is a call of the turn before it, and a turn is learned whole or not: give both the "
            f"same {fields}"
        )
    return {**before, **message, "tool_calls": [*(before.get("tool_calls") or ()), *message["tool_calls"]]}


def weights_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {field: message[field] for field in WEIGHTS if message.get(field) is not None}


def with_functions(values: dict[str, Any], key: str | None, place: str) -> dict[str, Any]:
    """Return a row of OpenAI's older form, with `functions` and messages that have a `function_call`, in the newer one,
    with `tools` and `tool_calls`. Other rows stay as they are. key: the column of the messages. Raises UserError."""
    functions = values.get("functions")
    if not functions or key is None or not isinstance(values[key], list):
        return values
    if values.get("tools"):
        raise UserError(f"{place}: the row has `functions` and `tools`: keep one of them")
    if not isinstance(functions, list):
        raise UserError(f"{place}: `functions` must be a list of JSON schemas of functions, not {shown(functions)}")
    messages = []
    for message in values[key]:
        if isinstance(message, dict) and message.get("function_call"):
            others = {field: entry for field, entry in message.items() if field != "function_call"}
            message = {**others, "tool_calls": [{"type": "function", "function": message["function_call"]}]}
        if isinstance(message, dict) and message.get("role") == "function":
            message = {**message, "role": "tool"}
        messages.append(message)
    tools = [{"type": "function", "function": function} for function in functions]
    others = {name: value for name, value in values.items() if name != "functions"}
    return {**others, key: messages, "tools": tools}


CHOICES = ("context", "passage", "choices", "options")
FORMS = (
    Form(
        "ShareGPT",
        ("conversations",),
        sharegpt,
        "conversations -> messages (human -> user, gpt -> assistant, function_call -> tool_calls, observation -> tool)",
    ),
    Form(
        "human/assistant",
        ("conversation",),
        human_and_assistant,
        "conversation -> messages (human -> user, assistant -> assistant)",
    ),
    Form(
        "Alpaca",
        ("instruction", "output"),
        partial(texts, question=("instruction", "input"), reply="output"),
        "instruction and input, a line each -> user, history -> earlier turns",
        "output",
        ("input", "history"),
        CHOICES,
    ),
    Form(
        "query/response",
        ("query", "response"),
        partial(texts, question=("query",), reply="response"),
        "query -> user, history -> earlier turns",
        "response",
        ("history",),
        CHOICES,
    ),
    Form(
        "question/answer",
        ("question", "answer"),
        partial(texts, question=("question",), reply="answer"),
        "question -> user",
        "answer",
        hidden=CHOICES,
    ),
    Form(
        "problem/solution",
        ("problem", "solution"),
        partial(texts, question=("problem",), reply="solution"),
        "problem -> user",
        "solution",
        hidden=CHOICES,
    ),
)
BY_NAME = {form.name: form for form in FORMS}
COLUMNS = {name for form in FORMS for name in (*form.columns, *form.more)}
