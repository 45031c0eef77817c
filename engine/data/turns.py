"""A conversation -> its tokens, and which of them are targets.

One rendering gives the tokens. In a second one a word stands at the end of every message, and says where each message
ends in the first. What the template adds before the assistant speaks says where a turn begins; it is rendered once for
every role that a turn can follow. So a row takes as many renderings whatever the number of its turns.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from isoloss.engine.data.chat_template import Template, check_asked
from isoloss.engine.data.messages import Conversation, Messages
from isoloss.engine.data.turn_ends import TurnEnds, ends_of_turns, generation_prompt, in_common, special_ids
from isoloss.parallel.runtime.errors import UserError

TokensAndMask = tuple[list[int], list[bool]]
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize_chat(conversation: Conversation, template: Template) -> TokensAndMask:
    """Token ids [T] and mask [T] of the turns that are learned. UserError names the row and the turn."""
    rendered = Rendered(conversation.messages, template)
    check_asked(conversation.messages, rendered.written, template.place)
    if GENERATION_MARK.search(template.text) and maps_characters(template.tokenizer):
        return marked_turns(conversation, rendered)
    ids, mask_T = list(rendered.text.ids), [False] * len(rendered.text.ids)
    for turn, learned in enumerate(conversation.learned):
        if learned:
            begin, end = rendered.begin(turn), rendered.end(turn)
            if end is None:  # the next role's token, which only a turn that goes on would show
                (last,) = rendered.ends(turn).last
                ids, mask_T, end = [*ids, last], [*mask_T, True], len(ids) + 1
            mask_T[begin:end] = [True] * (end - begin)
    return ids, mask_T


def marked_turns(conversation: Conversation, rendered: "Rendered") -> TokensAndMask:
    """Targets as the template's `{% generation %}` blocks mark them, each with the token that ends it."""
    template = rendered.template
    out = template(conversation.messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask_T = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    ends = rendered.all_ends() or special_ids(template.tokenizer)
    for begin, end in runs(mask_T):
        if ends.isdisjoint(ids[begin:end]):
            if ends.isdisjoint(ids[end : end + 1]):
                raise no_end(template)
            mask_T[end] = True
    for turn, learned in enumerate(conversation.learned):
        if conversation.messages[turn]["role"] == "assistant" and not learned:
            begin, end = rendered.begin(turn), rendered.end(turn) or len(ids)
            mask_T[begin:end] = [False] * (end - begin)
    return ids, mask_T


def runs(mask_T: Sequence[bool]) -> list[tuple[int, int]]:
    """[begin, end) of what is True without a gap."""
    edges = [i for i in range(len(mask_T) + 1) if (i < len(mask_T) and mask_T[i]) != (i > 0 and mask_T[i - 1])]
    return list(zip(edges[::2], edges[1::2]))


# ---- where a turn begins and ends -----------------------------------------------------------------------------------


@dataclass
class Speaks:
    """What stands between the end of a message and the assistant's words where a prompt is rendered.

    seen: how many of its characters turns of the row begin with.
    """

    text: str
    seen: set[int]


class Rendered:
    """The messages of a row as a template renders them."""

    def __init__(self, messages: Messages, template: Template, prompt: bool = False):
        """prompt: with what is added where the assistant is to speak."""
        self.messages, self.template, self._prompt = messages, template, prompt
        self._speaks: dict[str, Speaks] = {}
        self._begins: dict[int, int] = {}

    @cached_property
    def written(self) -> str:
        return self._render(self.messages, self._prompt)

    # A template that marks its turns is asked for neither, unless a turn is not learned.
    @cached_property
    def text(self) -> "Text":
        return Text(self.written, self.template.tokenizer)

    @cached_property
    def _content_ends(self) -> dict[int, int]:
        count = len(self.messages)
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"] + [
            count
        ] * self._prompt
        return self._find_ends({j for i in turns for j in (i - 1, i, i + 1) if 0 <= j < count})

    def _render(self, messages: Messages, prompt: bool = False) -> str:
        return self.template(messages, tokenize=False, add_generation_prompt=prompt)

    def _find_ends(self, wanted: Iterable[int]) -> dict[int, int]:
        """Where the content of messages ends in the text. Those are missing that have none, or whose content the
        template does more with than to write it."""
        wanted = [i for i in wanted if self.messages[i].get("content", "").strip()]
        number = next(n for n in range(10**9) if f"Quartz{n}q" not in self.text.text)
        found = self._ends_together(wanted, f"Quartz{number}q")
        if found is None:
            alone = (self._ends_together([i], f"Quartz{number}q") for i in wanted)
            found = {i: end for ends in alone for i, end in (ends or {}).items()}
        return found

    def _ends_together(self, wanted: Sequence[int], word: str) -> dict[int, int] | None:
        """None where the rendering with words at the ends of these messages is another but for the words."""
        messages = list(self.messages)
        for i in wanted:
            content = messages[i]["content"]
            spoken = content.rstrip()
            messages[i] = messages[i] | {"content": f"{spoken}{word}{i}z{content[len(spoken) :]}"}
        try:
            pieces = re.split(rf"{word}(\d+)z", self._render(messages, self._prompt))
        except UserError:  # the template looks at what a message says
            return None
        found, end = {}, 0
        for piece, number in zip(pieces[::2], pieces[1::2]):
            end += len(piece)
            found[int(number)] = end  # the last place, where a message is written more than once
        same = "".join(pieces[::2]) == self.text.text
        return found if same and found.keys() == set(wanted) else None

    def begin(self, turn: int) -> int:
        """The first token of a turn: what follows the longest beginning that it shares with the prompt before it."""
        return self.text.token_at(self._begin(turn))

    def _begin(self, turn: int) -> int:
        if turn not in self._begins:
            self._begins[turn] = self._first_begin() if turn == 0 else self._find_begin(turn)
        return self._begins[turn]

    def _find_begin(self, turn: int) -> int:
        """In the text. The prompt and the text are compared from where the message before the turn ends: earlier turns
        of the assistant may have lost their thoughts since (Qwen3)."""
        text, before = self.text.text, self._content_ends.get(turn - 1)
        role = self.messages[turn - 1]["role"]
        if before is not None and role in self._speaks:
            speaks = self._speaks[role]
            shared = in_common(speaks.text, text[before : before + len(speaks.text)])
            if shared in speaks.seen:
                return before + whole_tokens(speaks.text, shared, self.template.tokenizer)
        prompt = self._render(self.messages[:turn], prompt=True)
        added = in_common(self._render(self.messages[:turn]), prompt)
        start = own = before or 0
        if in_common(prompt, text) < start:
            own = self._own_end(turn, prompt)
        rest = prompt[own:]
        shared = in_common(rest, text[start : start + len(rest)])
        begin = whole_tokens(rest, shared, self.template.tokenizer)
        # A turn may be rendered without what the prompt ends with, a tag or a thought that it opens, but not without
        # the header of its role.
        if begin < len(rest) and (own + begin <= added or not re.match(r"\s*([<\[]|$)", rest[begin:])):
            raise not_prefix_stable(self.template.place, turn)
        if before is not None and self._speaks.setdefault(role, Speaks(rest, set())).text == rest:
            self._speaks[role].seen.add(shared)
        return start + begin

    def _own_end(self, turn: int, prompt: str) -> int:
        """Where the message before a turn ends in the prompt, of which the text begins otherwise, but not before the
        assistant spoke first."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        before = Rendered(self.messages[:turn], self.template, prompt=True)._content_ends if first < turn else {}
        if turn - 1 not in before or in_common(prompt, self.text.text) < self._content_ends.get(first - 1, 0):
            raise not_prefix_stable(self.template.place, turn)
        return before[turn - 1]

    def _first_begin(self) -> int:
        """Of a turn that nothing stands before: templates are not asked for the prompt of an empty conversation."""
        text, prompt = self.text.text, generation_prompt(self.template)
        content = self.messages[0].get("content", "").strip()
        end = self._content_ends.get(0)
        opening = re.match(r"<[^>]*>|\[[^]]*\]|\w*", prompt)
        start = text.find(opening[0]) if opening and opening[0] else -1
        if start >= 0:
            return start + whole_tokens(prompt, in_common(prompt, text[start:]), self.template.tokenizer)
        if end is None or not text.endswith(content, 0, end):
            raise not_prefix_stable(self.template.place, 0)
        return end - len(content)

    def ends(self, turn: int) -> TurnEnds:
        calls = "tool_calls" in self.messages[turn]
        return (calls and ends_of_turns(self.template, calls=True)) or ends_of_turns(self.template, calls=False)

    def all_ends(self) -> frozenset[int]:
        return frozenset().union(
            *((ends := ends_of_turns(self.template, calls)).amid | ends.last for calls in (False, True))
        )

    def end(self, turn: int) -> int | None:
        """One past the token that ends a turn; None where it would be the first of what follows, and nothing does."""
        ends, last = self.ends(turn), turn == len(self.messages) - 1
        ids = self.text.ids
        begin = self._content_ends.get(turn)
        start = self.begin(turn) if begin is None else self.text.token_at(begin)
        stop = len(ids) if last else self.text.token_at(self._next_content(turn))
        for token in range(start, stop):
            if ids[token] in (ends.last if last else ends.amid):
                self._check_written(turn, token + 1)
                return token + 1
        self._check_written(turn, len(ids))
        if last and ends.follows:
            return None
        raise not_prefix_stable(self.template.place, turn) if ends.last else no_end(self.template)

    def _check_written(self, turn: int, end: int) -> None:
        """UserError where the template leaves out what a turn says or calls. end: one past the turn's last token."""
        message = self.messages[turn]
        text = self.text.text
        written = text[self._begin(turn) : len(text) if self.text.ends is None else self.text.ends[end - 1]]
        answer = message.get("content", "").rpartition("</think>")[2].strip()
        calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls", ())]
        if (turn not in self._content_ends and answer not in written) or not all(name in written for name in calls):
            raise UserError(
                f"{self.template.place}: the chat template does not write all of messages[{turn}], which would be "
                "learned without the rest: fix the row, or chat_template.jinja"
            )

    def _next_content(self, turn: int) -> int:
        """Where what the next message says begins, or at most ends."""
        content = self.messages[turn + 1].get("content", "").strip()
        end = self._content_ends.get(turn + 1, len(self.text.text))
        return end - len(content) if self.text.text.endswith(content, 0, end) else end


