"""Tokenize a conversation, and find the targets among its tokens.

One rendering gives the tokens. A second rendering, with a marker word at the end of every message, gives the positions
where messages end. A turn begins after the generation prompt, which is rendered once per role that a turn can follow.
So the number of renderings does not grow with the number of turns.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from isoloss.engine.data.chat_template import Template, check_asked
from isoloss.engine.data.messages import Conversation, Messages
from isoloss.engine.data.turn_ends import TurnEnds, common_prefix, ends_of_turns, generation_prompt, special_ids
from isoloss.parallel.runtime.errors import UserError

TokensAndMask = tuple[list[int], list[bool]]
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize_chat(conversation: Conversation, template: Template) -> TokensAndMask:
    """Return token ids [T] and the mask [T] of the learned turns. Raises UserError, with the row and the turn."""
    rendered = Rendered(conversation.messages, template)
    check_asked(conversation.messages, rendered.written, template.place)
    if GENERATION_MARK.search(template.text) and maps_characters(template.tokenizer):
        return marked_turns(conversation, rendered)
    ids, mask_T = list(rendered.text.ids), [False] * len(rendered.text.ids)
    for turn, learned in enumerate(conversation.learned):
        if learned:
            begin, end = rendered.begin(turn), rendered.end(turn)
            if end is None:  # the turn ends with the next role's token, which the last turn lacks
                (last,) = rendered.ends(turn).last
                ids, mask_T, end = [*ids, last], [*mask_T, True], len(ids) + 1
            mask_T[begin:end] = [True] * (end - begin)
    return ids, mask_T


def marked_turns(conversation: Conversation, rendered: "Rendered") -> TokensAndMask:
    """Return the targets that the template's `{% generation %}` blocks mark, each block with the token that ends it."""
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
    """Return [begin, end) of every run of True."""
    edges = [i for i in range(len(mask_T) + 1) if (i < len(mask_T) and mask_T[i]) != (i > 0 and mask_T[i - 1])]
    return list(zip(edges[::2], edges[1::2]))


# ---- where a turn begins and ends -----------------------------------------------------------------------------------


@dataclass
class GenerationPrompt:
    """The text between the end of a message of one role and the assistant's words, as a prompt renders it.

    text: the text itself.
    seen: numbers of characters of `text` with which turns of this row were found to begin.
    """

    text: str
    seen: set[int]


