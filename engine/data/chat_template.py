"""A tokenizer's chat template and what it is given: messages, the tools of a row, data.template_kwargs."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError

from isoloss.engine.config.schema import DATE
from isoloss.engine.data.messages import Messages, as_named_by, with_arguments_as_text
from isoloss.engine.data.rows import one_line, parse_json, shown
from isoloss.engine.data.template_trial import try_templates
from isoloss.models.weights.side_files import sidecars
from isoloss.parallel.runtime.errors import UserError

NOTHING: Mapping[str, Any] = MappingProxyType({})
# In place of the clock that transformers gives templates, which takes only plain values from others. One line, whose
# end is cut off: the template itself is rendered as if it stood alone.
CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set told = namespace(text=format) -%}"
    "{%- for directive, value in of_the_day.items() -%}"
    "{%- set told.text = told.text | replace(directive, value) -%}{%- endfor -%}{{ told.text }}{%- endmacro %}\n"
)
DIRECTIVES = (*"aAwdbBmyYHIpMSfjUWcxXGuV", "-d", "-m", "-H", "-I", "-M", "-S", "-j", "e", "D", "F", "T", "%")


@dataclass(frozen=True)
class Template:
    """What renders the messages of one row: the tokenizer's chat template, with what it is given besides them.

    place: of the row, for messages to the user.
    tools: the row's, None where it has none.
    kwargs: DataConfig.template_variables.
    """

    tokenizer: Any
    place: str
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]

    @property
    def text(self) -> str:
        """UserError where the tokenizer has several templates, and none for rows such as this."""
        try:
            return self.tokenizer.get_chat_template(tools=self.tools)
        except ValueError as error:
            raise UserError(
                f"{self.place}: the tokenizer {self.tokenizer.name_or_path} has no chat template for this row "
                f"({one_line(error)}): name one of them `default` in its folder"
            ) from error

    def __call__(self, messages: Messages, **options):
        """As `apply_chat_template` with these options. UserError where the template refuses the row."""
        variables = {**self.kwargs, **options}
        if DATE in variables:
            day = datetime.fromisoformat(variables.pop(DATE))
            variables |= {
                "chat_template": CLOCK + self.text,
                "of_the_day": {f"%{one}": day.strftime(f"%{one}") for one in DIRECTIVES},
            }
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.tools, **variables)
        except TemplateSyntaxError as error:
            raise UserError(
                f"{self.place}: the chat template of {template_file(self.tokenizer.name_or_path)} is not one "
                f"({one_line(error)} in its line {error.lineno - (DATE in self.kwargs)}): fix it there, as no row can "
                "be rendered"
            ) from error
        except Exception as error:  # a template is somebody's program: which errors rows lead it into, nobody knows
            reason = one_line(error)
            raise UserError(
                f"{self.place}: the chat template refuses these messages ({reason}): fix the row"
            ) from error


def template_file(folder: str) -> Path:
    """Where a tokenizer has its chat template: the file of its own, which transformers prefers, or a field."""
    file = Path(folder) / "chat_template.jinja"
    return file if file.is_file() else file.with_name("tokenizer_config.json")


def render(messages: Messages, template: Template, prompt: bool = False) -> tuple[str, list[int]]:
    """(text, token ids) of a conversation; `prompt` adds what comes before the assistant's next turn."""
    text = template(messages, tokenize=False, add_generation_prompt=prompt)
    check_asked(messages, text, template.place)
    return text, list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def check_asked(messages: Messages, text: str, place: str) -> None:
    """UserError for a message that the template passes over, which the model would not see. The assistant's may lose
    their thoughts, and `turns` looks at those that are learned."""
    for number, message in enumerate(messages):
        content = message.get("content", "").strip()
        if message["role"] == "assistant" or content in text:
            continue
        if any(word not in text for word in re.findall(r"\w+", content)):  # it may be written in quotes, or escaped
            raise UserError(
                f"{place}: the chat template does not write the message {number} of the role {message['role']}: take "
                "it out, or use a template that knows such messages"
            )


def as_the_template_reads(messages: Messages, key: str, template: Template, otherwise: str) -> Messages:
    """The messages with the template's names of their fields, and with arguments of tool calls as objects, or as JSON
    text where it takes text.

    otherwise: what rows can do without a template. Raises UserError where there is none, and for a role or field that
    it would not read.
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
    """UserError where the files of a tokenizer give something else than a text, or named texts, as its template, or one
    that takes all time or memory: it is tried in a process with limits."""
    found = tokenizer.chat_template
    texts = list(found.values()) if isinstance(found, dict) else [] if found is None else [found]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise UserError(f"tokenizer: {folder}: a chat template must be text, not {shown(wrong[0])}: fix its files")
    try_templates(texts, folder)


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer) -> None:
    """UserError for a key of data.template_kwargs that would not reach the chat template, or that it does not read."""
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
    """Whether a chat template in a tokenizer's folder does."""
    files = [folder / name for name in sidecars(folder) if "template" in name or name == "tokenizer_config.json"]
    return any(DATE.encode() in path.read_bytes() for path in files)


def check_tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """The `tools` of a row: JSON schemas of functions, as chat templates take them; or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise UserError(f"{place}: `tools` is {error}: fix it") from None
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return value
    raise UserError(f"{place}: `tools` must be a list of JSON schemas of functions, not {shown(value)}")


def refuse_tools(template: Template, key: str) -> None:
    """UserError where a row has tools and no messages: no template would tell the model of them."""
    if template.tools:
        raise UserError(
            f"{template.place}: `tools` reaches the model through the chat template, and `{key}` is plain text: give "
            "messages, or take `tools` out of the row"
        )
