"""Find where a completion ends because of its text: at the first token after which the text holds a given string."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from isoloss.engine.data.chat import load_tokenizer

BAD = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one

Decode = Callable[[Sequence[int]], str]


def ends_in(tokens: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Return whether the text of the tokens holds one of the strings, given that it held none before the last token.

    Only the end of the text is decoded. Decoded from the middle a text may begin otherwise, with half a character or
    without its space: so it goes back to whole characters before the last token, as many as the longest string has.
    """
    longest = max(map(len, stops))
    count = longest + 1
    while count < len(tokens):
        before = decode(tokens[-count:-1]).rstrip(BAD)  # the last token may complete a character
        if len(before) > longest and BAD not in before[-longest:]:
            break
        count *= 2
    text = decode(tokens[-count:])
    return any(stop in text for stop in stops)


class TokenizerText:
    """The text of tokens, by the tokenizer of a folder, which is loaded when it is first asked for."""

    def __init__(self, folder: Path, vocab_size: int):
        self._folder, self._vocab_size = folder, vocab_size

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text, special tokens included. Raises UserError where the folder has no tokenizer."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self._folder), self._vocab_size)
