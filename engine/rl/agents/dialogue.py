"""Between messages and tokens. What the model made is never decoded and encoded again."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.engine.data.chat import encode
from isoloss.engine.data.chat_template import Template, as_the_template_reads, check_tools, render
from isoloss.engine.data.messages import check_messages
from isoloss.engine.rl.agents.tool_calls import (
    EXAMPLE,
    EXAMPLE_TOOL,
    check_round_trip,
    parser_of,
    response_parser,
)
from isoloss.engine.rl.reward.answer import bare
from isoloss.engine.rl.trajectory import Completion
from isoloss.parallel.runtime.errors import UserError

Message = dict[str, Any]
MARK = "a reply 7f3a91c2 that stands here"  # in place of a reply, to see what the template writes behind one


@dataclass(frozen=True)
class Exchange:
    """A reply and what stood before it.

    messages: `canonical` of the tools and the conversation, with the reply at its end.
    tokens: tokens that the model read and made. stopped: whether a stop token is at their end.
    message: the reply.
    """

    messages: tuple[str, ...]
    tokens: tuple[int, ...]
    stopped: bool
    message: Message


class Dialogue:
    """A tokenizer's chat template, and the parser of its calls of tools.

    variables: DataConfig.template_variables.
    history: agent.history.
    tool_parser: agent.tool_parser.
    Raises UserError where the parser does not find a call that the template writes.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any], history: str, tool_parser: str | None):
        self._tokenizer, self._variables, self._history = tokenizer, variables, history
        self._parser = parser_of(tool_parser) or response_parser(tokenizer)
        if self._parser is not None:
            key = f"agent.tool_parser={tool_parser}" if tool_parser else "the tokenizer's response template"
            check_round_trip(self._parser, *self._written_call(), key)

    def prompt(
        self, messages: Sequence[Message], tools: Any, exchanges: Sequence[Exchange], counts: Counter[str]
    ) -> tuple[list[Message], tuple[int, ...]]:
        """Return the messages in their normal form, and the tokens that the model is to read.

        exchanges: replies of the session so far, the oldest first.
        counts: how the history came about, by names of metrics; one is added.
        Raises UserError for messages that the template cannot write.
        """
        template = Template(self._tokenizer, "chat", check_tools(tools, "chat"), self._variables)
        if template.tools and self._parser is None:
            raise UserError(
                "chat: `tools` are given, and nothing finds calls in the replies: the tokenizer has no response "
                "template, so set agent.tool_parser"
            )
        normal = list(check_messages(list(messages), "messages", "chat").messages)
        if normal[-1]["role"] == "assistant":
            raise UserError("chat: `messages` ends with the assistant's turn, which is what is to be generated")
        read = as_the_template_reads(normal, "messages", template, "use a model with a chat template")
        tokens = tuple(render(read, template, prompt=True)[1])
        asked = canonical(normal, template.tools)
        before = [each for each in exchanges if asked[: len(each.messages)] == each.messages]
        if not before:
            return normal, tokens
        last = max(before, key=lambda each: len(each.messages))
        if tokens[: len(last.tokens)] == last.tokens:
            counts["turns_appended"] += 1
            return normal, tokens
        behind = self._behind(read, len(last.messages) - 2, template, last) if self._history == "append" else None
        if behind is None:
            counts["turns_branched"] += 1
            return normal, tokens
        counts["turns_spliced"] += 1
        return normal, (*last.tokens, *behind)

    def reply(self, completion: Completion, prompt_tokens: Sequence[int], tools: Any, call: int) -> Message:
        """Return the message of a completion, with the calls of tools that it has if there are tools.

        call: number of the call in the session, for ids of the calls of tools.
        """
        tokens = list(completion.tokens[:-1] if completion.finish == "stop" else completion.tokens)
        plain = self._decode(tokens, skip_special_tokens=True)
        if tools and self._parser is not None:
            # With special tokens: some models write calls by them.
            text, calls = self._parser(self._decode(tokens), self._decode(list(prompt_tokens)))
            if calls:
                functions = [{"name": each["name"], "arguments": json.dumps(each["arguments"])} for each in calls]
                entries = [
                    {"id": f"call_{call}_{number}", "type": "function", "function": function}
                    for number, function in enumerate(functions)
                ]
                return {"role": "assistant", "content": bare(text, self._tokenizer), "tool_calls": entries}
        return {"role": "assistant", "content": plain}

    def normal_form(self, messages: Sequence[Message], tools: Any) -> tuple[str, ...]:
        """Return `canonical` of a conversation that ends with a reply of `reply`."""
        return canonical(check_messages(list(messages), "messages", "chat").messages, check_tools(tools, "chat"))

    def _decode(self, tokens: list[int], **options: bool) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False, **options)

    def _behind(self, read: Sequence[Message], at: int, template: Template, last: Exchange) -> list[int] | None:
        """Return the tokens that the template writes behind the reply at messages[at]; None if that is not to be
        seen."""
        reply = {"role": "assistant", "content": MARK}
        try:
            text = render([*read[:at], reply, *read[at + 1 :]], template, prompt=True)[0]
        except UserError:  # such as an answer of a tool behind a reply without its call
            return None
        _, mark, behind = text.partition(MARK)
        if not mark or MARK in behind:
            return None
        if last.stopped:  # the stop token was sampled: the template's is the same one
            stop = self._decode([last.tokens[-1]])
            if not behind.startswith(stop):
                return None
            behind = behind[len(stop) :]
        return encode(self._tokenizer, behind, special=False)

    def _written_call(self) -> tuple[str, str]:
        """Return what the template writes for a reply that calls EXAMPLE, and the prompt before it."""
        template = Template(self._tokenizer, "agent.tool_parser", [EXAMPLE_TOOL], self._variables)
        question: Message = {"role": "user", "content": "Where?"}
        calls = [{"id": "call_0_0", "type": "function", "function": EXAMPLE}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        messages = as_the_template_reads([question, turn], "messages", template, "use a model with a chat template")
        prompt = template([question], tokenize=False, add_generation_prompt=True)
        whole = template(messages, tokenize=False)
        return (whole[len(prompt) :] if whole.startswith(prompt) else whole), prompt


def canonical(messages: Sequence[Message], tools: Any) -> tuple[str, ...]:
    """Return texts, of the tools and of each message, that are equal for messages that say the same: without ids of
    calls. messages: in normal form."""

    def known(value: Any) -> Any:
        if isinstance(value, Mapping):
            kept = {k: v for k, v in value.items() if not (k == "id" or k.endswith("_id")) and v not in (None, "", [])}
            return {key: known(each) for key, each in kept.items()}
        return [known(each) for each in value] if isinstance(value, list) else value

    return (json.dumps(tools, sort_keys=True), *(json.dumps(known(message), sort_keys=True) for message in messages))