def no_end(template: Template) -> UserError:
    return UserError(
        f"{template.place}: the chat template ends the assistant's turns with no special token, or leaves it out of "
        f"its {{% generation %}} marks, so that nothing would teach the model to stop: add eos_token "
        f"({template.tokenizer.eos_token}) to the turns in chat_template.jinja"
    )


def not_prefix_stable(place: str, turn: int) -> UserError:
    return UserError(
        f"{place}: the chat template is not prefix-stable: what it renders before messages[{turn}] is not the start of "
        f"the whole conversation: mark the assistant's turns in chat_template.jinja with {{% generation %}}"
    )


# ---- text and tokens ------------------------------------------------------------------------------------------------


class Text:
    """A text, its token ids, and which token a character is in."""

    def __init__(self, text: str, tokenizer: Any):
        self.text, self._tokenizer = text, tokenizer
        exact = maps_characters(tokenizer)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=exact)
        self.ids: list[int] = list(encoded["input_ids"])
        self.ends = [end for _, end in encoded["offset_mapping"]] if exact else None

    def token_at(self, character: int) -> int:
        """The number of the token that holds a character; the number of tokens for the end of the text."""
        if self.ends is not None:
            return bisect_right(self.ends, character)
        return in_common(self._tokenizer(self.text[:character], add_special_tokens=False)["input_ids"], self.ids)


def whole_tokens(text: str, shared: int, tokenizer: Any) -> int:
    """`shared` characters of a prompt, less those of a token that ends after them: "<" may begin any tag."""
    ends = Text(text, tokenizer).ends if shared < len(text) else None
    return shared if ends is None else ([0, *ends])[bisect_right(ends, shared)]


@lru_cache(maxsize=4)
def maps_characters(tokenizer) -> bool:
    """Whether every character belongs to a token. Byte-level tokenizers with `trim_offsets` give white space to none;
    `load_tokenizer` turns that off."""
    probe = "a  b\n\n c\n d "
    encoded = tokenizer(probe, add_special_tokens=False)
    return tokenizer.is_fast and all(encoded.char_to_token(i) is not None for i in range(len(probe)))
