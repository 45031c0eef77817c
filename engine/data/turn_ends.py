"""Find the tokens that end the assistant's turns in a chat template, by rendering example conversations once."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from isoloss.engine.data.chat_template import NOTHING, Template, as_the_template_reads
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class TurnEnds:
    """Token ids that end the assistant's turns in a chat template.

    amid: ids after turns that another message follows.
    last: ids after the last turn of a conversation, as a model generates it.
    follows: whether the id is the first of the next role's header, so that a rendered last turn lacks it (GLM-4.5).
    """

    amid: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    follows: bool = False

    def __bool__(self) -> bool:
        return bool(self.last)


WORD = "Quartz"
ASKED, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}
ANSWERED = {"role": "assistant", "content": WORD}
CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"at": WORD}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "Hello"}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "where"}}, "required": ["at"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": PARAMETERS}}


def ends_of_turns(template: Template, calls: bool) -> TurnEnds:
    """Return the ends of turns that answer, or with `calls` of turns that call tools.

    They are empty if the template has no such token, or refuses such turns.
    """
    return _ends_of_turns(
        template.tokenizer,
        template.text,
        json.dumps(dict(template.kwargs), sort_keys=True),
        bool(template.tools),
        calls,
    )


@lru_cache(maxsize=64)
def _ends_of_turns(tokenizer: Any, text: str, kwargs: str, tools: bool, calls: bool) -> TurnEnds:
    template = Template(tokenizer, "the chat template", [LOOK] if tools else None, json.loads(kwargs))
    talk = [ASKED, CALLED, FOUND, ANSWER] if calls else [ASKED, ANSWERED, ASKED, ANSWER]
    try:
        talk = as_the_template_reads(talk, "messages", template, "")
        alone, continued = template(talk[:2], tokenize=False), template(talk, tokenize=False)
        opening = generation_prompt(template)
    except UserError:  # the template demands what these conversations lack
        alone = continued = opening = ""
    if WORD not in alone or WORD not in continued:
        end = frozenset(() if calls or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        return TurnEnds(end, end)
    special = special_ids(tokenizer) | {tokenizer.eos_token_id}
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    after = encode(alone[alone.rindex(WORD) + len(WORD) :])
    between = continued[continued.rindex(WORD) + len(WORD) :]
    between = encode(between[: between.index("Hello")] if "Hello" in between else between)
    shared = common_prefix(after, between)
    ends = [token for token in after[:shared] if token in special]
    if ends:
        return TurnEnds(frozenset(ends[-1:]), frozenset(ends[-1:]))
    opener = encode(opening)[:1]
    last = [token for token in after if token in special]
    amid = [token for token in between if token in special]
    if last:
        # Turns amid a conversation may end with another token than the last turn, in the same position (gpt-oss).
        in_place = between[shared : shared + 1] == amid[:1] != opener and after[shared : shared + 1] == last[:1]
        return TurnEnds(frozenset(amid[:1] if in_place else ()), frozenset(last[:1]))
    return TurnEnds(frozenset(amid[:1]), frozenset(amid[:1]), True) if amid and amid[:1] != opener else TurnEnds()


def turn_ends(tokenizer: Any, template_kwargs: Mapping[str, Any] = NOTHING) -> dict[str, int]:
    """Return the ids, by token, that end the answers of a model trained on such turns."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        template = Template(tokenizer, "the chat template", None, template_kwargs)
        ends |= ends_of_turns(template, calls=False).last | ends_of_turns(template, calls=True).last
    return {tokenizer.convert_ids_to_tokens(end): end for end in sorted(ends)}


def generation_prompt(template: Template) -> str:
    """Return the text that the template appends to a conversation before the assistant's turn."""
    return _generation_prompt(template.tokenizer, template.text, json.dumps(dict(template.kwargs), sort_keys=True))


@lru_cache(maxsize=64)
def _generation_prompt(tokenizer: Any, text: str, kwargs: str) -> str:
    template = Template(tokenizer, "the chat template", None, json.loads(kwargs))
    without = template([ASKED], tokenize=False)
    prompt = template([ASKED], tokenize=False, add_generation_prompt=True)
    return prompt[common_prefix(without, prompt) :]


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda n: a[: n + 1] != b[: n + 1])


@lru_cache(maxsize=4)
def special_ids(tokenizer) -> frozenset[int]:
    """Return the ids of the tokenizer's special tokens."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
