"""Render messages by a tokenizer's chat template, with the tools of a row and data.template_kwargs.

A chat template is a program of a stranger, so it is tried in a process with limits before it renders a row.
"""

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError

from isoloss.engine.config.data_config import DATE
from isoloss.engine.data.messages import Messages, as_named_by, with_arguments_as_text
from isoloss.engine.data.rows import one_line, parse_json, shown
from isoloss.models.weights.side_files import sidecars
from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

NOTHING: Mapping[str, Any] = MappingProxyType({})
# Replaces the clock that transformers gives to templates. A macro, as transformers passes on only plain values. On one
# line whose end is trimmed, so that the template after it is rendered as if it stood alone.
CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set result = namespace(text=format) -%}"
    "{%- for directive, value in date_directives.items() -%}"
    "{%- set result.text = result.text | replace(directive, value) -%}{%- endfor -%}{{ result.text }}{%- endmacro %}\n"
)
DIRECTIVES = (*"aAwdbBmyYHIpMSfjUWcxXGuV", "-d", "-m", "-H", "-I", "-M", "-S", "-j", "e", "D", "F", "T", "%")
# Limits of a template's trial, for conversations of a few words.
TRIAL = Path(__file__).with_name("template_render.py")
SECONDS, MEMORY, TEXT = 10, 1 << 30, 64 << 20  # seconds of a processor; bytes; characters of output
PATIENCE = 600.0  # seconds by the clock, as SECONDS of a processor may take that long on a busy machine


@dataclass(frozen=True)
class Template:
    """Renders the messages of one row by the tokenizer's chat template.

    place: the row's place, for messages to the user.
    tools: the row's tools; None if it has none.
    kwargs: DataConfig.template_variables.
    """

    tokenizer: Any
    place: str
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the template's source. Raises UserError if the tokenizer has several, none of them for such a row."""
        try:
            return self.tokenizer.get_chat_template(tools=self.tools)
        except ValueError as error:
            raise UserError(
                f"{self.place}: the tokenizer {self.tokenizer.name_or_path} has no chat template for this row "
                f"({one_line(error)}): name one of them `default` in its folder"
            ) from error

    def __call__(self, messages: Messages, **options):
        """Return `apply_chat_template(messages, **options)`. Raises UserError if the template refuses the row."""
        variables = {**self.kwargs, **options}
        if DATE in variables:
            day = datetime.fromisoformat(variables.pop(DATE))
            variables |= {
                "chat_template": CLOCK + self.text,
                "date_directives": {f"%{letter}": day.strftime(f"%{letter}") for letter in DIRECTIVES},
            }
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.tools, **variables)
        except TemplateSyntaxError as error:
            raise UserError(
                f"{self.place}: the chat template of {template_file(self.tokenizer.name_or_path)} is not one "
                f"({one_line(error)} in its line {error.lineno - (DATE in self.kwargs)}): fix it there, as no row can "
                "be rendered"
            ) from error
        except Exception as error:  # a template is a program, and can fail with any error
            reason = one_line(error)
            raise UserError(
                f"{self.place}: the chat template refuses these messages ({reason}): fix the row"
            ) from error


def template_file(folder: str) -> Path:
    """Return the file that holds a tokenizer's chat template."""
    # transformers prefers chat_template.jinja to the field of tokenizer_config.json.
    file = Path(folder) / "chat_template.jinja"
    return file if file.is_file() else file.with_name("tokenizer_config.json")


def render(messages: Messages, template: Template, prompt: bool = False) -> tuple[str, list[int]]:
    """Return (text, token ids) of a conversation. prompt: append what precedes the assistant's next turn."""
    text = template(messages, tokenize=False, add_generation_prompt=prompt)
    check_asked(messages, text, template.place)
    return text, list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def check_asked(messages: Messages, text: str, place: str) -> None:
    """Raise UserError if the rendered `text` lacks a message: the model would not see it.

    Turns of the assistant are not checked here: templates may drop thoughts, and `turns` checks the learned turns.
    """
    for number, message in enumerate(messages):
        content = message.get("content", "").strip()
        if message["role"] == "assistant" or content in text:
            continue
        if any(word not in text for word in re.findall(r"\w+", content)):  # content may be quoted or escaped
            raise UserError(
                f"{place}: the chat template does not write the message {number} of the role {message['role']}: take "
                "it out, or use a template that knows such messages"
            )