class Rendered:
    """Renders the messages of a row, and finds where turns begin and end. prompt: append the generation prompt."""

    def __init__(self, messages: Messages, template: Template, prompt: bool = False):
        self.messages, self.template, self._prompt = messages, template, prompt
        self._prompts: dict[str, GenerationPrompt] = {}  # by the role of the message before
        self._begins: dict[int, int] = {}

    @cached_property
    def written(self) -> str:
        """Return the rendered text."""
        return self._render(self.messages, self._prompt)

    # Computed on demand: a template that marks its turns needs the next two only if a turn is not learned.
    @cached_property
    def text(self) -> "Text":
        """Return the rendered text with its tokens."""
        return Text(self.written, self.template.tokenizer)

    @cached_property
    def _content_ends(self) -> dict[int, int]:
        """Return where the contents of turns and of their neighbours end in the text, by message, if known."""
        count = len(self.messages)
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        turns += [count] * self._prompt
        return self._find_ends({j for i in turns for j in (i - 1, i, i + 1) if 0 <= j < count})

    def _render(self, messages: Messages, prompt: bool = False) -> str:
        return self.template(messages, tokenize=False, add_generation_prompt=prompt)

    def _find_ends(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return where the contents of these messages end in the text, but for those that the template changes."""
        numbers = [i for i in numbers if self.messages[i].get("content", "").strip()]
        suffix = next(n for n in range(10**9) if f"Quartz{n}q" not in self.text.text)
        word = f"Quartz{suffix}q"
        ends = self._ends_together(numbers, word)
        if ends is None:
            ends = {i: end for i in numbers for end in (self._ends_together([i], word) or {}).values()}
        return ends

    def _ends_together(self, numbers: Sequence[int], word: str) -> dict[int, int] | None:
        """Return where these contents end, by a rendering with `word` after each; None if it changes more than that."""
        messages = list(self.messages)
        for i in numbers:
            content = messages[i]["content"]
            stripped = content.rstrip()
            messages[i] = messages[i] | {"content": f"{stripped}{word}{i}z{content[len(stripped) :]}"}
        try:
            pieces = re.split(rf"{word}(\d+)z", self._render(messages, self._prompt))
        except UserError:  # the template depends on the content of a message
            return None
        ends, end = {}, 0
        for piece, number in zip(pieces[::2], pieces[1::2]):
            end += len(piece)
            ends[int(number)] = end  # the last one, if the template writes a message more than once
        same = "".join(pieces[::2]) == self.text.text
        return ends if same and ends.keys() == set(numbers) else None

    def begin(self, turn: int) -> int:
        """Return the first token of a turn: the one after the longest prefix that text and prompt have in common."""
        return self.text.token_at(self._begin(turn))

    def _begin(self, turn: int) -> int:
        if turn not in self._begins:
            self._begins[turn] = self._first_begin() if turn == 0 else self._find_begin(turn)
        return self._begins[turn]

    def _find_begin(self, turn: int) -> int:
        """Return where a turn begins in the text. Raises UserError if the template is not prefix-stable."""
        # Text and prompt are compared from the end of the message before the turn: a template may drop the thoughts of
        # earlier turns once another turn follows (Qwen3).
        text, before = self.text.text, self._content_ends.get(turn - 1)
        role = self.messages[turn - 1]["role"]
        if before is not None and role in self._prompts:
            known = self._prompts[role]
            shared = common_prefix(known.text, text[before : before + len(known.text)])
            if shared in known.seen:
                return before + whole_tokens(known.text, shared, self.template.tokenizer)
        prompt = self._render(self.messages[:turn], prompt=True)
        added = common_prefix(self._render(self.messages[:turn]), prompt)
        start = start_in_prompt = before or 0
        if common_prefix(prompt, text) < start:
            start_in_prompt = self._end_in_prompt(turn, prompt)
        rest = prompt[start_in_prompt:]
        shared = common_prefix(rest, text[start : start + len(rest)])
        begin = whole_tokens(rest, shared, self.template.tokenizer)
        # A turn may lack the end of the prompt, such as a tag or an opened thought, but not the header of its role.
        if begin < len(rest) and (start_in_prompt + begin <= added or not re.match(r"\s*([<\[]|$)", rest[begin:])):
            raise not_prefix_stable(self.template.place, turn)
        if before is not None and self._prompts.setdefault(role, GenerationPrompt(rest, set())).text == rest:
            self._prompts[role].seen.add(shared)
        return start + begin

    def _end_in_prompt(self, turn: int, prompt: str) -> int:
        """Return where the message before a turn ends in a prompt that differs from the text. Raises UserError if the
        two differ before the assistant's first turn already."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        before = Rendered(self.messages[:turn], self.template, prompt=True)._content_ends if first < turn else {}
        if turn - 1 not in before or common_prefix(prompt, self.text.text) < self._content_ends.get(first - 1, 0):
            raise not_prefix_stable(self.template.place, turn)
        return before[turn - 1]

    def _first_begin(self) -> int:
        """Return where a turn that is the first message begins in the text. Raises UserError."""
        # Templates cannot render the prompt of an empty conversation, so the prompt after a user's message serves.
        text, prompt = self.text.text, generation_prompt(self.template)
        content = self.messages[0].get("content", "").strip()
        end = self._content_ends.get(0)
        opening = re.match(r"<[^>]*>|\[[^]]*\]|\w*", prompt)
        start = text.find(opening[0]) if opening and opening[0] else -1
        if start >= 0:
            return start + whole_tokens(prompt, common_prefix(prompt, text[start:]), self.template.tokenizer)
        if end is None or not text.endswith(content, 0, end):
            raise not_prefix_stable(self.template.place, 0)
        return end - len(content)

    def ends(self, turn: int) -> TurnEnds:
        """Return the token ids that may end a turn."""
        calls = "tool_calls" in self.messages[turn]
        return (calls and ends_of_turns(self.template, calls=True)) or ends_of_turns(self.template, calls=False)

    def all_ends(self) -> frozenset[int]:
        """Return the token ids that may end any turn of the template."""
        return frozenset().union(
            *((ends := ends_of_turns(self.template, calls)).amid | ends.last for calls in (False, True))
        )

    def end(self, turn: int) -> int | None:
        """Return one past the token that ends a turn; None if the next role's token ends it and no message follows.

        Raises UserError if no such token is found, or if the template leaves out a part of the turn.
        """
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
        """Raise UserError if the text lacks content or calls of a turn. end: one past the turn's last token."""
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
        """Return the position where the content of the next message begins, or if unknown a later one."""
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
    """A text that is tokenized, with the positions of its tokens.

    ids: token ids.
    ends: for each token the position one past its last character; None if the tokenizer does not map characters.
    """

    def __init__(self, text: str, tokenizer: Any):
        self.text, self._tokenizer = text, tokenizer
        exact = maps_characters(tokenizer)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=exact)
        self.ids: list[int] = list(encoded["input_ids"])
        self.ends = [end for _, end in encoded["offset_mapping"]] if exact else None

    def token_at(self, character: int) -> int:
        """Return the index of the token that holds a character; the number of tokens for the end of the text."""
        if self.ends is not None:
            return bisect_right(self.ends, character)
        return common_prefix(self._tokenizer(self.text[:character], add_special_tokens=False)["input_ids"], self.ids)


def whole_tokens(text: str, shared: int, tokenizer: Any) -> int:
    """Return `shared`, a number of characters of a prompt, reduced to the end of a token."""
    # Of a token such as "<think>" the text may have "<" alone in common, as any tag begins so.
    ends = Text(text, tokenizer).ends if shared < len(text) else None
    return shared if ends is None else ([0, *ends])[bisect_right(ends, shared)]


@lru_cache(maxsize=4)
def maps_characters(tokenizer) -> bool:
    """Return whether every character belongs to a token."""
    # Byte-level tokenizers with `trim_offsets` map white space to no token; `load_tokenizer` turns that off.
    probe = "a  b\n\n c\n d "
    encoded = tokenizer(probe, add_special_tokens=False)
    return tokenizer.is_fast and all(encoded.char_to_token(i) is not None for i in range(len(probe)))