def as_the_template_reads(messages: Messages, key: str, template: Template, otherwise: str) -> Messages:
    """Return the messages of column `key` with the field names that the template reads.

    Arguments of tool calls stay objects, or become JSON text if the template fails on objects.

    otherwise: a hint for rows of a tokenizer without a template.
    Raises UserError if there is no template, or if it does not read a role or a field.
    """
    tokenizer, place = template.tokenizer, template.place
    if not tokenizer.chat_template:
        raise UserError(
            f"{place}: messages need a chat template and the tokenizer {tokenizer.name_or_path} has none: "
            f"add chat_template.jinja to its folder, or {otherwise}"
        )
    messages = as_named_by(template.text, messages, key, place)
    if any("tool_calls" in message for message in messages):
        try:
            template(messages, tokenize=False)
        except UserError as refusal:
            messages = with_arguments_as_text(messages)
            try:
                template(messages, tokenize=False)
            except UserError:
                raise refusal from None
    return messages


def check_templates(tokenizer, folder: str) -> None:
    """Raise UserError if a template of a tokenizer is not text, or takes too much time or memory."""
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [] if templates is None else [templates]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise UserError(f"tokenizer: {folder}: a chat template must be text, not {shown(wrong[0])}: fix its files")
    try_templates(texts, folder)


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer) -> None:
    """Raise UserError for a key of data.template_kwargs that the chat template does not get, or does not read."""
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents", "kwargs"}
    templates = tokenizer.chat_template or ""
    text = templates if isinstance(templates, str) else "\n".join(templates.values())
    for key in kwargs:
        if key == DATE:
            raise UserError(f"data.template_kwargs.{key} is the clock of chat templates: set data.date instead")
        if key in own | {"messages"}:
            raise UserError(f"data.template_kwargs.{key} is not for the user to choose: take it out")
        if not re.search(rf"\b{re.escape(key)}\b", text):
            raise UserError(
                f"data.template_kwargs.{key} is not read by the chat template of {tokenizer.name_or_path}: correct the "
                "name, or take it out"
            )


def asks_for_the_date(folder: Path) -> bool:
    """Return whether a chat template in a tokenizer's folder reads the date."""
    files = [folder / name for name in sidecars(folder) if "template" in name or name == "tokenizer_config.json"]
    return any(DATE.encode() in path.read_bytes() for path in files)


def check_tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """Return the `tools` of a row, JSON schemas of functions: a list, whose entries may be JSON text, or JSON text of
    one. Raises UserError."""
    value = _parsed(value, "tools", place)
    if value is None:
        return None
    if not isinstance(value, list):
        raise UserError(f"{place}: `tools` must be a list of JSON schemas of functions, not {shown(value)}")
    tools = [_parsed(tool, f"tools[{number}]", place) for number, tool in enumerate(value)]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UserError(f"{place}: `tools[{number}]` must be a JSON schema of a function, not {shown(tool)}")
    return tools


def _parsed(value: Any, name: str, place: str) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{place}: `{name}` is {error}: fix it") from None


def refuse_tools(template: Template, key: str) -> None:
    """Raise UserError if a row of plain text has tools: without a template they do not reach the model."""
    if template.tools:
        raise UserError(
            f"{template.place}: `tools` reaches the model through the chat template, and `{key}` is plain text: give "
            "messages, or take `tools` out of the row"
        )


# ---------------------------------------------------------------------------------------------------------------- trial


def try_templates(texts: Iterable[str], folder: str) -> None:
    """Raise UserError if one of these templates exceeds SECONDS, MEMORY or TEXT for a conversation of a few words.

    Other faults of a template are left to the rendering of a row.
    """
    for text in texts:
        if limit := _exceeded(text):
            raise UserError(
                f"tokenizer: {folder}: its chat template takes {limit} for a conversation of a few words: copy it "
                "again from the model's source, and do not use it if it is the same there"
            )


@cache
def _exceeded(text: str) -> str | None:
    """Render a template in another process; return the limit that it exceeds, None if it exceeds none."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        limits = [str(limit) for limit in (SECONDS, MEMORY, TEXT)]
        helper = Helper(
            [sys.executable, "-I", str(TRIAL), str(file.fileno()), *limits],
            stdout=subprocess.DEVNULL,
            pass_fds=[file.fileno()],
            env=environment.of_other_programs(),
        )
        try:
            status = helper.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            helper.kill()
    if status == 0:
        return None
    if status == os.EX_SOFTWARE:
        return f"more than {MEMORY >> 30} GiB of memory, or makes more than {TEXT >> 20} MiB of text,"
    return f"more than {SECONDS} seconds" if status < 0 else None
